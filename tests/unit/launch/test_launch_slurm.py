"""The SLURM queue without a cluster: sums, scripts, and what is made of the scheduler's answers. tests/slurm has the
cluster."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sweeps import sweep_of

from echofree.config.compose import Composer, compose
from echofree.errors import EchoFreeError, UserError
from echofree.launch import batch, request
from echofree.launch import ticket as tickets
from echofree.launch.batch import Slurm, groups, script_text, seconds, seen_of
from echofree.launch.ticket import Ticket
from echofree.slurm.states import JobState, Scheduler

SETTINGS = {
    "nodes": 1, "tasks_per_node": 1, "gpus_per_node": None, "gpus_per_task": None, "gres": None, "timeout_min": 60,
    "signal_delay_s": 120, "by_model": {}, "max_num_timeout": None, "partition": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


@pytest.mark.parametrize(
    ("settings", "words", "says"),
    [
        ({"nodes": 2, "tasks_per_node": 4}, ["dist=single"], "nodes=2 x tasks_per_node=4 = 8 ranks, but dist=single"),
        ({"nodes": 2, "tasks_per_node": 4}, ["dist=ddp", "dist.num_procs=2"], "asks for 2 x 2 = 4"),
        ({"tasks_per_node": 4, "gpus_per_node": 8, "nodes": 2}, ["dist=ddp"], "2 nodes x 8 GPUs = 16 GPUs"),
        ({"tasks_per_node": 2, "gpus_per_task": 2}, ["dist=ddp"], "1 nodes x 4 GPUs = 4 GPUs"),
        ({"gpus_per_node": 1}, ["train.device=cpu"], "train.device=cpu uses none"),
        ({"tasks_per_node": 2}, ["dist=ddp", "dist.backend=nccl"], "hydra.launcher.gpus_per_node=2"),
        ({"nodes": 0}, [], "whole numbers from 1 up"),
        ({"timeout_min": 2}, [], "told to stop at once"),
        ({}, ["dist=ddp", "dist.num_nodes=2", "dist.rendezvous=a:1"], "leave them out"),
    ],
)
def test_a_sum_that_does_not_come_out_is_shown(composer, settings, words, says):
    config = compose(words, composer, "slurm").config
    assert any(says in problem for problem in request.sum_problems({**SETTINGS, **settings}, config))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, []),
        ({"nodes": 2, "tasks_per_node": 4, "gpus_per_node": 4}, ["dist=ddp"]),
        ({"nodes": 2, "tasks_per_node": 4}, ["dist=fsdp", "dist.num_procs=4", "train.device=cpu", "model=base"]),
        ({"tasks_per_node": 8, "gres": "gpu:8"}, ["dist=ddp", "train.device=cuda"]),
    ],
)
def test_a_right_sum_is_no_problem(composer, settings, words):
    assert request.sum_problems({**SETTINGS, **settings}, compose(words, composer, "slurm").config) == []


def test_by_model_overrides_and_typos_are_told():
    settings = {**SETTINGS, "by_model": {"base": {"nodes": 4, "node": 1}}}
    found, problems = request.of_model(settings, "base")
    assert found["nodes"] == 4
    assert "by_model.base.node" in problems[0]
    assert request.of_model(settings, "tiny")[0]["nodes"] == 1


def test_ranges_are_slurms():
    assert request.ranges([5, 0, 1, 2, 7]) == "0-2,5,7"
    assert request.ranges([3]) == "3"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1-02:03:04", 93784.0),
        ("2:03:04", 7384.0),
        ("59:30", 3570.0),
        ("INVALID", None),
        ("", None),
        ("UNLIMITED", None),
    ],
)
def test_time_left(text, expected):
    assert seconds(text) == expected


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (JobState("1", "PENDING", "Priority"), ("waiting", None, "Priority")),
        (JobState("1", "RUNNING", nodes="n1", left="1:00"), ("running", None, "")),
        (JobState("1", "COMPLETED", settled=True), ("ended", 0, "")),
        (JobState("1", "FAILED", exit_code="3:0", settled=True), ("ended", 3, "FAILED")),
        (JobState("1", "TIMEOUT", exit_code="0:0", settled=True), ("ended", None, "TIMEOUT")),
        (JobState("1", "NODE_FAIL", settled=False), ("waiting", None, "NODE_FAIL")),
        (JobState("1", "UNKNOWN", settled=True), ("ended", None, "UNKNOWN")),
    ],
)
def test_what_a_state_means(state, expected):
    seen = seen_of(state)
    assert (seen.state, seen.code, seen.why) == expected


def resources(sweep: Path, **more: Any) -> dict[str, Any]:
    base = {"nodes": 2, "tasks_per_node": 2, "timeout_min": 30, "signal_delay_s": 60, "name": "train"}
    return {**base, "submitit_folder": str(sweep / ".slurm"), "array_parallelism": 256, **more}


def test_script_names_run_directories_and_asks_what_the_keys_say(tmp_path):
    sweep, jobs = sweep_of(tmp_path / "a b", ["", "", ""], "slurm", environment={"PYTHONPATH": "/x y"})
    asked = resources(
        sweep, partition="p1", mem_gb=3, setup=["module load x"], additional_parameters={"mail-user": "me"}
    )
    asked |= {"srun_args": ["--cpu-bind=none"], "array_parallelism": 2}
    for job in jobs:
        job.resources = asked
    folder = batch.new_folder(Path(asked["submitit_folder"]))
    text = script_text(sweep, folder, {job.number: job for job in jobs}, tickets.about(sweep))
    for line in (
        "--array=0-2%2", "--nodes=2", "--ntasks-per-node=2", "--time=30", "--partition=p1", "--mem=3GB", "--requeue",
        "--signal=USR2@60", "--mail-user=me", "--job-name=train", "--open-mode=append",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in text.replace("'", ""), line
    assert text.index("module load x") < text.index("srun ")
    assert "export PYTHONPATH='/x y'" in text
    assert f"1) run_dir='{sweep.resolve()}/1' ;;" in text
    assert "srun --unbuffered --kill-on-bad-exit=1 --cpu-bind=none" in text
    assert '-m echofree.slurm "$run_dir"' in text
    assert "submitit" not in text.replace(".slurm", "").lower()
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


@pytest.mark.parametrize("own", [{"array": "0-9"}, {"open_mode": "truncate"}])
def test_what_is_set_by_hand_is_refused(tmp_path, own):
    sweep, jobs = sweep_of(tmp_path / "s", [""], "slurm")
    jobs[0].resources = resources(sweep, additional_parameters=own)
    with pytest.raises(UserError, match="set by EchoFree itself"):
        script_text(sweep, tmp_path, {0: jobs[0]}, tickets.about(sweep))


def test_jobs_that_ask_for_the_same_are_one_array():
    jobs = [Ticket(i, str(i), resources={"nodes": 1 + i % 2}) for i in range(6)] + [
        Ticket(1003, "x", resources={"nodes": 1})
    ]
    assert [[job.number for job in group] for group in groups(jobs)] == [[0, 2, 4], [1, 3, 5], [1003]]


class Commands:
    """Plays sbatch and scancel."""

    def __init__(self, *answers: tuple[int, str, str]):
        self.answers, self.calls = list(answers), []  # type: list[tuple[int, str, str]], list[list[str]]

    def __call__(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.calls.append(list(words))
        code, out, error = self.answers.pop(0) if words[0] == "sbatch" else (0, "", "")
        return subprocess.CompletedProcess(list(words), code, out, error)


def submitted(tmp_path: Path, commands: Commands, nodes: Sequence[int]) -> Path:
    sweep, jobs = sweep_of(tmp_path / "s", [""] * len(nodes), "slurm")
    for job, n in zip(jobs, nodes, strict=True):
        job.resources = resources(sweep, nodes=n)
    Slurm(run=commands).submit(sweep, jobs)
    return sweep


def test_ids_are_those_of_the_array_and_files_are_in_run_json(tmp_path):
    sweep = submitted(tmp_path, Commands((0, "70;here\n", ""), (0, "71\n", "")), [1, 2, 1])
    assert [job.job_id for job in tickets.read(sweep)] == ["70_0", "71_1", "70_2"]
    about = json.loads((sweep / "2/run.json").read_text())["launcher"]
    assert about["files"] == [str(sweep.resolve() / ".slurm/000/2.out")]
    assert Path(about["script"]).is_file()


def test_a_refusal_is_in_sbatchs_own_words_and_takes_back_what_was_accepted(tmp_path):
    words = "sbatch: error: invalid partition specified: nope"
    commands = Commands((0, "70\n", ""), (1, "", words))
    with pytest.raises(UserError, match="invalid partition specified: nope"):
        submitted(tmp_path, commands, [1, 2])
    assert commands.calls[-1] == ["scancel", "70"]
    assert tickets.read(tmp_path / "s") == []


def test_a_busy_controller_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "PAUSE_S", 0.0)
    busy = (1, "", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
    assert len(tickets.read(submitted(tmp_path, Commands(busy, busy, (0, "70\n", "")), [1]))) == 1
    with pytest.raises(EchoFreeError, match="doesn't answer") as caught:
        submitted(tmp_path / "s", Commands(busy, busy, busy), [1])
    assert not isinstance(caught.value, UserError)


def test_no_sbatch_here(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    sweep, jobs = sweep_of(tmp_path / "s", [""], "slurm")
    jobs[0].resources = resources(sweep)
    with pytest.raises(UserError, match="no command sbatch"):
        Slurm().submit(sweep, jobs)


def test_two_hundred_jobs_are_one_question_each_five_seconds(tmp_path):
    clock = [0.0]
    questions = []

    def answer(words: Sequence[str], limit_s: float) -> tuple[int, str, str]:
        questions.append((clock[0], list(words)))
        return 0, "".join(f"9_{i}|RUNNING|None|n1|1:00\n" for i in range(200)), ""

    slurm = Slurm(Scheduler(run=answer, clock=lambda: clock[0]))
    sweep, jobs = sweep_of(tmp_path / "s", [""] * 200, "slurm")
    for job in jobs:
        job.job_id, job.state = f"9_{job.number}", "waiting"
    for _ in range(240):  # a minute of looking four times a second
        assert {seen.state for seen in slurm.look(sweep, jobs).values()} == {"running"}
        clock[0] += 0.25
    assert len(questions) == 12
    assert min(b - a for (a, _), (b, _) in itertools.pairwise(questions)) >= 5.0
