"""hydra/launcher=local from end to end: sweeps on this machine whose jobs live in processes of their own."""

from __future__ import annotations

import csv
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echofree.launch import local
from echofree.launch.follow import views_of
from echofree.launch.queues import Queues

FAULTY = Path(__file__).resolve().parents[1] / "ranks/experiments"
WORDS = [
    "model=faulty",
    "data=faulty",
    "task.metrics=[si_sdr]",
    "task.sample_rate=16000",
    "data.num_train=16",
    "data.num_workers=0",
    "train.batch_size=4",
]
WORDS += ["train.device=cpu", "train.final_test=false", "train.epochs=1", "train.log_every=1", "name=s"]
LOCAL = ["hydra/launcher=local"]

pytestmark = pytest.mark.slow


@pytest.fixture
def train(cli: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    def run(*words: str, experiments: Path = FAULTY, rank: int = 0, folder: str = "sweep") -> Any:
        env = {"ECHOFREE_EXPERIMENTS": str(experiments)}
        given = {word.partition("=")[0] for word in words}
        usual = [word for word in [*WORDS, *LOCAL] if word.partition("=")[0] not in given]
        usual += [f"model.rank={rank}", f"hydra.sweep.dir={folder}"]
        return cli("train", "-m", *usual, *words, cwd=tmp_path, timeout=200, env=env)

    return run


def facts(job: Path) -> dict[str, Any]:
    return json.loads((job / "run.json").read_text())


def losses(job: Path) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"]) for r in records if r["kind"] == "train"]


def until(test: Callable[[], bool], seconds: float = 60.0) -> None:
    stop = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < stop
        time.sleep(0.1)


def test_a_failure_is_told_at_once_and_the_others_run(train, tmp_path):
    result = train("model.fault=raise,none", "seed=0", "model.step=2,3", "launcher.max_parallel=2").check(1)
    assert "ValueError: the sky is falling" in result.stderr
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.index("the sky is falling") < result.stderr.index("job 3 done")
    states = [facts(tmp_path / "sweep" / str(i))["status"] for i in range(4)]
    assert states == ["failed", "failed", "done", "done"]
    rows = list(csv.DictReader((tmp_path / "sweep/sweep.csv").read_text().splitlines()))
    assert [row["state"] for row in rows] == states
    assert [row["model.fault"] for row in rows] == ["raise", "raise", "none", "none"]
    best = min((float(row["best"]), row["job"]) for row in rows if row["best"])[1]
    assert [row["is_best"] for row in rows] == [str(row["job"] == best) for row in rows]
    assert f"best: job {best}" in result.stdout
    # the machine's cores are divided
    threads = {facts(tmp_path / "sweep" / str(i))["world"]["threads"] for i in (2, 3)}
    assert threads == {max(1, len(local.shares(list(range(local.os.cpu_count() or 1)), 2)[0]))}


def test_a_sweep_that_was_cut_goes_on(train, cli, tmp_path):
    words = ["seed=0,1,2", "model.pace_s=0.3", "train.save_every_steps=1", "launcher.max_parallel=1"]
    sweep = tmp_path / "sweep"
    whole = train(*words, folder="whole").check(0)
    assert "3 done" in whole.stdout
    train(*words, "launcher.detach=true").check(0)
    until(lambda: (sweep / "1/checkpoints/step-000002/manifest.json").exists())
    cli("sweep", "sweep", "cancel", cwd=tmp_path).check(0)
    cli("sweep", "sweep", "wait", cwd=tmp_path).check(130)
    assert [view.state for view in views_of(sweep, Queues())] == ["done", "cancelled", "cancelled"]
    assert not (sweep / "2/metrics.jsonl").exists()
    before = facts(sweep / "0")
    result = train(*words, "resume_allow=[code]").check(0)
    assert "3 jobs (1 done already, 2 gone on with)" in result.stderr
    assert facts(sweep / "0") == before
    assert "from" in facts(sweep / "1")["resumes"][0]
    for number in range(3):
        assert losses(sweep / str(number)) == losses(tmp_path / "whole" / str(number))
    again = train(*words).check(0)
    assert "3 jobs (3 done already)" in again.stderr
    other = train("seed=0,7,2", *words[1:]).check(2)
    assert "job 1" in other.stderr
    assert "seed is 1 there, 7 here" in other.stderr


def test_retry_starts_what_failed_in_its_directory(train, cli, tmp_path):
    mark = tmp_path / "mark"
    train("model.fault=raise", f"model.mark={mark}", "seed=0", "train.save_every_steps=1").check(1)
    first = losses(tmp_path / "sweep/0")
    result = cli(
        "sweep", "sweep", "retry", "resume_allow=[code]", cwd=tmp_path, env={"ECHOFREE_EXPERIMENTS": str(FAULTY)}
    ).check(0)
    assert "started again: 0" in result.stderr
    assert [step for step, _ in losses(tmp_path / "sweep/0")] == [1, 2, 3, 4]
    assert losses(tmp_path / "sweep/0")[: len(first)] == first
    shown = cli("sweep", "sweep", "format=json", cwd=tmp_path).check(0)
    assert [row["state"] for row in json.loads(shown.stdout)] == ["done"]


def test_what_is_frozen_runs_whatever_is_edited(train, cli, tmp_path):
    experiments = tmp_path / "experiments"
    shutil.copytree(FAULTY, experiments)
    words = ["seed=0,1", "model.pace_s=0.5", "launcher.max_parallel=1", "launcher.detach=true"]
    result = train(*words, "launcher.snapshot=true", experiments=experiments).check(0)
    assert "job 1 queued" in result.stdout
    (experiments / "model/faulty.yaml").write_text("_target_: nowhere\n")
    (experiments / "faulty.py").write_text("raise RuntimeError('edited')\n")
    waited = cli("sweep", "sweep", "wait", cwd=tmp_path).check(0)
    assert "2 done" in waited.stdout


def test_all_problems_of_all_jobs_come_before_anything_is_written(train, tmp_path):
    result = train("+model.typo=1,2", "seed=0", "launcher.max_parallel=0").check(2)
    assert "model.typo=1" in result.stderr
    assert "model.typo=2" in result.stderr
    assert not list(tmp_path.glob("sweep/*"))
    result = train("seed=0,1", "launcher.on_failure=sometimes", "launcher.max_parallel=0").check(2)
    assert "hydra.launcher.on_failure=sometimes" in result.stderr
    assert "hydra.launcher.max_parallel=0" in result.stderr
    assert not list(tmp_path.glob("sweep"))


def test_two_ranks_and_loader_workers(train, tmp_path):
    result = train(
        "dist=ddp", "dist.num_procs=2", "data.num_workers=1", "model.fault=raise,none", "model.step=2", rank=1
    ).check(1)
    assert "rank 1 on" in result.stderr
    assert "the sky is falling" in result.stderr
    assert facts(tmp_path / "sweep/1")["world"]["size"] == 2


@pytest.mark.parametrize("tasks", [1, 2])
def test_the_stock_launcher_does_not_lie(cli, tmp_path, tasks):
    stock = ["hydra/launcher=submitit_local", f"hydra.launcher.tasks_per_node={tasks}", "hydra.launcher.timeout_min=5"]
    stock += [f"dist={'ddp' if tasks > 1 else 'single'}", "hydra.sweep.dir=sweep"]
    rank = f"model.rank={tasks - 1}"
    env = {"ECHOFREE_EXPERIMENTS": str(FAULTY)}
    bad = cli(
        "train", "-m", *WORDS, *stock, rank, "model.step=2", "model.fault=raise", cwd=tmp_path, timeout=200, env=env
    ).check(1)
    assert "the sky is falling" in bad.text
    assert facts(tmp_path / "sweep/0")["status"] == "failed"
    stock[-1] = "hydra.sweep.dir=good"
    good = cli("train", "-m", *WORDS, *stock, rank, "seed=0", cwd=tmp_path, timeout=200, env=env).check(0)
    assert facts(tmp_path / "good/0")["status"] == "done"
    assert facts(tmp_path / "good/0")["world"]["size"] == tasks
    assert "1 jobs done" in good.stdout
