"""What the command line promises before a run: answers without torch, exit codes, nothing left on the disk, sweeps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli.command import Result

# Calls the verb's main as `python -m` would, then tells what was imported.
PROBE = """
import sys
from echofree.train import main
code = 0
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code or 0
print("TORCH" if "torch" in sys.modules else "LIGHT")
sys.exit(code)
"""

# A verb whose run only says what it got.
SWEEP = """
import sys
from echofree.config.compose import main_config
from echofree.errors import Preempted

def job(composed):
    config = composed.config
    print("RAN", composed.run_dir.name, config.optim.lr, config.seed, sorted(composed.changed), flush=True)
    if config.seed == 7:
        raise ValueError("seven")
    if config.seed == 8:
        raise Preempted("time is up")
    return config.optim.lr

composed = main_config(sys.argv[1:], run_job=job, check_signatures=False)
print("SINGLE", composed.run_dir, composed.config.seed)
"""


@pytest.fixture
def run(tmp_path: Path):
    """run(script, *words, **env) in an empty folder -> Result; `python -c script words`."""

    def call(script: str, *words: str, **env: str) -> Result:
        import os

        command = [sys.executable, "-c", script, *words]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **env}, capture_output=True, text=True, timeout=120
        )
        return Result(command, done.returncode, done.stdout, done.stderr, 0.0)

    return call


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["model=base", "--help"]])
def test_help_answers_without_torch(run, words):
    result = run(PROBE, *words).check(0)
    assert "LIGHT" in result.stdout
    assert "Exit codes:" in result.stdout
    assert result.stderr == ""


def test_problems_of_typed_groups_are_told_without_torch_and_leave_nothing(run, tmp_path):
    words = [
        "train.batch_sze=4",
        "optim.lr=fast",
        "dist.num_procs=2",
        "model=bsae",
        "--local_rank",
        "0",
        "--lr",
        "1e-3",
    ]
    result = run(PROBE, *words).check(2)
    assert "LIGHT" in result.stdout
    assert "Traceback" not in result.text
    assert "The config has" in result.stderr
    for part in ("train.batch_size=4", "optim.lr=fast", "dist=ddp dist.num_procs=2", "model=base", "drop the flag"):
        assert part in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_keyword_of_the_model_is_told_before_anything_is_made(run, tmp_path):
    result = run(PROBE, "+model.tpyo=1").check(2)
    assert "model.tpyo=1" in result.stderr
    assert "Traceback" not in result.text
    assert list(tmp_path.iterdir()) == []


def test_of_many_ranks_on_a_machine_only_the_first_tells(run):
    assert run(PROBE, "seed=x", LOCAL_RANK="1", RANK="1").check(2).stderr == ""
    assert "seed=x" in run(PROBE, "seed=x", LOCAL_RANK="0", RANK="4").check(2).stderr


def test_cfg_shows_the_composed_config_and_runs_nothing(run, tmp_path):
    from omegaconf import OmegaConf

    result = run(PROBE, "--cfg", "job", "model=base", "seed=3").check(0)
    shown = OmegaConf.create(result.stdout.replace("LIGHT", ""))
    assert (shown.model.hidden_size, shown.data.seed, shown.optim.lr) == (768, 3, 1e-4)
    assert "hydra" not in shown
    part = run(PROBE, "--cfg", "job", "-p", "data", "--resolve", "seed=3").check(0).stdout
    assert "# @package data" in part
    assert "seed: 3" in part
    assert "${" not in part
    assert "searchpath" in run(PROBE, "--info", "searchpath").check(0).stdout.lower().replace(" ", "")
    assert "no such part" in run(PROBE, "--cfg", "job", "-p", "nix").check(2).stderr
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_runs_each_combination_in_its_own_directory(run, tmp_path):
    result = run(SWEEP, "-m", "optim.lr=1e-3,3e-4", "seed=0,1", "name=mine").check(0)
    ran = [line.split()[1:4] for line in result.stdout.splitlines() if line.startswith("RAN")]
    assert ran == [["0", "0.001", "0"], ["1", "0.001", "1"], ["2", "0.0003", "0"], ["3", "0.0003", "1"]]
    assert "['name', 'optim.lr', 'seed']" in result.stdout
    (sweep,) = (tmp_path / "multirun" / "mine").iterdir()
    assert sorted(path.name for path in sweep.iterdir()) == ["0", "1", "2", "3", "multirun.yaml"]
    assert not any(path.name == ".hydra" for path in tmp_path.rglob("*"))
    assert "SINGLE" not in result.stdout


def test_a_failed_job_is_told_at_once_and_gives_the_exit_code(run):
    result = run(SWEEP, "-m", "seed=0,7,2").check(1)
    assert "job 1 failed (exit code 1)" in result.stderr
    assert "ValueError: seven" in result.stderr
    assert [line.split()[3] for line in result.stdout.splitlines() if line.startswith("RAN")] == ["0", "7", "2"]
    assert "2 jobs done, failed: 1" in result.stdout


def test_a_preempted_job_ends_the_sweep(run):
    result = run(SWEEP, "-m", "seed=0,8,2").check(75)
    assert [line.split()[3] for line in result.stdout.splitlines() if line.startswith("RAN")] == ["0", "8"]


def test_a_sweep_is_checked_whole_before_its_first_job(run, tmp_path):
    words = ["-m", "train.max_steps=10", "optim.warmup_steps=5,20", "train.batch_size=4,abc", "model=tiny,bsae"]
    result = run(SWEEP, *words).check(2)
    for part in ("job 1", "optim.warmup_steps=20", "train.batch_size=abc", "model=bsae"):
        assert part in result.stderr
    assert "RAN" not in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_single_run_comes_back_with_the_directory_asked_for(run):
    assert "SINGLE None 3" in run(SWEEP, "seed=3").check(0).stdout
    assert "SINGLE elsewhere/x 0" in run(SWEEP, "hydra.run.dir=elsewhere/x").check(0).stdout


@pytest.fixture
def echofree(tmp_path: Path):
    def call(*words: str) -> Result:
        command = [sys.executable, "-m", "echofree", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        return Result(command, done.returncode, done.stdout, done.stderr, 0.0)

    return call


def test_the_echofree_command(echofree):
    from echofree import __version__
    from echofree.config.help import VERBS

    assert echofree("--version").check(0).stdout == f"echofree {__version__}\n"
    overview = echofree().check(0).stdout
    assert echofree("--help").check(0).stdout == overview
    for verb, about in VERBS.items():
        assert verb in overview
        assert about.line in overview
    assert "Keys used most" in echofree("train", "--help").check(0).stdout
    assert "Type: echofree train" in echofree("tran").check(2).stderr
    assert "Type: echofree train seed=3" in echofree("seed=3").check(2).stderr
    assert "seed=x: not a valid value" in echofree("train", "seed=x").check(2).stderr


def test_an_installed_package_finds_its_configs_in_any_folder(tmp_path):
    """The layout of the wheel: conf/ and experiments/ inside the package, no checkout around it."""
    import os
    import shutil

    root = Path(__file__).resolve().parents[2]
    package = tmp_path / "site" / "echofree"
    shutil.copytree(root / "src" / "echofree", package, ignore=shutil.ignore_patterns("__pycache__", "embedded"))
    shutil.copytree(root / "conf", package / "conf")
    (package / "experiments" / "experiment").mkdir(parents=True)
    (package / "experiments" / "experiment" / "recipe.yaml").write_text("# @package _global_\nseed: 17\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    where = "import echofree.config.search as s; print(s.conf_dir())"
    for command, said in (
        (["-c", where], str(package / "conf")),
        (["-m", "echofree", "train", "--cfg", "job", "experiment=recipe"], "seed: 17"),
        (["-m", "echofree", "train", "--help"], "[none] recipe"),
    ):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=empty,
            env={**os.environ, "PYTHONPATH": str(package.parent)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
    assert list(empty.iterdir()) == []
