"""Spellings of other tools."""

from __future__ import annotations

import pytest

from echofree.config.arguments import parse_flags
from echofree.config.classic import SPELLINGS, SWITCHES
from echofree.config.compose import Composer
from echofree.config.override import exists


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        (["--train.batch_size", "4"], "train.batch_size=4"),
        (["--train.batch_size=4"], "train.batch_size=4"),
        (["--batch_size", "4"], "train.batch_size=4"),
        (["--batch-size=4"], "train.batch_size=4"),
        (["--lr", "1e-3"], "optim.lr=1e-3"),
        (["--epochs", "5"], "train.epochs=5"),
        (["--config", "conf/x.yaml"], "experiment=x"),
        (["--config_path", "conf/x.yaml"], "experiment=x"),
        (["--resume", "outputs/run/a"], "resume=outputs/run/a"),
        (["--gpus", "2"], "dist=ddp dist.num_procs=2"),
        (["--nproc_per_node", "2"], "dist=ddp dist.num_procs=2"),
        (["--fp16"], "train.precision=fp16"),
        (["--bacth_size", "4"], "train.batch_size=4"),
        (["--wandb"], "logger=wandb"),
    ],
)
def test_a_flag_is_answered_with_our_words(typed, ours):
    flags = parse_flags([*typed, "seed=1"])
    (problem,) = flags.problems
    assert problem.startswith(" ".join(typed))
    assert f"Type: {ours}" in problem
    assert flags.words == [*ours.split(), "seed=1"]
    assert flags.hint.endswith(f"python -m echofree.train {ours} seed=1")


@pytest.mark.parametrize("typed", [["--local_rank", "0"], ["--local-rank=0"], ["--local_rank=0"]])
def test_local_rank_is_to_be_dropped(typed):
    flags = parse_flags([*typed, "seed=1"])
    (problem,) = flags.problems
    assert "drop the flag" in problem
    assert "torchrun's environment" in problem
    assert flags.words == ["seed=1"]


def test_all_flags_at_once_and_a_switch_takes_no_value():
    flags = parse_flags(["--fp16", "model=base", "--lr", "1e-3", "--local_rank", "0", "--epochs", "-3"])
    assert len(flags.problems) == 4
    assert flags.words == ["train.precision=fp16", "model=base", "optim.lr=1e-3", "train.epochs=-3"]


def test_an_unknown_flag_is_told_as_such():
    flags = parse_flags(["--frobnicate"])
    assert flags.problems == ["--frobnicate: unknown flag. Settings are typed key=value, without dashes; see --help"]
    assert flags.hint == ""


def test_own_flags():
    flags = parse_flags(["-m", "seed=1,2", "--cfg", "job", "-p", "optim", "--resolve", "-cn", "other", "--info"])
    assert flags.problems == []
    assert (flags.multirun, flags.cfg, flags.package, flags.resolve) == (True, "job", "optim", True)
    assert (flags.config_name, flags.info, flags.words) == ("other", "all", ["seed=1,2"])


@pytest.mark.parametrize("typed", [["--cfg"], ["--cfg", "nix"], ["--cfg=nix"], ["-p"], ["--multirun=3"]])
def test_own_flags_used_wrong(typed):
    assert parse_flags(typed).problems


def test_every_translation_leads_to_a_key_or_group_that_exists():
    composer = Composer()
    base = composer.base(["model=base", "logger=wandb"])
    # data.root belongs to data=folder, which needs it
    for key in {*SPELLINGS.values(), *(word.partition("=")[0] for word in SWITCHES.values() if word != "-m")}:
        known = exists(base, key) or composer.loader.repository.group_exists(key)
        assert known or key == "data.root", key
