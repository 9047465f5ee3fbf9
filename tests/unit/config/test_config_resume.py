"""Which run is gone on with, and what may differ (field report B34)."""

from __future__ import annotations

from pathlib import Path

import pytest

from echofree.config import frozen
from echofree.config.arguments import parse_flags
from echofree.config.compose import Composer, compose
from echofree.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def make_run(
    root: Path, words: list[str], when: str, steps: tuple[int, ...] = (100,), broken: int | None = None
) -> Path:
    config = compose(words).config
    run = root / "outputs" / config.name / when
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(frozen.dump(config))
    for step in steps:
        folder = run / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        if step != broken:
            (folder / "manifest.json").write_text("{}")
    return run


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_directory_brings_its_frozen_config(home, composer):
    run = make_run(home, ["optim.lr=0.125", "seed=5"], "2026-01-01_00-00-00")
    composed = compose([f"resume={run}"], composer)
    assert composed.resumed
    assert composed.run_dir == run
    assert composed.checkpoint is None
    assert (composed.config.optim.lr, composed.config.seed) == (0.125, 5)


def test_the_same_command_again_is_fine(home, composer):
    words = ["model=base", "model.num_layers=3", "optim.lr=0.125"]
    run = make_run(home, words, "2026-01-01_00-00-00")
    assert compose([*words, f"resume={run}"], composer).config.model.num_layers == 3


def test_rules_judge_the_run_and_not_what_the_words_alone_would_compose(home, composer):
    """tiny, the default, has no tensor_plan(); the run's base has."""
    run = make_run(home, ["model=base", "dist=fsdp", "dist.num_procs=2"], "2026-01-01_00-00-00")
    words = [f"resume={run}", "dist=tensor", "dist.num_procs=2", "resume_allow=[dist]"]
    assert compose(words, composer).config.dist.name.value == "tensor"
    run = make_run(home, ["dist=fsdp", "dist.num_procs=2"], "2026-01-02_00-00-00")
    with pytest.raises(ConfigError, match="BarkNet"):
        compose([f"resume={run}", *words[1:]], composer)


def test_a_different_value_is_refused_with_old_and_new(home, composer):
    run = make_run(home, ["optim.lr=0.125"], "2026-01-01_00-00-00")
    with pytest.raises(ConfigError) as caught:
        compose([f"resume={run}", "optim.lr=0.5", "train.epochs=99"], composer)
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 2
    assert "optim.lr: the run in" in text
    assert "has 0.125, the command line says 0.5" in text
    assert "'resume_allow=[optim.lr]'" in text
    assert "train.epochs" in text


@pytest.mark.parametrize("allow", ["optim.lr", "optim"])
def test_an_allowed_value_is_taken_and_told(home, composer, allow):
    run = make_run(home, ["optim.lr=0.125", "seed=5"], "2026-01-01_00-00-00")
    composed = compose([f"resume={run}", "optim.lr=0.5", f"resume_allow=[{allow}]"], composer)
    assert composed.config.optim.lr == 0.5
    assert composed.config.seed == 5
    assert composed.notes == ["resume: optim.lr changes from 0.125 to 0.5"]


def test_what_only_concerns_the_screen_or_the_clock_may_differ(home, composer):
    run = make_run(home, [], "2026-01-01_00-00-00")
    config = compose([f"resume={run}", "train.max_time=3h", "logger.progress=off"], composer).config
    assert (config.train.max_time, config.logger.progress) == ("3h", "off")


def test_another_model_is_refused_and_replaced_whole_when_allowed(home, composer):
    run = make_run(home, [], "2026-01-01_00-00-00")
    with pytest.raises(ConfigError, match=r"model\._target_"):
        compose([f"resume={run}", "model=base"], composer)
    config = compose([f"resume={run}", "model=base", "resume_allow=[model]"], composer).config
    assert config.model == compose(["model=base"], composer).config.model
    assert config.optim.lr == compose([], composer).config.optim.lr  # a preset isn't asked for on a resume


def test_a_remedy_means_all_keys_that_it_changes(home, composer):
    run = make_run(home, [], "2026-01-01_00-00-00")
    with pytest.raises(ConfigError) as caught:
        compose([f"resume={run}", "debug=quick"], composer)
    assert any(problem.startswith("train.max_steps") for problem in caught.value.problems)


