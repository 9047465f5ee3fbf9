"""hydra/launcher=slurm on a cluster: arrays, what is told while they run, going on, and how often SLURM is asked."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from echofree.launch import ticket as tickets
from echofree.launch.follow import follow, summarise, views_of
from echofree.launch.queues import Queues
from slurm.jobs import EXPERIMENTS, START_S, TINY, ask, until

sys.path.append(str(Path(__file__).parents[1] / "unit/launch"))
from sweeps import end, sweep_of

pytestmark = pytest.mark.slurm

SLURM = ["hydra/launcher=slurm", "hydra.launcher.timeout_min=30", "hydra.sweep.dir=sweep"]
ENV = {"ECHOFREE_EXPERIMENTS": str(EXPERIMENTS)}
TWO = ["dist=ddp", "hydra.launcher.nodes=2"]


@pytest.fixture
def train(cli: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    def run(*words: str) -> Any:
        return cli("train", "-m", *TINY, *SLURM, *words, cwd=tmp_path, timeout=200, env=ENV)

    yield run
    ask("scancel", "-u", str(os.getuid()), check=False)
    until(lambda: not ask("squeue", "-h", check=False), 40, lambda: ask("squeue"))


def facts(job: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job / "run.json").read_text())
    return found


def steps(job: Path) -> list[int]:
    path = job / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [r["step"] for r in map(json.loads, lines) if r["kind"] == "train"]


def account(sweep: Path, number: int) -> str:
    """State and exit code of a job in the accounting."""
    name = str(next(job.job_id for job in tickets.read(sweep) if job.number == number))

    def look() -> str:
        found = ask("sacct", "-X", "-n", "-P", "-o", "State,ExitCode", "-j", name)
        return "" if found.startswith(("RUNNING", "PENDING")) else found

    return str(until(look, 20, lambda: ask("sacct", "-j", name)))


def test_an_array_of_two_nodes_each(train, tmp_path):
    result = train(*TWO, "data.num_train=16", "seed=0,1").check(0)
    print(result.stderr, result.stdout, sep="\n")  # with -s: what a user sees
    assert "jobs 0-1: 2 nodes x 1 task = 2 ranks (dist=ddp), 30 min" in result.stderr
    assert "job 1 done" in result.stderr
    sweep = tmp_path / "sweep"
    ids = [job.job_id for job in tickets.read(sweep)]
    array = str(ids[0]).partition("_")[0]
    assert ids == [f"{array}_0", f"{array}_1"]
    for number in (0, 1):
        about = facts(sweep / str(number))
        assert (about["status"], about["world"]["hosts"]) == ("done", ["node1", "node2"])
        assert sorted(path.name for path in (sweep / f"{number}/logs").glob("*.log")) == ["rank0.log", "rank1.log"]
        (out,) = about["launcher"]["files"]
        assert about["slurm"]["files"]["out"] == out
        assert "world: 2 rank(s)" in Path(out).read_text()
        assert account(sweep, number) == "COMPLETED|0:0"
    rows = list(csv.DictReader((sweep / "sweep.csv").read_text().splitlines()))
    assert [row["is_best"] for row in rows].count("True") == 1
    assert f"best: job {[row['is_best'] for row in rows].index('True')}" in result.stdout


def test_a_failure_is_told_at_once_with_the_first_traceback(train, tmp_path):
    words = ["model.fault=raise,none", "model.rank=1", "model.step=2", "model.pace_s=1", "data.num_train=64"]
    result = train(*TWO, *words).check(1)
    told = result.stderr
    assert "ValueError: the sky is falling" in told
    assert "rank 1 on node2" in told
    assert told.count("Traceback (most recent call last)") == 1
    assert told.index("the sky is falling") < told.index("job 1 done")
    sweep = tmp_path / "sweep"
    assert account(sweep, 0) == "FAILED|1:0"
    assert account(sweep, 1) == "COMPLETED|0:0"
    assert [row["state"] for row in csv.DictReader((sweep / "sweep.csv").read_text().splitlines())] == [
        "failed",
        "done",
    ]


def test_what_slurm_refuses_comes_back_in_its_words(train, tmp_path):
    result = train("seed=0,1", "hydra.launcher.partition=nope").check(2)
    assert "sbatch: error: invalid partition specified: nope" in result.stderr
    assert not (tmp_path / "sweep").exists()
    result = train("seed=0", "hydra.launcher.additional_parameters={frobnicate:1}").check(2)
    assert "sbatch: unrecognized option '--frobnicate=1'" in result.stderr
    result = train("seed=0", "hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=4").check(2)
    assert "nodes=2 x tasks_per_node=4 = 8 ranks, but dist=single" in result.stderr
    assert ask("squeue", "-h") == ""
    assert not (tmp_path / "sweep").exists()


def test_a_cancelled_sweep_goes_on_with_the_same_words(train, cli, tmp_path):
    words = ["seed=0,1", "model.pace_s=0.5", "data.num_train=24", "hydra.launcher.array_parallelism=1"]
    sweep = tmp_path / "sweep"
    done = train(*words, "hydra.launcher.detach=true").check(0)
    assert "detached" in done.stdout
    until(lambda: len(steps(sweep / "0")) >= 3, START_S, lambda: ask("squeue"))
    shown = cli("sweep", "sweep", cwd=tmp_path).check(0).stdout
    assert "running" in shown
    assert "JobArrayTaskLimit" in shown
    cli("sweep", "sweep", "cancel", cwd=tmp_path).check(0)
    cli("sweep", "sweep", "wait", cwd=tmp_path).check(130)
    before = steps(sweep / "0")
    result = train(*words, "resume_allow=[code]").check(0)
    assert "2 jobs (2 gone on with)" in result.stderr
    for number in (0, 1):
        assert steps(sweep / str(number)) == list(range(1, 13))
    assert facts(sweep / "0")["resumes"][-1]["from"] is not None or not before
    assert "2 jobs (2 done already)" in train(*words).check(0).stderr


def test_retry(train, cli, tmp_path):
    words = ["model.fault=raise", "model.rank=0", f"model.mark={tmp_path}/mark", "train.save_every_steps=1"]
    train(*words, "data.num_train=16").check(1)
    result = cli("sweep", "sweep", "retry", "resume_allow=[code]", cwd=tmp_path, env=ENV, timeout=120).check(0)
    assert "1 done" in result.stdout
    assert steps(tmp_path / "sweep/0") == list(range(1, 9))


def test_the_launcher_follows_jobs_through_requeues(train, tmp_path):
    """One job is told that its time is up, the other loses its node."""
    words = [*TINY, *SLURM, "seed=0,1", "model.pace_s=0.7", "data.num_train=40", "train.save_every_steps=2"]
    env = {**os.environ, **ENV, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "echofree.train", "-m", *words, "hydra.launcher.cpus_per_task=4"]  # a node each
    sweep = tmp_path / "sweep"
    with subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            for number in (0, 1):
                until(lambda n=number: len(steps(sweep / str(n))) >= 3, START_S, lambda: ask("squeue"))
            jobs = {job.number: str(job.job_id) for job in tickets.read(sweep)}
            ask("scancel", "--signal=USR2", jobs[0])
            node = ask("squeue", "-h", "-j", jobs[1], "-o", "%N")
            ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
            time.sleep(2)
            ask("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)  # it may be back by itself
            _, told = launcher.communicate(timeout=150)
        finally:
            launcher.kill()
    assert launcher.returncode == 0, told
    assert "failed" not in told
    for number in (0, 1):
        assert steps(sweep / str(number)) == list(range(1, 21))
        assert facts(sweep / str(number))["slurm"]["restart"] == 1
    assert facts(sweep / "0")["stop_counts"] == {"timeout": 1}


@pytest.mark.skipif(find_spec("optuna") is None, reason="needs the extra sweep (optuna)")
def test_optuna_gets_the_value_of_each_job(train, tmp_path):
    """Two trials at a time, each batch an array; the best of its table is the best of the sweep's."""
    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=2"]
    train(*TWO, *search, "optim.lr=interval(0.0001,0.01)", "data.num_train=16").check(0)
    sweep = tmp_path / "sweep"
    rows = list(csv.DictReader((sweep / "sweep.csv").read_text().splitlines()))
    assert [row["state"] for row in rows] == ["done"] * 4
    assert len({row["optim.lr"] for row in rows}) == 4
    found = (sweep / "optimization_results.yaml").read_text()
    (best,) = (row for row in rows if row["is_best"] == "True")
    assert float(re.findall(r"best_value: (\S+)", found)[0]) == pytest.approx(float(best["best"]))
    assert float(re.findall(r"optim\.lr: (\S+)", found)[0]) == pytest.approx(float(best["optim.lr"]))
    arrays = [str(job.job_id).partition("_")[0] for job in tickets.read(sweep)]
    assert arrays[0] == arrays[1] != arrays[2] == arrays[3]


