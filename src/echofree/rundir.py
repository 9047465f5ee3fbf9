"""The run directory: one per run whatever the number of ranks, made by rank 0 or the launcher, told to the others.

`run.json` tells the truth also after a crash: whoever reads it asks the lock whether the process is alive.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from echofree import __version__
from echofree.config.search import experiment_dirs
from echofree.durable import append, sync_path, write_text
from echofree.errors import UserError

CONFIG, RUN, PATCH, METRICS, LOCK = "config.yaml", "run.json", "code.patch", "metrics.jsonl", ".lock"
PACKAGES = (
    "torch",
    "numpy",
    "scipy",
    "hydra-core",
    "omegaconf",
    "soundfile",
    "soxr",
    "wandb",
    "submitit",
    "onnxruntime",
)
PATCH_LIMIT_BYTES = 2_000_000
LOCK_TRIES = 6
RESTART_S = 600.0  # a start takes longer only when it fails
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")  # others round otherwise
# Variables that change what a run does.
VARIABLES = ("PYTHONHASHSEED", "PYTHONPATH", "LD_PRELOAD", "CUBLAS_WORKSPACE_CONFIG", "WANDB_MODE", "TMPDIR")
PREFIXES = ("CUDA_", "OMP_", "MKL_", "KMP_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "ECHOFREE_", "SLURM_JOB_")
KINDS = ("user", "error", "hang", "killed", "gone", "victim")  # of failures; the earlier explain the later
SECRET = re.compile(r"(secret|token|passw|credential|api_?key|\.pem$|\.key$|id_rsa|\.env$|\.netrc)", re.IGNORECASE)


def create(parent: Path, config_text: str, command: Sequence[str], seed: int, parent_run: str | None = None) -> Path:
    """A fresh directory `parent/<date_time>` (with -1, -2, ... when two runs start in one second).

    Raises:
        UserError: the place can't be written.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = _mkdir_unique(parent, datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
    except OSError as error:
        raise UserError(
            f"no run directory can be made under {parent.resolve()}: {error}. Type output_root=<dir>"
        ) from error
    return _fill(folder, config_text, command, seed, parent_run)


