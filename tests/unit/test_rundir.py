"""The run directory: one per run, locked, truthful after a crash, with the code that ran."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from echofree import rundir
from echofree.errors import UserError
from echofree.rundir import RunDir


def create(parent: Path) -> Path:
    return rundir.create(parent, "seed: 0\n", ["python", "-m", "echofree.train", "name=a b"], seed=0)


@pytest.fixture
def no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking git takes longer than all the rest."""
    monkeypatch.setattr(rundir, "_code_state", lambda folder: {"git_commit": None, "patch": None})


@pytest.fixture
def run(tmp_path: Path, no_code: None) -> RunDir:
    return RunDir(create(tmp_path), is_first=True)


# --- making one -----------------------------------------------------------------------------------------------------


def test_a_fresh_directory(run: RunDir) -> None:
    assert sorted(p.name for p in run.folder.iterdir()) == ["checkpoints", "config.yaml", "logs", "run.json"]
    assert (run.folder / "config.yaml").read_text() == "seed: 0\n"
    facts = run.facts
    assert facts["command"] == "python -m echofree.train 'name=a b'"
    assert (facts["status"], facts["seed"], facts["end"], facts["error"]) == ("created", 0, None, None)
    assert facts["packages"]["torch"]
    assert facts["folder"] == str(run.folder.resolve())


def test_runs_of_the_same_second_do_not_share(tmp_path: Path, no_code: None) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: create(tmp_path), range(16)))
    assert len(set(folders)) == 16
    assert len({RunDir(f, False).facts["id"] for f in folders}) == 16


@pytest.mark.parametrize("blocked", ["a file", "no permission"])
def test_a_place_that_cannot_be_written(tmp_path: Path, no_code: None, blocked: str) -> None:
    parent = tmp_path / "outputs"
    if blocked == "a file":
        parent.write_text("")
    else:
        parent = Path("/proc/echofree")  # nobody, not even root, can make a folder there
    with pytest.raises(UserError, match=r"no run directory can be made under .*output_root=<dir>"):
        create(parent)


def test_a_decided_place_has_to_be_empty(tmp_path: Path, no_code: None) -> None:
    folder = rundir.create_at(tmp_path / "sweep/0", "seed: 0\n", ["x"], seed=0)
    assert folder == tmp_path / "sweep/0"
    with pytest.raises(UserError, match=r"isn't empty \(it holds checkpoints\).*resume="):
        rundir.create_at(folder, "seed: 0\n", ["x"], seed=0)


# --- the code that ran ----------------------------------------------------------------------------------------------


