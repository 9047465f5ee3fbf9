"""What wandb's own reader finds in the local store.

wandb leaves threads behind, and ranks are forked from a process with one thread only: each attempt is a process of its
own, as it is in life.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

ATTEMPT = """
import json, logging, sys
from pathlib import Path
from echofree.config.schema import LoggerConfig, LoggerKind
from echofree.logger.build import build_logger

logging.basicConfig(format="%(levelname)s %(message)s", level="INFO")
for job in json.loads(sys.argv[1]):
    logger = build_logger(LoggerConfig(name=LoggerKind.wandb, mode=job["mode"]), Path(job["run_dir"]))
    logger.start({"id": job["id"]}, {"name": "mine", "train": {"epochs": job["epochs"]}})
    for record in job["records"]:
        logger.log(record)
    logger.finish(job["status"])
"""


def job(run_dir: Path, records: list[dict[str, Any]], mode: str = "offline", status: str = "done") -> dict[str, Any]:
    run_dir.mkdir(exist_ok=True)
    return {
        "run_dir": str(run_dir), "records": records, "mode": mode, "status": status, "id": "run-1", "epochs": 2
    }  # fmt: skip


def attempt(*jobs: dict[str, Any], **env: str) -> str:
    """One process that does `jobs` one after another; -> everything it said."""
    home = str(Path(jobs[0]["run_dir"]).parent)
    done = subprocess.run(
        [sys.executable, "-c", ATTEMPT, json.dumps(jobs)],
        env={**os.environ, "HOME": home, "WANDB_CACHE_DIR": home, "WANDB_CONFIG_DIR": home, **env},
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def stored(run_dir: Path) -> list[list[dict[str, Any]]]:
    """The records of each attempt, in the order of the attempts."""
    runs = sorted((run_dir / "wandb").glob("offline-run-*"), key=lambda folder: folder.stat().st_ctime_ns)
    read = [sys.executable, "-m", "wandb", "leet", "inspect", "--json"]
    outputs = [subprocess.run([*read, str(run)], capture_output=True, text=True, check=True).stdout for run in runs]
    return [[json.loads(line) for line in output.splitlines()] for output in outputs]


def of_type(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [r[kind] for r in records if r["type"] == kind]


def rows(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row["item"] for row in of_type(records, "history")]


def train(step: int) -> dict[str, Any]:
    return {"kind": "train", "step": step, "epoch": 0, "loss": 1.0 / (step + 1)}


def valid(step: int) -> dict[str, Any]:
    return {"kind": "eval", "split": "valid", "step": step, "epoch": 0, "si_sdr": float(step), "erle": None}


def test_every_record_is_there_at_its_step(tmp_path: Path) -> None:
    """Evaluations come late: after a training record of the same or a later step. None may be dropped."""
    said = attempt(job(tmp_path / "run", [train(0), train(2), valid(2), train(4), valid(3), train(6), valid(6)]))
    (records,) = stored(tmp_path / "run")
    found = [(row["step"], row.get("train/loss"), row.get("valid/si_sdr")) for row in rows(records)]
    assert found == [
        (0, 1.0, None),
        (2, 1 / 3, None),
        (2, None, 2.0),
        (4, 1 / 5, None),
        (3, None, 3.0),
        (6, 1 / 7, None),
        (6, None, 6.0),
    ]
    assert [row["_step"] for row in rows(records)] == list(range(7))
    run = of_type(records, "run")[0]
    assert (run["run_id"], run["display_name"], run["project"]) == ("run-1", "mine-run-1", "echofree")
    assert run["config"]["update"]["train"] == {"epochs": 2}
    assert of_type(records, "exit") == [{}] or of_type(records, "exit")[0].get("exit_code", 0) == 0
    assert "wandb sync" in said
    assert "WARNING" not in said


def test_resume_joins_the_same_run_and_repeats_nothing(tmp_path: Path) -> None:
    attempt(job(tmp_path / "run", [train(0), train(2), valid(2), train(4)], status="preempted"))
    attempt(job(tmp_path / "run", [train(4), valid(2), train(6), valid(6)]))
    first, second = stored(tmp_path / "run")
    assert [of_type(r, "run")[0]["run_id"] for r in (first, second)] == ["run-1", "run-1"]
    assert of_type(second, "run")[0]["resume"] is True
    assert of_type(first, "exit")[0]["exit_code"] == 75
    assert [row["step"] for row in rows(first) + rows(second)] == [0, 2, 2, 4, 6, 6]
    assert [row["_step"] for row in rows(first) + rows(second)] == list(range(6))


def test_failure_is_a_failed_run(tmp_path: Path) -> None:
    attempt(job(tmp_path / "run", [train(0)], status="failed"))
    (records,) = stored(tmp_path / "run")
    assert of_type(records, "exit")[0]["exit_code"] == 1


def test_jobs_of_a_sweep_are_runs_of_their_own(tmp_path: Path) -> None:
    jobs = [{**job(tmp_path / str(n), [train(0)]), "id": f"job-{n}", "epochs": n + 1} for n in range(3)]
    attempt(*jobs)
    runs = [of_type(stored(tmp_path / str(n))[0], "run")[0] for n in range(3)]
    assert [run["run_id"] for run in runs] == ["job-0", "job-1", "job-2"]
    assert [run["config"]["update"]["train"]["epochs"] for run in runs] == [1, 2, 3]


class Refuses(BaseHTTPRequestHandler):
    """A server that is there and grants nothing."""

    def do_GET(self) -> None:
        self.send_error(403)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def test_online_without_key_says_so_and_goes_offline(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        said = attempt(job(tmp_path / "run", [train(0)], mode="online"), WANDB_BASE_URL=url)
        server.shutdown()
        thread.join()
    assert "WARNING logger.mode=online isn't possible (there is no API key; type: wandb login)" in said
    assert len(rows(stored(tmp_path / "run")[0])) == 1


def test_online_without_server_says_so_and_goes_offline(tmp_path: Path) -> None:
    env = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}  # nobody listens on the discard port
    said = attempt(job(tmp_path / "run", [train(0)], mode="online"), **env)
    assert "WARNING logger.mode=online isn't possible (http://127.0.0.1:9 doesn't answer" in said
    assert len(rows(stored(tmp_path / "run")[0])) == 1


def test_disabled_writes_no_run(tmp_path: Path) -> None:
    attempt(job(tmp_path / "run", [train(0)], mode="disabled"))
    assert list((tmp_path / "run").glob("wandb/*run-*")) == []