def create_at(folder: Path, config_text: str, command: Sequence[str], seed: int, parent_run: str | None = None) -> Path:
    """As `create`, at a place that is decided already (a sweep's job, hydra.run.dir).

    Raises:
        UserError: the place can't be written or holds something.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(p.name for p in folder.iterdir())
    except OSError as error:
        raise UserError(f"the run directory {folder} can't be made: {error}") from error
    if found:
        raise UserError(
            f"{folder} isn't empty (it holds {found[0]}). Name another folder, or type resume={folder} to go on there"
        )
    return _fill(folder, config_text, command, seed, parent_run)


def _fill(folder: Path, config_text: str, command: Sequence[str], seed: int, parent_run: str | None) -> Path:
    try:
        (folder / "logs").mkdir()
        (folder / "checkpoints").mkdir()
        write_text(folder / CONFIG, config_text)
        code = _code_state(folder)
    except OSError as error:
        raise UserError(f"the run directory {folder} can't be written: {error}") from error
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    facts = {
        "id": f"{stamp.replace('_', '-')}-{secrets.token_hex(4)}",
        "status": "created",
        "command": shlex.join(command),
        "folder": str(folder.resolve()),
        "start": time.time(),
        "end": None,
        "parent_run": parent_run,
        "seed": seed,
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": machine(),
        "environment": environment(),
        "cwd": str(Path.cwd()),
        "packages": packages(),
        "code_digest": code_digest(),
        **code,
        "world": None,
        "data_fingerprint": None,
        "error": None,
    }
    write_text(folder / RUN, json.dumps(facts, indent=1))
    return folder


def _mkdir_unique(parent: Path, stamp: str) -> Path:
    for number in range(1000):
        folder = parent / (stamp if number == 0 else f"{stamp}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise OSError(f"{parent} already has 1000 runs of {stamp}")


def packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # optional and not there: its absence is the fact
    return found


def _code_state(folder: Path) -> dict[str, Any]:
    """The commit of the code in use, and what differs from it in code.patch (untracked files included)."""
    source = Path(__file__).resolve().parent
    try:
        top = Path(_git(source, "rev-parse", "--show-toplevel").strip())
        # an installed package may lie in a virtual environment inside somebody else's repository
        _git(top, "ls-files", "--error-unmatch", str(source / "rundir.py"))
        commit = _git(top, "rev-parse", "HEAD").strip()
    except (OSError, subprocess.CalledProcessError):
        return {"git_commit": None, "patch": None}
    changed = _git(top, "diff", "--name-only", "--no-renames", "-z", "HEAD").split("\0")[:-1]
    left_out = [name for name in changed if SECRET.search(name)]
    kept = [name for name in changed if not SECRET.search(name)]
    patch = _git(top, "diff", "--no-color", "--no-renames", "--binary", "HEAD", "--", *kept) if kept else ""
    for name in _git(top, "ls-files", "--others", "--exclude-standard", "-z").split("\0")[:-1]:
        path = top / name
        if SECRET.search(name) or not path.is_file() or path.stat().st_size > PATCH_LIMIT_BYTES // 10:
            left_out.append(name)
            continue
        # exit status 1 is how git says that the files differ
        diff = subprocess.run(
            ["git", "-C", str(top), "diff", "--no-color", "--no-index", "--binary", "--", "/dev/null", name],
            capture_output=True, text=True, errors="replace",
        )  # fmt: skip
        patch += diff.stdout
    if len(patch) > PATCH_LIMIT_BYTES:
        left_out.append(f"everything: the patch has {len(patch)} bytes, more than {PATCH_LIMIT_BYTES}")
        patch = ""
    if patch:
        write_text(folder / PATCH, patch)
    return {"git_commit": commit, "patch": PATCH if patch else None, "patch_left_out": left_out}


def code_digest() -> str:
    """12 hex digits over EchoFree's own source and the user's modules beside it: equal digests ran the same code,
    whatever else changed in the repository."""
    source = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for root in (source, *experiment_dirs()):
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def environment() -> dict[str, str]:
    """Variables that change what a run does. Never one that could hold a secret."""
    url = re.compile(r"://[^/\s]*@")  # a password in an address
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name in VARIABLES or name.startswith(PREFIXES)) and not SECRET.search(name) and not url.search(value)
    }


def machine() -> dict[str, Any]:
    """What the run ran on: host, processor, memory, the GPU driver's own line."""
    model, capability = platform.processor(), ""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else []:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = value.strip()
        if name.strip() in ("flags", "Features"):
            capability = " ".join(word for word in CPU_FEATURES if word in value.split())
            break
    driver = Path("/proc/driver/nvidia/version")
    return {
        "host": socket.gethostname(),
        "cpu": model,
        "cpu_features": capability,
        "cpus": os.cpu_count(),
        "memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "driver": driver.read_text().splitlines()[0] if driver.is_file() else None,
    }


def _git(where: Path, *args: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(where), *args], capture_output=True, text=True, errors="replace", check=True
    )
    return done.stdout


