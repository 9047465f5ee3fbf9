"""From words to a config, and all problems at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from echofree.config import search
from echofree.config.compose import Composer, compose
from echofree.config.schema import Precision, StrategyKind
from echofree.errors import ConfigError


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def told(words: list[str], composer: Composer | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(words, composer)
    return caught.value.problems


def test_no_words_give_the_promised_defaults(composer):
    composed = compose([], composer)
    assert composed.choices["model"] == "tiny"
    assert composed.choices["data"] == "synthetic"
    assert composed.config.dist.name is StrategyKind.single
    assert composed.changed == set()
    assert "hydra" not in composed.config


def test_base_brings_its_preset_and_words_win_over_it(composer):
    config = compose(["model=base"], composer).config
    assert (config.model.hidden_size, config.model.num_layers) == (768, 12)
    assert (config.train.batch_size, config.train.epochs, config.train.save_interval) == (16, 50, 5)
    assert config.optim.lr == 1e-4
    assert compose(["model=base", "optim.lr=3e-4"], composer).config.optim.lr == 3e-4


def test_values_arrive_with_their_types(composer):
    words = ["train.precision=bf16", "train.max_steps=7", "train.clip_norm=null", "dist=ddp", "dist.num_procs=2"]
    config = compose([*words, "train.max_time=00:30:00", "dist.init_method=tcp://127.0.0.1:29500"], composer).config
    assert config.train.precision is Precision.bf16
    assert config.train.max_steps == 7
    assert config.train.clip_norm is None
    assert config.dist.num_procs == "2"
    assert config.train.max_time == "00:30:00"
    assert config.dist.init_method == "tcp://127.0.0.1:29500"


def test_what_the_command_line_changed_is_known(composer):
    changed = compose(["optim.lr=1e-3", "seed=3", "logger=wandb"], composer).changed
    assert changed == {"optim.lr", "seed", "logger.name"}  # optim.lr was named, though equal to its default


def test_every_problem_is_told_at_once(composer):
    words = ["train.batch_sze=4", "model=bsae", "train.precision=fp64", "train.epochs=abc", "optim.warmup_steps=-3"]
    words += ["nothing", "name=a=b", "seed=1,2", "hydra/launcher=basic", "checkpoint.keep_last=0"]
    problems = told(words, composer)
    assert len(problems) == 10
    text = "\n".join(problems)
    assert "Type: train.batch_size=4" in text
    assert "model=bsae" in text
    assert "Type: model=base" in text
    assert "fp32 | bf16 | fp16" in text
    assert "train.epochs=abc: not a valid value. Valid: a whole number" in text
    assert "optim.warmup_steps=-3: must be at least 0" in text
    assert "'nothing' is no setting" in text
    assert "seed=1,2: several values need a sweep: add -m" in text
    assert "hydra/launcher=basic: a single run doesn't read it" in text
    assert "checkpoint.keep_last=0: must be at least 1" in text


@pytest.mark.parametrize(
    ("word", "right"),
    [
        ("train.epoch=2", "train.epochs=2"),
        ("optim.learning_rate=3", "optim.lr=3"),
        ("lr=3", "optim.lr=3"),
        ("batch_size=3", "train.batch_size=3"),
        ("train.lr=3", "optim.lr=3"),
        ("trian.epochs=2", "train.epochs=2"),
        ("modle=tiny", "model=tiny"),
        ("dist.numprocs=3", "dist.num_procs=3"),
        ("model.hiden_size=8", "model.hidden_size=8"),
    ],
)
def test_a_wrong_key_is_answered_with_the_nearest(word, right, composer):
    (problem,) = told([word, "model=base"] if word.startswith("model.") else [word], composer)
    assert problem.startswith(f"{word}: there is no key")
    assert f"Type: {right}" in problem


def test_a_key_of_another_option_names_that_option(composer):
    (problem,) = told(["model.num_heads=3", "model=tiny"], composer)
    assert "model=base model.num_heads=3" in problem


def test_nothing_can_be_added_to_a_typed_group(composer):
    (problem,) = told(["+train.foo=2"], composer)
    assert "there is no key 'train.foo'" in problem
    assert "train.batch_size" in problem


def test_a_plus_before_what_exists_changes_nothing(composer):
    assert compose(["+seed=3", "+model=base"], composer).config == compose(["seed=3", "model=base"], composer).config


def test_a_setting_given_twice_is_refused(composer):
    assert told(["seed=1", "seed=2"], composer) == ["seed is given twice (seed=1, then seed=2): keep one"]


@pytest.fixture
def experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "experiments"
    (folder / "experiment").mkdir(parents=True)
    (folder / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    return folder


def test_experiments_of_the_current_folder_are_found_with_and_without_plus(experiments):
    (experiments / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: base\noptim:\n  lr: 0.25\nname: mine\n"
    )
    for word in ("experiment=mine", "+experiment=mine"):
        composed = compose([word])
        assert composed.config.optim.lr == 0.25  # wins over the preset of base
        assert composed.config.model.hidden_size == 768
        assert composed.config.train.epochs == 50  # and base's preset came along
        assert {"optim.lr", "name", "model.hidden_size"} <= composed.changed


def test_experiments_add_options_and_never_shadow_ours(experiments):
    (experiments / "model" / "mine.yaml").write_text("_target_: experiments.mine.Mine\nwidth: 3\n")
    (experiments / "model" / "tiny.yaml").write_text("_target_: experiments.mine.Fake\n")
    assert compose(["model=mine", "model.width=5"]).config.model == {"_target_": "experiments.mine.Mine", "width": 5}
    assert compose(["model=tiny"]).config.model["_target_"].startswith("echofree.")


def test_a_wrong_key_in_an_experiment_is_told_with_its_name(experiments):
    (experiments / "experiment" / "bad.yaml").write_text("# @package _global_\noptim:\n  lrr: 0.25\n")
    (problem,) = told(["experiment=bad"])
    assert "experiment=bad" in problem
    assert "lrr" in problem


def test_a_yaml_that_cannot_be_read_is_told_with_its_name(experiments):
    (experiments / "experiment" / "bad.yaml").write_text("# @package _global_\noptim: [1\n")
    (problem,) = told(["experiment=bad"])
    assert "experiment=bad" in problem
    assert "bad.yaml" in problem


def test_a_group_takes_one_of_its_options(composer):
    for value in ("null", "3", "[tiny,base]", "{a:1}"):
        (problem,) = told([f"model={value}"], composer)
        assert "tiny" in problem


def test_the_variable_names_another_folder(tmp_path, monkeypatch):
    folder = tmp_path / "elsewhere"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 11\n")
    monkeypatch.setenv("ECHOFREE_EXPERIMENTS", str(folder))
    assert compose(["experiment=mine"]).config.seed == 11
    monkeypatch.setenv("ECHOFREE_EXPERIMENTS", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="ECHOFREE_EXPERIMENTS"):
        Composer()


def test_an_unknown_experiment_says_where_to_put_it(experiments):
    (problem,) = told(["experiment=zzz"])
    assert "experiments/experiment/zzz.yaml" in problem


@pytest.mark.parametrize(
    ("group", "option"),
    [
        (group, option)
        for group, options in search.groups().items()
        for option in options
        # nothing to train; may need an extra; chosen by the model
        if (group, option) not in (("model", "linear"), ("logger", "tensorboard")) and group != "model_preset"
    ],
)
def test_every_shipped_option_composes(group, option, composer):
    # what only the user can say, such as data.root of data=folder, is given here
    node = composer.base([f"{group}={option}"]).get(group)
    given = [f"{group}.{key}=x" for key in OmegaConf.missing_keys(node)] if OmegaConf.is_dict(node) else []
    given += ["model=base"] if option in ("tensor", "pipeline") else []  # the default model can't be cut
    assert compose([f"{group}={option}", *given], composer).choices[group] == option
