"""Rules about values and across fields."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from echofree.config import check
from echofree.config.check import RANGES
from echofree.config.compose import Composer, compose
from echofree.errors import ConfigError


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["dist.num_procs=4"], ["dist=single", "Type: dist=ddp dist.num_procs=4"]),
        (["dist=ddp", "dist.num_procs=0"], ["dist.num_procs=0", "dist.num_procs=2"]),
        (["dist=ddp", "dist.num_procs=two"], ["dist.num_procs=two", "auto"]),
        (["dist=ddp", "dist.backend=nccl", "train.device=cpu"], ["nccl", "Type: dist.backend=gloo"]),
        (["dist.backend=nccl"], ["dist=single", "dist=ddp dist.backend=nccl"]),
        (["train.max_steps=10", "optim.warmup_steps=10"], ["optim.warmup_steps=10", "train.max_steps=10"]),
        (["train.early_stop_patience=2", "train.eval_interval=0"], ["needs evaluations", "train.eval_interval=1"]),
        (["optim.schedule=plateau", "train.eval_interval=0"], ["plateau", "train.eval_interval=1"]),
        (["train.max_time=soon"], ["train.max_time=", "soon", "train.max_time=01:30:00"]),
        (["train.ema_decay=1.0"], ["train.ema_decay=1.0", "train.ema_decay=0.999"]),
        (["checkpoint.metric=beauty"], ["checkpoint.metric=beauty", "loss"]),
        (["checkpoint.metric=si_sdr"], ["checkpoint.mode=min keeps the worst", "checkpoint.mode=max"]),
        (["logger.entity=me"], ["logger.entity=me", "logger=wandb"]),
        (["logger.mode=online"], ["logger.mode=online", "logger=wandb"]),
        (["model=linear"], ["nothing to train", "echofree.evaluate"]),
        (["resume_allow=[optim.lr]"], ["resume_allow", "resume="]),
        (["seed=-1"], ["seed=-1", "from 0"]),
        (["name=a/b"], ["name=a/b", "folder"]),
        (["task=quantise", "dist=fsdp", "dist.num_procs=2"], ["task=quantise", "dist=fsdp", "Type: dist=ddp"]),
        (["task=quantise", "train.compile=true"], ["task=quantise", "train.compile=false"]),
        (["train.device=tpu"], ["train.device=tpu", "auto | cpu | cuda"]),
        (["data.num_workers=-1"], ["data.num_workers=-1", "from 0"]),
        (["~data.num_workers"], ["data.num_workers=None", "+data.num_workers=2"]),
        (["dist.init_method=localhost:2000"], ["dist.init_method", "tcp://HOST:PORT"]),
        (["dist=ddp", "dist.num_nodes=2"], ["needs a place to meet", "dist.rendezvous=10.0.0.5:29400"]),
        (["dist=ddp", "dist.rendezvous=a:1"], ["for several machines", "dist.num_nodes=2"]),
        (["dist=ddp", "dist.num_nodes=2", "dist.rendezvous=nowhere"], ["dist.rendezvous=nowhere", "HOST:PORT"]),
        (["dist.num_nodes=2", "dist.rendezvous=a:1"], ["dist=single", "Type: dist=ddp"]),
        (["dist=ddp", "dist.interface='^lo'"], ["dist.interface=^lo", "NCCL's syntax", "dist.interface=eth0"]),
        (["dist=ddp", "dist.num_nodes=0"], ["dist.num_nodes=0", "at least 1"]),
        (
            ["dist=ddp", "dist.num_nodes=2", "dist.rendezvous=a:1", "dist.init_method=env://"],
            ["dist.init_method=env://", "leave dist.init_method out"],
        ),
    ],
)
def test_each_rule_names_key_value_and_remedy(words, parts, composer):
    with pytest.raises(ConfigError) as caught:
        compose(words, composer)
    (problem,) = caught.value.problems
    for part in parts:
        assert part in problem


def test_several_rules_are_told_together(composer):
    with pytest.raises(ConfigError) as caught:
        compose(["dist.num_procs=4", "checkpoint.metric=beauty", "optim.lr=0"], composer)
    assert len(caught.value.problems) == 3


def test_the_right_combinations_pass(composer):
    compose(["checkpoint.metric=si_sdr", "checkpoint.mode=max"], composer)
    compose(["optim.warmup_steps=9", "train.max_steps=10"], composer)
    compose(["dist=ddp", "dist.num_procs=auto"], composer)
    compose(["logger=wandb", "logger.mode=online", "logger.entity=me"], composer)


def test_every_range_is_about_a_key_that_exists_and_its_default_passes(composer):
    config = compose([], composer).config
    for key, ((passes, _), remedy) in RANGES.items():
        value = OmegaConf.select(config, key, throw_on_missing=True, default="absent")
        assert value != "absent", key
        assert value is None or passes(value), key
        assert remedy.startswith(f"{key}=")


def test_the_remedy_of_every_range_is_itself_right():
    for key, ((passes, _), remedy) in RANGES.items():
        word = remedy.split(" ")[0].rstrip(",")
        assert passes(OmegaConf.select(OmegaConf.from_dotlist([word]), key)), remedy


def test_torchrun_with_single_is_refused(composer, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="torchrun started 4 processes"):
        compose([], composer)
    compose(["dist=ddp"], composer)


def test_a_missing_value_says_what_to_type():
    config = compose([]).config.copy()
    OmegaConf.set_struct(config, False)
    config.data = {"_target_": "x", "root": "???", "num_workers": 0, "prefetch_factor": 2, "half": "${nowhere}"}
    problems = check.problems(config)
    assert "data.root is not given. Type: data.root=..." in problems
    assert any(problem.startswith("data.half=${nowhere}: can't be resolved") for problem in problems)