def resources(sweep: Path, command: Sequence[str], **more: Any) -> dict[str, Any]:
    base = {"nodes": 1, "tasks_per_node": 1, "timeout_min": 5, "signal_delay_s": 60, "name": "s"}
    return {**base, "submitit_folder": f"{sweep}/.slurm", "array_parallelism": 256, "command": command, **more}


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each question that the scheduler is asked from now on."""
    log, folder = tmp_path / "asked", tmp_path / "bin"
    folder.mkdir()
    for name in ("squeue", "sacct", "scontrol", "sinfo"):
        real = ask("which", name)
        (folder / name).write_text(f'#!/bin/sh\necho "$(date +%s.%N) {name}" >> {log}\nexec {real} "$@"\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return log


def test_two_hundred_jobs_with_a_question_each_five_seconds(tmp_path, asked, capsys):
    script = tmp_path / "task.sh"
    script.write_text("sleep 0.2\n" + end("done", best=1.0))
    sweep, jobs = sweep_of(tmp_path / "sweep", [""] * 200, "slurm")
    for job in jobs:
        job.resources = resources(sweep, f"sh {script}")
    queues, start = Queues(), time.monotonic()
    queues.submit("slurm", sweep, jobs)
    submitted = time.monotonic() - start
    views = follow(sweep, queues, range(200), "continue", "leave")
    summarise(sweep, views_of(sweep, queues))
    took = time.monotonic() - start
    assert {view.state for view in views} == {"done"}
    times = [float(line.split()[0]) for line in asked.read_text().splitlines()]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert len(times) <= took / 5 + 1
    assert min(gaps, default=5.0) > 4.9
    assert len({str(job.job_id).partition("_")[0] for job in tickets.read(sweep)}) == 1
    assert "200 done" in capsys.readouterr().out
    with capsys.disabled():
        print(f"\n200 jobs: submitted in {submitted:.1f} s, over after {took:.0f} s, {len(times)} questions")


def test_jobs_that_ask_for_different_things_are_arrays_of_their_own(tmp_path):
    sweep, jobs = sweep_of(tmp_path / "sweep", [""] * 3, "slurm")
    (tmp_path / "task.sh").write_text('echo $SLURM_JOB_NUM_NODES > "$1/nodes"\n' + end("done"))
    for job, nodes in zip(jobs, (1, 2, 1), strict=True):
        job.resources = resources(sweep, f"sh {tmp_path}/task.sh", nodes=nodes)
    queues = Queues()
    queues.submit("slurm", sweep, jobs)
    views = follow(sweep, queues, range(3), "continue", "leave")
    assert [view.state for view in views] == ["done"] * 3
    assert [(sweep / str(n) / "nodes").read_text().strip() for n in range(3)] == ["1", "2", "1"]
    ids = [str(job.job_id) for job in tickets.read(sweep)]
    assert ids[0].partition("_")[0] == ids[2].partition("_")[0] != ids[1].partition("_")[0]


def test_a_job_that_says_nothing_is_a_failure_with_the_end_of_its_output(tmp_path, capsys):
    sweep, jobs = sweep_of(tmp_path / "sweep", [""] * 2, "slurm")
    (tmp_path / "task.sh").write_text("echo the last words; exit $(($SLURM_ARRAY_TASK_ID * 7))\n")
    for job in jobs:
        job.resources = resources(sweep, f"sh {tmp_path}/task.sh")
    queues = Queues()
    queues.submit("slurm", sweep, jobs)
    views = follow(sweep, queues, range(2), "continue", "leave")
    assert [view.state for view in views] == ["failed", "failed"]  # the first says 0, but its run never ended
    assert capsys.readouterr().err.count("the last words") == 2


@pytest.mark.slow
def test_the_stock_launcher_does_not_lie(cli, train, tmp_path):
    stock = ["hydra/launcher=submitit_slurm", "hydra.launcher.nodes=2", "hydra.launcher.timeout_min=30", "dist=ddp"]
    bad = ["model.fault=raise", "model.step=2", "hydra.sweep.dir=bad"]
    result = cli("train", "-m", *TINY, *stock, *bad, cwd=tmp_path, timeout=200, env=ENV).check(1)
    assert "the sky is falling" in result.text
    result = cli("train", "-m", *TINY, *stock, "hydra.sweep.dir=good", cwd=tmp_path, timeout=200, env=ENV).check(0)
    assert facts(tmp_path / "good/0")["world"]["size"] == 2
    states = ask("sacct", "-X", "-n", "-P", "-S", "now-1hour", "-o", "State,ExitCode").splitlines()
    assert "FAILED|1:0" in states[-2:]
    assert "COMPLETED|0:0" in states[-2:]
