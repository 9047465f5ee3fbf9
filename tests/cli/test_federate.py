"""Federated training through its command line: real processes for every failure, two runs with one seed, a server
that is killed and goes on, clients over TLS.

A model and clips in miniature; what takes the time is starting Python.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import run_verb

from echofree import checkpoint
from parent import TINY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="needs echofree[federated]"),
]

DATA = (
    "data.num_train=36", "data.num_valid=2", "data.num_test=2", "data.num_rooms=8", "data.segment_s=0.5",
    "data.test_segment_s=0.5", "data.num_workers=0", "data.partition.by=room",
)  # fmt: skip
SMALL = (
    *TINY, *DATA, "train.batch_size=2", "train.final_test=false", "checkpoint.keep_last=9", "optim.lr=0.01",
    "federated.local_steps=2", "federated.held_out=0.2",
)  # fmt: skip
LATE_S = 25.0  # longer than two steps on a busy machine


def run_dirs(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("outputs/*/*/config.yaml"))


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = checkpoint.load(run_dir / "checkpoints" / f"step-{step:06d}", "model")
    return found


def records(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock says."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "round_s"} for row in rows]


def clients(run_dir: Path) -> list[dict[str, str]]:
    with open(run_dir / "clients.csv", newline="") as file:
        return list(csv.DictReader(file))


def wait_for(what: Callable[[], Any], timeout_s: float, process: subprocess.Popen[str] | None = None) -> Any:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if found := what():
            return found
        if process is not None and process.poll() is not None:
            raise AssertionError(f"it ended with {process.returncode}")
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s:g} s")


def free_port() -> int:
    """Below those that a system hands out by itself, so that nothing else takes it before the server listens."""
    for port in np.random.default_rng().permutation(np.arange(20000, 32000)).tolist():
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


class Started:
    """Verbs that run beside the test, each with its own log; none outlives it."""

    def __init__(self, folder: Path):
        self.folder, self.all = folder, []
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, name: str, *words: str) -> subprocess.Popen[str]:
        log = open(self.folder / f"{name}.log", "a")  # noqa: SIM115
        process = subprocess.Popen(
            [sys.executable, "-m", "echofree.federate", *words], cwd=self.folder, stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, text=True, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        log.close()
        self.all.append(process)
        return process

    def text(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def kill(self, process: subprocess.Popen[str]) -> None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def end(self) -> None:
        for process in self.all:
            if process.poll() is None:
                self.kill(process)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Started]:
    started = Started(tmp_path / "work")
    yield started
    started.end()


def test_one_seed_gives_the_same_bits_also_when_the_server_was_killed(tmp_path: Path, start: Started) -> None:
    words = (
        *SMALL, "federated.num_clients=4", "federated.rounds=3", "federated.fraction=0.75",
        "federated.keep_local=[batchnorm]", "federated.optimizer=kept", "federated.strategy=fedprox",
    )  # fmt: skip
    whole = run_verb("federate", *words, "federated.processes=1", cwd=tmp_path / "whole", timeout=240).check()
    (first,) = run_dirs(tmp_path / "whole")
    # killed while round 3 is under way, gone on with by the same command, in two processes instead of one
    again = (*words, "federated.processes=2", "resume=auto")
    server = start("server", *again)
    wait_for(lambda: list(start.folder.glob("outputs/*/*/checkpoints/step-000004/manifest.json")), 200, server)
    start.kill(server)
    done = run_verb("federate", *again, cwd=start.folder, timeout=240).check()
    (second,) = run_dirs(start.folder)
    assert "goes on after round 2" in done.text, done.text
    for step in (2, 4, 6):
        mine, theirs = weights(second, step), weights(first, step)
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert records(second) == records(first)
    changed = [name for name, value in weights(first, 6).items() if not torch.equal(value, weights(first, 2)[name])]
    assert changed
    assert not [name for name in changed if "norm" in name], "batch norms stay with the client"
    assert "round 3/3: 3 of 3 clients" in whole.text
    assert {row["client"] for row in clients(first) if row["status"] == "scored"} == {"0", "1", "2", "3"}


def test_bad_updates_are_named_and_left_out(tmp_path: Path) -> None:
    faults = "federated.faults=[1:2:nan,2:2:shape,3:2:poison,4:2:drop,5:2:late]"
    words = (
        *SMALL, "federated.num_clients=8", "federated.rounds=2", faults, f"federated.timeout_s={LATE_S}",
        "federated.processes=2", "federated.min_clients=3",
    )  # fmt: skip
    done = run_verb("federate", *words, cwd=tmp_path, timeout=280).check()
    (run_dir,) = run_dirs(tmp_path)
    (record,) = [row for row in records(run_dir) if row["kind"] == "train" and row["epoch"] == 2]
    expected = {"1": "not finite", "2": "shape", "3": "poisoned", "4": "gone", "5": "late"}
    assert record["left_out"] == expected
    assert (record["asked"], record["clients"]) == (8, 3)
    for text in ("left out: client 1 (", "has NaN or infinite values", "exit code 1", f"no answer within {LATE_S:g} s"):
        assert text in done.text, done.text
    told = {
        row["client"]: row["status"] for row in clients(run_dir) if row["round"] == "2" and row["status"] != "scored"
    }
    assert {k: v for k, v in told.items() if v != "trained"} == expected
    assert all(torch.isfinite(value).all() for value in weights(run_dir, 4).values())
    # it is a run directory like any other
    evaluated = run_verb("evaluate", f"checkpoint={run_dir}", "limit=2", cwd=tmp_path, timeout=100)
    assert "double talk" in evaluated.check().text or "far end" in evaluated.text


def test_a_bad_update_can_stop_it_and_too_few_good_ones_change_nothing(tmp_path: Path) -> None:
    few = (*SMALL, "federated.num_clients=3", "federated.rounds=2", "federated.processes=1")
    stopped = run_verb(
        "federate",
        *few,
        "federated.faults=[1:2:nan]",
        "federated.on_bad_update=stop",
        cwd=tmp_path / "stop",
        timeout=150,
    ).check(1)
    assert "client 1" in stopped.text
    assert "federated.on_bad_update=stop" in stopped.text
    assert "Traceback" not in stopped.text
    (run_dir,) = run_dirs(tmp_path / "stop")
    assert json.loads((run_dir / "run.json").read_text())["status"] == "failed"
    # the fault was a rehearsal: without it the same run goes on
    resumed = run_verb(
        "federate",
        *few,
        "resume=auto",
        "federated.faults=[]",
        "resume_allow=[federated]",
        cwd=tmp_path / "stop",
        timeout=150,
    ).check()
    assert "round 2/2: 3 of 3 clients" in resumed.text
    void = run_verb(
        "federate", *few, "federated.faults=[*:1:nan]", cwd=tmp_path / "void", timeout=150
    ).check()  # fmt: skip
    assert "the weights stay as they were: 0 good updates, federated.min_clients=2" in void.text


def test_clients_over_tls_one_killed_and_the_server_started_again(tmp_path: Path, start: Started) -> None:
    port = free_port()
    made = run_verb(
        "federate", "federated.role=certificates", "federated.certificates=pems", "federated.address=127.0.0.1:1",
        cwd=start.folder,
    ).check()  # fmt: skip
    assert "server.key" in made.stdout
    assert (start.folder / "pems" / "server.key").stat().st_mode & 0o077 == 0
    words = (
        *SMALL, "federated.num_clients=3", "federated.rounds=4", f"federated.address=127.0.0.1:{port}",
        "federated.certificates=pems", "federated.wait_s=120", "federated.min_clients=2",
    )  # fmt: skip
    server = start("server", *words, "federated.role=server", "resume=auto")
    devices = [start(f"device{k}", *words, "federated.role=client", f"federated.client={k}") for k in range(3)]

    def saved(step: int) -> Callable[[], bool]:
        return lambda: bool(list(start.folder.glob(f"outputs/*/*/checkpoints/step-{step:06d}/manifest.json")))

    wait_for(saved(2), 200, server)
    start.kill(devices[2])
    wait_for(saved(4), 100, server)
    start.kill(server)
    server = start("server", *words, "federated.role=server", "resume=auto")
    devices[2] = start("device2", *words, "federated.role=client", "federated.client=2")
    assert server.wait(200) == 0, start.text("server")
    assert [device.wait(60) for device in devices] == [0, 0, 0], start.text("device0")
    (run_dir,) = [path for path in run_dirs(start.folder) if not path.name.startswith("client-")]
    rows = [row for row in records(run_dir) if row["kind"] == "train"]
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["clients"] == rows[3]["clients"] == 3, rows
    log = start.text("server")
    assert "over TLS" in log
    assert "goes on after round" in log
    # killed while it worked, or between two rounds
    assert re.search(r"left out: client 2 \(|not there: client 2", log), "the killed one is named"
    assert "no server" in start.text("device0")
    # whoever doesn't know the authority is told so and not let in
    run_verb(
        "federate", "federated.role=certificates", "federated.certificates=others", cwd=start.folder
    ).check()  # fmt: skip
    other = [word.replace("pems", "others").replace("wait_s=120", "wait_s=3") for word in words]
    server = start("late", *words, "federated.role=server")
    wait_for(lambda: "listening" in start.text("late"), 60, server)
    refused = run_verb(
        "federate", *other, "federated.role=client", "federated.client=0", cwd=start.folder, timeout=60
    ).check(1)  # fmt: skip
    assert "no server at" in refused.text
