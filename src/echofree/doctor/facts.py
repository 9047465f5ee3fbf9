"""What the doctor looks at, gathered once; the checks judge it and touch nothing. Works without GPU and network."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

from echofree import space
from echofree.dist import network

ASK_S = 4.0  # for one outside command
AUDIO = (".wav", ".flac", ".ogg", ".mp3")
DECODE_FILES = 6
DECODE_S = 1.5  # for the trial
PORTS = (29400, 29500)  # the one of our examples, and torch's own
ENVIRONMENT = (
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID",
    "SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_NODE",
)  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """capability: (major, minor); memory in MB."""

    name: str
    capability: tuple[int, int]
    memory_mb: int
    free_mb: int


@dataclass(frozen=True)
class Plan:
    """What a run of this config would start here."""

    ranks: int = 1
    workers: int = 2
    prefetch: int = 2
    batch_size: int = 16
    clip_s: float = 4.0
    num_nodes: int = 1
    rendezvous: str | None = None
    interface: str | None = None
    threads: int = 0
    front_end: str = "auto"
    output_root: str = "outputs"
    data_root: str | None = None


@dataclass(frozen=True)
class Facts:
    """Everything the checks judge. The defaults are those of a sound laptop without a GPU."""

    plan: Plan = field(default_factory=Plan)
    torch: str = "2.13.0"
    cuda_build: str | None = None  # the CUDA version torch was built with
    driver: str | None = None  # of NVIDIA, as 550.54.14
    cuda_works: bool = False
    cuda_error: str = ""
    arch_list: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    peers: tuple[tuple[int, int, bool], ...] = ()  # GPU pairs: do they reach each other's memory
    links: tuple[str, ...] = ()  # kinds of links between GPUs, as nvidia-smi topo names them
    gloo: bool = True
    nccl: str | None = None  # its version
    interfaces: tuple[network.Interface, ...] = (network.Interface("lo", ("127.0.0.1",)),)
    host: str = "here"
    host_addresses: tuple[str, ...] = ("127.0.0.1",)
    environment: Mapping[str, str] = field(default_factory=dict)
    ports_taken: tuple[int, ...] = ()
    can_listen: bool = True
    shm_mb: int | None = 8192  # free in /dev/shm; None: there is none
    files_soft: int = 65536
    files_hard: int = 65536
    disk_bytes: int = 10**12
    disk_files: int = 10**7
    disk_writable: str = ""  # why it isn't
    decode: tuple[int, float] | None = None  # (files tried, seconds of audio decoded per second)
    data_error: str = ""
    cores: int = 8
    memory_mb: int = 16384  # available now
    slurm_commands: tuple[str, ...] = ()
    slurm_answers: bool = False
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # extra -> packages that are missing
    torch_threads: int = 8


def gather(plan: Plan) -> Facts:
    """The facts of this machine."""
    return Facts(
        plan=plan,
        **_torch(),
        **_network(plan),
        **_machine(plan),
        **_data(plan.data_root),
        **_slurm(),
        extras=missing_extras(),
        environment={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    )


def _torch() -> dict[str, Any]:
    import warnings

    import torch

    from echofree.dist.exchange import backends

    gloo, nccl = backends()
    facts: dict[str, Any] = {
        "torch": str(torch.__version__), "cuda_build": torch.version.cuda, "driver": driver_version(), "gloo": gloo,
        "nccl": nccl, "torch_threads": torch.get_num_threads(),
    }  # fmt: skip
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        facts["cuda_works"] = torch.cuda.is_available()
    facts["cuda_error"] = " ".join(str(w.message) for w in said)
    if not facts["cuda_works"]:
        return facts
    gpus = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(about.name, (about.major, about.minor), total // 2**20, free // 2**20))
    pairs = [(i, j) for i in range(len(gpus)) for j in range(len(gpus)) if i < j]
    return {
        **facts,
        "gpus": tuple(gpus),
        "arch_list": tuple(torch.cuda.get_arch_list()),
        "peers": tuple((i, j, torch.cuda.can_device_access_peer(i, j)) for i, j in pairs),
        "links": _links() if pairs else (),
    }


def driver_version() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    text = path.read_text() if path.is_file() else ""
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    if found is None and shutil.which("nvidia-smi"):
        found = re.search(r"\d{3}\.\d+(?:\.\d+)?", ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv"))
    return found[0] if found else None


def _links() -> tuple[str, ...]:
    if not shutil.which("nvidia-smi"):
        return ()
    return tuple(sorted(set(re.findall(r"\b(NV\d+|PIX|PXB|PHB|NODE|SYS)\b", _matrix(ask("nvidia-smi", "topo", "-m"))))))


def _matrix(text: str) -> str:
    """The rows of the GPUs without the legend below, which names every kind."""
    return "\n".join(line for line in text.splitlines() if line.startswith("GPU"))


def _network(plan: Plan) -> dict[str, Any]:
    host = socket.gethostname()
    try:
        addresses = tuple(network.addresses_of(host))
    except OSError:
        addresses = ()
    wanted = [int(plan.rendezvous.rpartition(":")[2])] if plan.rendezvous else []
    taken = tuple(port for port in [*wanted, *PORTS] if not _can_bind(port))
    return {
        "interfaces": tuple(network.interfaces()), "host": host, "host_addresses": addresses, "ports_taken": taken,
        "can_listen": _can_bind(0),
    }  # fmt: skip


def _can_bind(port: int) -> bool:
    with socket.socket() as trying:
        trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trying.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _machine(plan: Plan) -> dict[str, Any]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shm = Path("/dev/shm")
    root = Path(plan.output_root)
    num_bytes, num_files = space.free(root)
    return {
        "shm_mb": space.free(shm)[0] // 2**20 if shm.is_dir() else None,
        "files_soft": soft,
        "files_hard": hard,
        "disk_bytes": num_bytes,
        "disk_files": num_files,
        "disk_writable": _why_not_writable(root),
        "cores": cores(),
        "memory_mb": memory_mb(),
    }


def _why_not_writable(path: Path) -> str:
    while not path.exists() and path != path.parent:
        path = path.parent
    if not path.is_dir():
        return f"{path} is a file"
    return "" if os.access(path, os.W_OK | os.X_OK) else f"{path} isn't writable for this user"


def cores() -> int:
    """Cores that this process may use: its affinity, and a container's quota."""
    count = len(os.sched_getaffinity(0))
    for path, second in (
        ("/sys/fs/cgroup/cpu.max", None),
        ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "cpu.cfs_period_us"),
    ):
        try:
            words = Path(path).read_text().split()
            if second is not None:
                words.append(Path(path).with_name(second).read_text().strip())
        except OSError:
            continue  # another kind of cgroup, or none
        if words[0].isdigit():
            count = min(count, max(1, int(words[0]) // int(words[1])))
    return count


def memory_mb() -> int:
    """Memory that is available now, within a container's limit."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    found = int(lines["MemAvailable"].split()[0]) // 1024
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            words = [(Path("/sys/fs/cgroup") / name).read_text().strip() for name in (limit, used)]
        except OSError:
            continue  # another kind of cgroup, or none
        if all(word.isdigit() for word in words):
            found = min(found, (int(words[0]) - int(words[1])) // 2**20)
    return found


def _data(root: str | None) -> dict[str, Any]:
    """A few files of the data root, decoded."""
    if root is None:
        return {}
    from echofree import audio

    folder = Path(root)
    if not folder.is_dir():
        return {"data_error": f"{root} doesn't exist" if not folder.exists() else f"{root} is no folder"}
    paths = list(islice((p for p in folder.rglob("*") if p.suffix.lower() in AUDIO), DECODE_FILES))
    if not paths:
        return {"data_error": f"{root} holds no {', '.join(AUDIO)} files"}
    began, seconds, tried = time.perf_counter(), 0.0, 0
    for path in paths:
        try:
            samples, rate_hz = audio.read(path)
        except Exception as error:  # whatever a codec says, it is a fact about the data
            return {"data_error": f"{path} can't be read: {error}"}
        seconds, tried = seconds + len(samples) / rate_hz, tried + 1
        if time.perf_counter() - began > DECODE_S:
            break
    return {"decode": (tried, seconds / max(time.perf_counter() - began, 1e-6))}


def _slurm() -> dict[str, Any]:
    commands = tuple(name for name in ("sbatch", "srun", "sinfo", "scontrol", "sacct") if shutil.which(name))
    answers = "UP" in ask("scontrol", "ping") if "scontrol" in commands else False
    return {"slurm_commands": commands, "slurm_answers": answers}


def missing_extras() -> dict[str, tuple[str, ...]]:
    """Extra of this package -> those of its packages that aren't installed."""
    found: dict[str, list[str]] = {}
    for line in metadata.requires("echofree") or []:
        needed, _, marker = line.partition(";")
        extra = re.search(r"extra\s*==\s*['\"](\w+)['\"]", marker)
        if extra is None:
            continue
        package = re.split(r"[\s<>=!~\[;(]", needed.strip(), maxsplit=1)[0]
        missing = found.setdefault(extra[1], [])
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            missing.append(package)
    return {extra: tuple(missing) for extra, missing in found.items()}


def ask(*command: str) -> str:
    """What an outside command prints; "" when it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{command[0]}: {error}", file=sys.stderr)
        return ""
    return done.stdout