class RunDir:
    """An existing run directory, opened by a rank. Only rank 0 writes run.json and metrics.jsonl."""

    def __init__(self, folder: Path, is_first: bool):
        self.folder, self.is_first = folder, is_first
        self.checkpoints = folder / "checkpoints"
        self._lock: int | None = None

    # -- who is in here

    def lock(self) -> None:
        """Takes the directory for this process.

        Raises:
            UserError: another living process has it.
        """
        fd = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _take(fd)
        except OSError as error:
            holder = os.read(fd, 200).decode(errors="replace").strip() or "another process"
            os.close(fd)
            raise UserError(
                f"{self.folder} is in use by {holder}. Wait for it, stop it, or start a run of its own (leave out "
                f"resume=)"
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        self._lock = fd

    def unlock(self) -> None:
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # closing isn't enough while a forked worker has it open too
            os.close(self._lock)
            self._lock = None

    # -- run.json

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads((self.folder / RUN).read_text(encoding="utf-8"))
        return facts

    def note(self, **facts: Any) -> None:
        if self.is_first:
            write_text(self.folder / RUN, json.dumps({**self.facts, **facts}, indent=1))

    # -- metrics.jsonl

    def truncate_metrics(self, step: int) -> int:
        """Drops records after `step`, which will be written again; -> how many. A torn last line is dropped too."""
        path = self.folder / METRICS
        if not path.exists() or not self.is_first:
            return 0
        kept, dropped = [], 0
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                dropped += 1
                continue
            if record.get("step", 0) <= step:
                kept.append(line)
            else:
                dropped += 1
        write_text(path, "".join(k + "\n" for k in kept))
        return dropped

    def write_metrics(self, record: Mapping[str, Any]) -> None:
        """One line more, or an OSError and none: a full disk leaves no half of one."""
        if self.is_first:
            append(self.folder / METRICS, json.dumps(record) + "\n")

    def sync_metrics(self) -> None:
        if self.is_first and (self.folder / METRICS).exists():
            sync_path(self.folder / METRICS)

    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / METRICS
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    # -- failures

    def note_failure(self, rank: int, text: str, kind: str = "error", shown: bool = False) -> None:
        """Leaves this rank's traceback where the launcher and a person find it. `first_error.json` says who was first;
        the others are usually its victims, and the claim of a victim gives way to a cause.

        Args:
            rank: the rank that failed.
            kind: user, error or hang; gone or killed for a rank that couldn't say anything itself; victim for one that
                only lost the others.
            shown: the console has it already.
        """
        facts = {"rank": rank, "time": time.time(), "host": socket.gethostname(), "kind": kind, "shown": shown}
        body = json.dumps({**facts, "traceback": text})
        write_text(self.folder / "logs" / f"error-rank{rank}.json", body)
        first = self.folder / "logs" / "first_error.json"
        whole = first.with_name(f".{first.name}-{secrets.token_hex(4)}")
        whole.write_text(body, encoding="utf-8")
        try:
            os.link(whole, first)  # fails when it is there, and nobody ever sees half of it
        except FileExistsError:
            before = self.first_failure()
            if before is not None and KINDS.index(before["kind"]) > KINDS.index(kind):
                os.replace(whole, first)
        finally:
            whole.unlink(missing_ok=True)

    def first_failure(self) -> dict[str, Any] | None:
        path = self.folder / "logs" / "first_error.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def clear_failure(self) -> None:
        """Before a new start in this directory: the earlier failure is history, kept in the rank logs."""
        logs = self.folder / "logs"
        for path in logs.glob("*error*.json"):
            path.unlink()
        if (logs / "hang.json").exists():
            os.replace(logs / "hang.json", logs / f"hang-{len(list(logs.glob('hang*.json')))}.json")


def _take(fd: int) -> None:
    """Locks `fd`, with patience for somebody who only asks whether it is locked.

    Raises:
        OSError: it is held.
    """
    for _ in range(LOCK_TRIES - 1):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.05)
        else:
            return
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_alive(folder: Path) -> bool:
    """Whether some process holds the directory; a status "running" without one is a crash."""
    path = folder / LOCK
    if not path.exists():
        return False
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who ask must not see each other
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def status(folder: Path) -> str:
    """created | running | restarting | done | failed | preempted | stopped | interrupted; a run whose process is gone
    isn't running."""
    return truth(folder, RunDir(folder, is_first=False).facts)


def truth(folder: Path, facts: Mapping[str, Any]) -> str:
    """The status of a run whose run.json has been read. Between two starts (dist.max_restarts) nobody holds it."""
    said: str = facts["status"]
    if said == "restarting" and time.time() - facts["restarts"][-1]["time"] < RESTART_S:
        return said
    return "failed" if said in ("running", "restarting") and not is_alive(folder) else said


def command_line() -> list[str]:
    """What was typed, as it can be typed again."""
    entry = sys.argv[0]
    module = Path(entry).stem
    head = (
        ["python", "-m", f"echofree.{module}"] if entry.endswith(".py") and "echofree" in entry else [Path(entry).name]
    )
    return [*head, *sys.argv[1:]]
