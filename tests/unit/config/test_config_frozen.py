"""The frozen config: complete, plain, and read back typed."""

from __future__ import annotations

import json

import pytest
from omegaconf import DictConfig, OmegaConf

from echofree.config import frozen
from echofree.config.compose import compose
from echofree.config.schema import Precision
from echofree.config.show import effective
from echofree.errors import ConfigError


@pytest.fixture(scope="module")
def config() -> DictConfig:
    return compose(["train.precision=bf16", "optim.eps=1e-12", "name=frozen"]).config


def test_freeze_gives_plain_resolved_containers(config):
    plain = frozen.freeze(config)
    assert json.loads(json.dumps(plain)) == plain
    assert plain["train"]["precision"] == "bf16"
    assert plain["optim"]["eps"] == 1e-12
    assert plain["data"]["seed"] == 0  # ${seed}
    assert "${" not in json.dumps(plain)


def test_thaw_undoes_freeze(config):
    plain = frozen.freeze(config)
    thawed = frozen.thaw(plain)
    assert thawed.train.precision is Precision.bf16
    assert frozen.freeze(thawed) == plain
    with pytest.raises(Exception, match="nothing"):
        thawed.nothing = 3  # closed as before


def test_a_file_reads_back_equal(config, tmp_path):
    (tmp_path / "config.yaml").write_text(frozen.dump(config))
    assert frozen.freeze(frozen.load(tmp_path)) == frozen.freeze(config)


def test_thaw_tells_every_unknown_key_and_wrong_value(config):
    plain = frozen.freeze(config)
    plain["train"]["epoch"] = 3
    plain["optim"]["lr"] = "much"
    plain["extra"] = 1
    del plain["model"]
    with pytest.raises(ConfigError) as caught:
        frozen.thaw(plain, "somewhere/config.yaml")
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 4
    assert "somewhere/config.yaml: train.epoch=3 is a key this version doesn't know. Nearest: train.epochs" in text
    assert "optim.lr=much isn't valid" in text
    assert "extra=1 is a key this version doesn't know" in text
    assert "model is missing" in text


def test_the_digest_is_over_everything_that_is_computed(config):
    plain = frozen.freeze(config)
    same = frozen.digest(plain)
    assert frozen.digest(config) == same
    for changed in ({"name": "other"}, {"output_root": "x"}, {"resume": "auto"}):
        assert frozen.digest({**plain, **changed}) == same
    for changed in ({"seed": 1}, {"train": {**plain["train"], "log_every": 11}}, {"model": {}}):
        assert frozen.digest({**plain, **changed}) != same


def test_a_missing_value_is_a_config_error():
    with pytest.raises(ConfigError, match=r"data\.root"):
        frozen.freeze({"data": {"root": "???"}})


def test_effective_marks_what_changed_and_reads_back(config):
    text = effective(config, {"train.precision", "name", "data"})
    marked = [line.split("#")[0].strip() for line in text.splitlines() if line.endswith("# command line")]
    assert marked == ["data:", "precision: bf16", "name: frozen"]
    assert OmegaConf.to_container(OmegaConf.create(text)) == frozen.freeze(config)


def test_effective_quotes_what_looks_like_something_else():
    tricky = {
        "a": {"text": "1", "word": "null", "colon": "x: y", "many": [1, "2", {"k": None}], "none": {}, "f": 1e-05}
    }
    assert OmegaConf.to_container(OmegaConf.create(effective(tricky, set()))) == tricky
