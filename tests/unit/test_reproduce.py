"""What a reproduction runs and when it refuses; the run itself is in tests/cli."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from echofree import reproduce, rundir
from echofree.config import frozen
from echofree.config.compose import compose
from echofree.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def text() -> str:
    return frozen.dump(compose(["train.max_steps=40", "train.max_time=1h", "logger=tensorboard"]).config)


@pytest.fixture
def run(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory of 40 steps."""
    monkeypatch.setattr(rundir, "_code_state", lambda folder: {"git_commit": None, "patch": None})
    folder = rundir.create(tmp_path, text, ["train"], 0)
    lines = [{"kind": "train", "step": step, "loss": 1.0} for step in (10, 20, 30, 40)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    world = {"size": 1, "device": "cpu", "threads": 3}
    rundir.RunDir(folder, is_first=True).note(status="done", world=world, data_fingerprint="abc")
    return folder


def facts(run: Path, **changes: Any) -> dict[str, Any]:
    opened = rundir.RunDir(run, is_first=True)
    opened.note(**changes)
    return opened.facts


def test_the_whole_run_with_its_threads_and_without_trackers(run: Path) -> None:
    plan = reproduce.make_plan(run, facts(run), None)
    assert (plan.stop_at, plan.last, plan.size, plan.differs) == (None, 40, 1, [])
    assert plan.config["dist"]["threads"] == 3
    assert plan.config["logger"]["name"] == "console"
    assert (plan.config["train"]["max_time"], plan.config["train"]["max_steps"]) == (None, 40)
    assert reproduce.tolerance("auto", plan) == 0


def test_fewer_steps_keep_the_schedule(run: Path) -> None:
    plan = reproduce.make_plan(run, facts(run), 15)
    assert (plan.stop_at, plan.last) == (15, 15)
    assert plan.config["train"]["max_steps"] == 40


def test_a_run_that_was_cut_is_run_to_its_last_record(run: Path) -> None:
    assert reproduce.make_plan(run, facts(run, status="preempted"), None).stop_at == 40


def test_another_machine_or_version_is_said_and_tolerated(run: Path) -> None:
    known = facts(run)
    known["packages"]["torch"] = "0.9"
    known["machine"]["cpu"] = "an abacus"
    known["world"] = {"size": 1, "device": "cuda:0", "threads": 3}
    plan = reproduce.make_plan(run, known, None)
    told = "\n".join(plan.differs)
    assert "torch 0.9 then" in told
    assert "cpu: an abacus then" in told
    assert "device cuda then, cpu now" in told
    assert reproduce.tolerance("auto", plan) == reproduce.LOOSE
    assert reproduce.tolerance("0", plan) == 0
    with pytest.raises(ConfigError, match=r"reproduce\.tolerance=much"):
        reproduce.tolerance("much", plan)


def entry(**keys: Any) -> dict[str, Any]:
    known = {"time": time.time(), "from": "step-000020", "changed": {}, "world_size": 1, "allow": []}
    return {**known, "code_digest": rundir.code_digest(), **keys}


def test_resumes_that_changed_nothing_do_not_matter(run: Path) -> None:
    resumes = [entry(), entry(changed={"logger.level": ["info", "debug"], "checkpoint.keep_last": [2, 9]})]
    assert reproduce.make_plan(run, facts(run, resumes=resumes), None).last == 40


@pytest.mark.parametrize(
    "turn", [{"changed": {"optim.lr": [0.1, 0.2]}}, {"code_digest": "other"}, {"allow": ["world_size"]}]
)
def test_a_run_that_changed_its_course_is_reproduced_up_to_there(run: Path, text: str, turn: dict[str, Any]) -> None:
    (run / "config-1.yaml").write_text(text.replace("seed: 0", "seed: 77"))  # the one that held until the turn
    known = facts(run, resumes=[entry(), entry(**turn)])
    with pytest.raises(ConfigError, match=r"changed its course .* at step 20 .*Type reproduce\.steps=20"):
        reproduce.make_plan(run, known, None)
    plan = reproduce.make_plan(run, known, 20)
    assert (plan.stop_at, plan.config["seed"]) == (20, 77)


def test_a_run_without_records_is_refused(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="no records to compare with"):
        reproduce.make_plan(run, facts(run), None)


def test_other_data_is_told_before_anything_runs(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Source:
        def fingerprint(self) -> str:
            return "xyz"

    monkeypatch.setattr("echofree.config.build.build_data", lambda *given, **more: Source())
    plan = reproduce.make_plan(run, facts(run), None)
    with pytest.raises(DataError, match="fingerprint abc then, xyz now"):
        reproduce.check_data(plan.config, facts(run))


def test_mistakes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce.main([]) == 2
    assert reproduce.main([f"run={tmp_path}"]) == 2
    assert reproduce.main([f"run={tmp_path}", "reproduce.code=old"]) == 2
    said = capsys.readouterr().err
    assert "run is missing" in said
    assert "no run directory" in said
    assert "give current or recorded" in said


# --- the code of the run --------------------------------------------------------------------------------------------


def git(where: Path, *words: str) -> str:
    name = ["-c", "user.name=x", "-c", "user.email=x@y"]
    return subprocess.run(["git", "-C", str(where), *name, *words], check=True, capture_output=True, text=True).stdout


def test_the_recorded_code_is_rebuilt_beside_and_leaves_the_repository_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that no branch holds any more, a changed file and an untracked one in code.patch."""
    repository, package = tmp_path / "repository", tmp_path / "repository" / "src" / "echofree"
    package.mkdir(parents=True)
    git(tmp_path, "init", "--quiet", str(repository))
    (package / "rundir.py").write_text("old = 1\n")
    git(repository, "add", "-A")
    git(repository, "commit", "--quiet", "-m", "one")
    commit = git(repository, "rev-parse", "HEAD").strip()
    (package / "rundir.py").write_text("old = 2\n")
    (package / "new.py").write_text("new = 1\n")
    monkeypatch.setattr(rundir, "__file__", str(package / "rundir.py"))
    run = tmp_path / "run"
    run.mkdir()
    state = rundir._code_state(run)
    assert state["git_commit"] == commit
    git(repository, "add", "-A")
    git(repository, "commit", "--quiet", "--amend", "-m", "two")
    (package / "rundir.py").write_text("now = 3\n")
    (package / "new.py").unlink()
    before = os.environ.get("PYTHONPATH")
    with reproduce.checkout(run, state):
        root = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
        assert (root / "echofree" / "rundir.py").read_text() == "old = 2\n"
        assert (root / "echofree" / "new.py").read_text() == "new = 1\n"
    assert not root.exists()
    assert os.environ.get("PYTHONPATH") == before
    assert (package / "rundir.py").read_text() == "now = 3\n"
    assert "prunable" not in git(repository, "worktree", "list")


def test_a_run_without_a_commit_cannot_be_rebuilt(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="recorded no commit"), reproduce.checkout(tmp_path, {"git_commit": None}):
        pass