def git(where: Path, *args: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(where), *identity, *args], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository that holds a copy of the module, which then believes to be run from there."""
    top = tmp_path / "project"
    (top / "src/echofree").mkdir(parents=True)
    shutil.copy(rundir.__file__, top / "src/echofree/rundir.py")
    (top / ".gitignore").write_text("outputs/\n")
    (top / "model.py").write_text("width = 1\n")
    (top / "token.txt").write_text("old\n")
    git(top, "init", "-q")
    git(top, "add", "-A")
    git(top, "commit", "-q", "-m", "start")
    monkeypatch.setattr(rundir, "__file__", str(top / "src/echofree/rundir.py"))
    return top


def test_the_patch_rebuilds_the_code_and_leaves_secrets_out(repository: Path, tmp_path: Path) -> None:
    (repository / "model.py").write_text("width = 2\n")
    (repository / "new model ü.py").write_text("depth = 3\n")
    (repository / "binary.bin").write_bytes(bytes(range(256)))
    (repository / "big.wav").write_bytes(os.urandom(300_000))
    (repository / "outputs").mkdir()
    (repository / "outputs/run.txt").write_text("ignored")
    for name in (".env", "api_key.txt", "id_rsa"):
        (repository / name).write_text("hush-hush\n")
    (repository / "token.txt").write_text("hush-hush\n")
    folder = create(repository / "outputs")
    facts, patch = RunDir(folder, False).facts, (folder / "code.patch").read_text()
    assert facts["git_commit"] == git(repository, "rev-parse", "HEAD").strip()
    assert facts["patch"] == "code.patch"
    assert "hush" not in patch
    assert "ignored" not in patch
    assert sorted(facts["patch_left_out"]) == [".env", "api_key.txt", "big.wav", "id_rsa", "token.txt"]

    again = tmp_path / "again"
    git(tmp_path, "clone", "-q", str(repository), str(again))
    git(again, "apply", str(folder / "code.patch"))
    assert (again / "model.py").read_text() == "width = 2\n"
    assert (again / "new model ü.py").read_text() == "depth = 3\n"
    assert (again / "binary.bin").read_bytes() == bytes(range(256))


def test_a_clean_tree_has_no_patch(repository: Path) -> None:
    folder = create(repository / "outputs")
    facts = RunDir(folder, False).facts
    assert (facts["patch"], facts["patch_left_out"]) == (None, [])
    assert facts["git_commit"]
    assert not (folder / "code.patch").exists()


def test_a_patch_beyond_the_limit_is_told(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "PATCH_LIMIT_BYTES", 100)
    (repository / "model.py").write_text("width = 2\n" * 50)
    facts = RunDir(create(repository / "outputs"), False).facts
    assert facts["patch"] is None
    assert "everything: the patch has" in facts["patch_left_out"][-1]


def test_an_installed_package_inside_somebody_s_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their commit isn't the commit of this code."""
    site = tmp_path / ".venv/echofree"
    site.mkdir(parents=True)
    (tmp_path / ".gitignore").write_text(".venv/\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "theirs")
    (site / "rundir.py").write_text("")
    monkeypatch.setattr(rundir, "__file__", str(site / "rundir.py"))
    assert RunDir(create(tmp_path / "outputs"), False).facts["git_commit"] is None


# --- who is in there ------------------------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from echofree.rundir import RunDir
run = RunDir(Path(sys.argv[1]), is_first=True)
run.lock()
run.note(status="running")
print("locked", flush=True)
time.sleep(60)
"""


def test_a_second_start_is_refused_and_a_crash_is_a_failure(run: RunDir) -> None:
    assert rundir.status(run.folder) == "created"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run.folder)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "locked\n"
            with pytest.raises(UserError, match=rf"is in use by process {other.pid} on .*leave out"):
                run.lock()
            with ThreadPoolExecutor(4) as pool:
                assert set(pool.map(lambda _: rundir.status(run.folder), range(8))) == {"running"}
        finally:
            other.send_signal(signal.SIGKILL)
    assert run.facts["status"] == "running", "nobody was left to say so"
    with ThreadPoolExecutor(4) as pool:
        # those who ask don't take each other for the run
        assert set(pool.map(lambda _: rundir.status(run.folder), range(200))) == {"failed"}
    run.lock()
    assert rundir.is_alive(run.folder)
    run.unlock()
    assert not rundir.is_alive(run.folder)


def test_a_worker_does_not_hold_the_directory(run: RunDir) -> None:
    """A forked loader worker has the lock's file open too, and may outlive the run by seconds."""
    run.lock()
    worker = os.fork()
    if worker == 0:
        time.sleep(30)
        os._exit(0)
    try:
        run.unlock()
        assert not rundir.is_alive(run.folder)
        again = RunDir(run.folder, is_first=True)
        again.lock()
        again.unlock()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_a_start_is_patient_with_somebody_who_asks(run: RunDir) -> None:
    import fcntl

    run.lock()
    run.unlock()
    fd = os.open(run.folder / ".lock", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        pool.submit(lambda: (time.sleep(0.1), os.close(fd)))
        run.lock()
        assert time.monotonic() - began >= 0.1  # not before the other has left
    assert rundir.is_alive(run.folder)
    run.unlock()
    assert not rundir.is_alive(run.folder)


# --- facts, metrics, failures ---------------------------------------------------------------------------------------


def test_only_rank_0_writes(run: RunDir) -> None:
    other = RunDir(run.folder, is_first=False)
    other.note(status="done")
    other.write_metrics({"step": 1})
    assert run.facts["status"] == "created"
    assert run.metrics() == []
    run.note(status="done", best=0.5)
    assert (run.facts["status"], run.facts["best"], run.facts["seed"]) == ("done", 0.5, 0)
    assert rundir.status(run.folder) == "done"


def test_truncated_metrics_hold_every_step_once(run: RunDir) -> None:
    for step in (2, 4, 4, 6, 8):
        run.write_metrics({"step": step, "kind": "train"})
    with open(run.folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 10, "ki')  # torn by the kill
    assert run.truncate_metrics(4) == 3
    assert [r["step"] for r in run.metrics()] == [2, 4, 4]
    run.write_metrics({"step": 6})
    assert [r["step"] for r in run.metrics()] == [2, 4, 4, 6]
    assert run.truncate_metrics(99) == 0
    assert run.truncate_metrics(-1) == 4
    assert run.metrics() == []


def test_nothing_to_truncate(run: RunDir) -> None:
    assert run.truncate_metrics(0) == 0
    assert not (run.folder / "metrics.jsonl").exists()


def test_the_first_failure_is_kept(run: RunDir) -> None:
    assert run.first_failure() is None
    run.note_failure(3, "Traceback: the cause")
    run.note_failure(0, "Traceback: its victim")
    first = run.first_failure()
    assert first is not None
    assert (first["rank"], first["traceback"]) == (3, "Traceback: the cause")
    victim = json.loads((run.folder / "logs/error-rank0.json").read_text())
    assert victim["traceback"] == "Traceback: its victim"
    run.clear_failure()
    assert run.first_failure() is None
    assert list((run.folder / "logs").iterdir()) == []


def test_facts_are_never_half_written(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run.facts

    def full(path: Path, text: str) -> None:
        path.write_text(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("echofree.durable.sync_text", full)
    with pytest.raises(OSError, match="No space left"):
        run.note(status="done")
    assert run.facts == before


def test_the_command_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/src/echofree/train.py", "optim.lr=1"])
    assert rundir.command_line() == ["python", "-m", "echofree.train", "optim.lr=1"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/echofree", "train"])
    assert rundir.command_line() == ["echofree", "train"]


# --- what it ran with -----------------------------------------------------------------------------------------------


def test_variables_that_matter_are_kept_and_secrets_never(tmp_path: Path, no_code: None) -> None:
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "1,3", "OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO", "ECHOFREE_API_KEY": "k",
        "ECHOFREE_TOKEN": "t", "TORCH_HUB": "https://user:pass@host/x", "WANDB_API_KEY": "w", "HOME_OF": "h",
        "NCCL_PASSWORD": "p", "SLURM_JOB_ID": "17",
    }  # fmt: skip
    told = RunDir(create(tmp_path), False).facts["environment"]
    wanted = {"CUDA_VISIBLE_DEVICES": "1,3", "OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "17"}
    assert wanted.items() <= told.items()
    assert not {"ECHOFREE_API_KEY", "ECHOFREE_TOKEN", "TORCH_HUB", "WANDB_API_KEY", "NCCL_PASSWORD"} & set(told)


def test_machine_and_place_are_kept(run: RunDir) -> None:
    facts = run.facts
    assert facts["machine"]["host"]
    assert facts["machine"]["cpus"] >= 1
    assert facts["machine"]["memory_mb"] > 100
    assert facts["cwd"] == os.getcwd()
    assert facts["code_digest"] == rundir.code_digest()


def test_the_digest_follows_source_and_own_modules_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = rundir.code_digest()
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "notes.txt").write_text("x")
    assert rundir.code_digest() == before
    (tmp_path / "experiments" / "mine.py").write_text("x = 1\n")
    changed = rundir.code_digest()
    assert changed != before
    (tmp_path / "experiments" / "mine.py").write_text("x = 2\n")
    assert rundir.code_digest() not in (before, changed)


def test_a_run_between_two_starts_is_no_crash_for_a_while(run: RunDir) -> None:
    run.note(status="restarting", restarts=[{"time": time.time() - 5}])
    assert rundir.status(run.folder) == "restarting"
    run.note(restarts=[{"time": time.time() - 2 * rundir.RESTART_S}])
    assert rundir.status(run.folder) == "failed"