def test_an_unknown_name_in_resume_allow_is_told(home, composer):
    run = make_run(home, [], "2026-01-01_00-00-00")
    with pytest.raises(ConfigError, match=r"no key or group 'optim.lrr'"):
        compose([f"resume={run}", "resume_allow=[optim.lrr]"], composer)


def test_auto_takes_the_newest_run_of_the_name_that_has_a_checkpoint(home, composer):
    make_run(home, ["seed=1"], "2026-01-01_00-00-00")
    wanted = make_run(home, ["seed=2"], "2026-01-02_00-00-00")
    make_run(home, ["seed=3"], "2026-01-03_00-00-00", steps=())
    make_run(home, ["seed=4"], "2026-01-04_00-00-00", broken=100)
    make_run(home, ["seed=5", "name=other"], "2026-01-05_00-00-00")
    composed = compose(["resume=auto"], composer)
    assert (composed.run_dir, composed.config.seed) == (wanted, 2)


def test_auto_without_a_run_starts_one_and_says_so(home, composer):
    composed = compose(["resume=auto"], composer)
    assert not composed.resumed
    assert composed.run_dir is None
    assert "a new one starts" in composed.notes[0]


def test_a_checkpoint_directory_names_run_and_checkpoint(home, composer):
    run = make_run(home, [], "2026-01-01_00-00-00", steps=(100, 200, 300), broken=300)
    composed = compose([f"resume={run}/checkpoints/step-000100"], composer)
    assert composed.run_dir == run
    assert composed.checkpoint == run / "checkpoints" / "step-000100"
    with pytest.raises(CheckpointError, match=r"incomplete.*step-000100, step-000200"):
        compose([f"resume={run}/checkpoints/step-000300"], composer)


def test_the_link_to_the_last_one_works_too(home, composer):
    run = make_run(home, [], "2026-01-01_00-00-00", steps=(100, 200))
    (run / "checkpoints" / "last").symlink_to("step-000200")
    assert compose([f"resume={run}/checkpoints/last"], composer).checkpoint == run / "checkpoints" / "step-000200"


@pytest.mark.parametrize("what", ["nowhere", "."])
def test_anything_else_is_refused_with_an_example(home, composer, what):
    run = make_run(home, [], "2026-01-01_00-00-00")
    with pytest.raises(CheckpointError, match=f"resume={run.relative_to(home)}"):
        compose([f"resume={what}"], composer)


def test_a_run_without_a_complete_checkpoint_is_refused(home, composer):
    run = make_run(home, [], "2026-01-01_00-00-00", broken=100)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        compose([f"resume={run}"], composer)


@pytest.mark.parametrize(("text", "said"), [("a: [1", "can't be read"), ("- 1\n", "a mapping of keys was expected")])
def test_a_config_that_cannot_be_read_is_refused(home, composer, text, said):
    run = make_run(home, [], "2026-01-01_00-00-00")
    (run / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        compose([f"resume={run}"], composer)


def test_names_of_what_may_differ(home, composer):
    run = make_run(home, ["optim.lr=0.125", "dist=ddp", "dist.num_procs=2"], "2026-01-01_00-00-00")
    words = [f"resume={run}", "optim.lr=0.5", "dist.num_procs=1", "train.gradient_accumulation_steps=2"]
    with pytest.raises(ConfigError) as caught:
        compose(words, composer)
    assert len(caught.value.problems) == 3
    composed = compose([*words, "resume_allow=[world_size,lr,code]"], composer)
    assert (composed.config.optim.lr, composed.config.dist.num_procs) == (0.5, "1")
    assert composed.config.train.gradient_accumulation_steps == 2


def test_what_is_kept_may_always_differ(home, composer):
    run = make_run(home, [], "2026-01-01_00-00-00")
    words = ["checkpoint.keep_last=7", "checkpoint.pin=[100]", "checkpoint.async_save=true", "checkpoint.on_full=wait"]
    composed = compose([f"resume={run}", *words], composer)
    assert (composed.config.checkpoint.keep_last, list(composed.config.checkpoint.pin)) == (7, [100])
    assert composed.config.checkpoint.async_save


def test_other_spellings_of_two_keys():
    flags = parse_flags(["checkpoint.async=true", "resume.allow=[lr]", "resume=auto", "checkpoint.asynch=1"])
    assert flags.words == ["checkpoint.async_save=true", "resume_allow=[lr]", "resume=auto", "checkpoint.asynch=1"]
