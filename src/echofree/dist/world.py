"""Who am I, and with whom: found in one place, in one order, remembered with its source.

torchrun's environment (which the local launcher sets too) comes first, then a SLURM step of several tasks, then this
process alone. A control group over
gloo carries the decisions of all ranks (weights, stop flags, scores) so that none of them waits for a device.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from echofree.errors import ConfigError, EchoFreeError
from echofree.process import exists
from echofree.slurm import env as slurm

JOB_ID = "ECHOFREE_JOB_ID"  # set by the local launcher: every rank checks that it joined its own job
ATTEMPT = "ECHOFREE_ATTEMPT"  # of a run on several machines, whose store outlives a restart
INTERFACE = "GLOO_SOCKET_IFNAME"  # the network interface that gloo uses
TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class World:
    """The ranks of one run.

    Attributes:
        rank, size: this process among all.
        local_rank, local_size: this process among those of this machine.
        source: how the world was found: alone, torchrun, local or slurm.
        job_id: what all ranks of this start have in common; "" in a world of one.
        task: of the SLURM job that this process is in, if it is.
        backend: the collective back end of the data path: none, gloo or nccl.
        hosts, pids: host name and process of each rank.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    source: str = "alone"
    backend: str = "none"
    hosts: list[str] = field(default_factory=lambda: [socket.gethostname()])
    pids: list[int] = field(default_factory=lambda: [os.getpid()])
    job_id: str = ""
    task: slurm.Task | None = None
    met: Any = None  # the store of the step, where srun has started the ranks
    control: Any = None  # gloo process group; None in a world of one
    store: Any = None  # a connection to the meeting point for the watchdog alone; None in a world of one

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        return len(set(self.hosts))

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over all ranks, float64, the same bits on every rank."""
        if self.size == 1:
            return [float(v) for v in values]
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor, group=self.control)
        return tensor.tolist()

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def from_first(self, value: Any) -> Any:
        """Rank 0's `value` on every rank: rank 0 decides, others are told."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control)

    def twin(self, name: str) -> World:
        """The same ranks over a group of their own, for the exchanges of a thread. Every rank calls it in turn."""
        if self.size == 1:
            return self
        return replace(self, control=dist.new_group(backend="gloo", timeout=timedelta(days=1), group_desc=name))

    def gone(self) -> list[int]:
        """Ranks on this machine whose process has ended."""
        node = range(self.rank - self.local_rank, min(self.rank - self.local_rank + self.local_size, self.size))
        known = [r for r in node if r < len(self.pids) and self.hosts[r] == self.hosts[self.rank]]
        return [r for r in known if r != self.rank and not exists(self.pids[r])]

    def close(self) -> None:
        """Leave the group; to be called on the good path only, after the model is freed (an exception leaves without
        any collective, and gloo aborts when its last work object dies during interpreter exit)."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def found_in(env: Mapping[str, str]) -> World:
    """The world that the environment describes, before anyone is contacted.

    Raises:
        ConfigError: torchrun's or SLURM's variables are incomplete, or a job of several tasks is run without srun.
    """
    task = slurm.found_in(env)
    if "RANK" in env or "WORLD_SIZE" in env:
        missing = [name for name in TORCHRUN_NAMES if name not in env]
        if missing:
            raise ConfigError(
                f"RANK or WORLD_SIZE is set in the environment but {', '.join(missing)} isn't. Start with torchrun, "
                "which sets all of them, or unset RANK and WORLD_SIZE to run alone"
            )
        rank, size, local_rank, local_size = (int(env[name]) for name in TORCHRUN_NAMES[:4])
        source = "local" if JOB_ID in env else "torchrun"
        job_id = env.get(JOB_ID) or env.get("TORCHELASTIC_RUN_ID", "none")
        if task is not None:  # many scripts leave torchrun's id at its default
            job_id = f"{job_id} of SLURM's job {task.job_id}, start {task.restart}"
        return World(rank, size, local_rank, local_size, source=source, job_id=job_id, task=task)
    if task is not None and task.size > 1:
        job_id = task.identity
        return World(task.rank, task.size, task.local_rank, task.local_size, source="slurm", job_id=job_id, task=task)
    return World(task=task)


def choose_backend(asked: str, device: torch.device) -> str:
    """`auto` is nccl for CUDA devices and gloo otherwise."""
    if asked == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    if asked == "nccl" and device.type != "cuda":
        raise ConfigError(f"dist.backend=nccl needs CUDA devices, this run uses {device.type}. Type dist.backend=gloo")
    return asked


def join(
    world: World,
    backend: str,
    device: torch.device,
    start_timeout_s: float,
    timeout_s: float,
    init_method: str = "auto",
) -> World:
    """Meets the other ranks. In a world of one nothing happens.

    The store is prefixed with the restart count, since an elastic restart reuses the agent's store, which still holds
    the dead attempt's addresses; and every rank compares job ids before the first collective, since two jobs on one
    port would otherwise join each other.

    Raises:
        EchoFreeError: the ranks didn't meet within `start_timeout_s`, or belong to different jobs.
    """
    if world.size == 1:
        return world
    check_interface(os.environ.get(INTERFACE))
    method = "env://" if init_method == "auto" else init_method
    limit = timedelta(seconds=start_timeout_s)
    try:
        if world.met is not None and method == "env://":
            store = world.met
        else:
            store, _, _ = next(rendezvous(method, world.rank, world.size, timeout=limit))
    except Exception as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}" if method == "env://" else method
        raise EchoFreeError(
            f"rank {world.rank} of {world.size} on {socket.gethostname()} could not reach the meeting point {where} "
            f"within dist.start_timeout_s={start_timeout_s:g} s: {error}"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"echofree/{os.environ.get(ATTEMPT, '0')}.{attempt}", store)
    store.set_timeout(limit)
    _check_same_job(store, world, start_timeout_s)
    world.store = PrefixStore("watchdog", store.clone())  # type: ignore[attr-defined]
    # the watchdog ends a hang long before; the group's own limit, which can name nobody, stays behind it
    backstop = timedelta(seconds=max(start_timeout_s, 2 * timeout_s) + 60)
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=backstop,
        device_id=device if backend == "nccl" else None,
    )
    world.backend = backend
    world.control = dist.new_group(backend="gloo", timeout=backstop, group_desc="control")
    found = world.gather((socket.gethostname(), os.getpid()))
    world.hosts, world.pids = [host for host, _ in found], [pid for _, pid in found]
    return world


def use_interface(asked: str | None, world: World) -> None:
    """`dist.interface`, for gloo and NCCL of this process. Ranks that EchoFree started have theirs from the launcher,
    which knows the other machines."""
    if asked is not None and world.source == "torchrun":
        os.environ[INTERFACE] = os.environ["NCCL_SOCKET_IFNAME"] = asked


def _check_same_job(store: Any, world: World, start_timeout_s: float) -> None:
    mine = world.job_id or os.environ.get(JOB_ID) or "none"
    if world.is_first:
        store.set("job", mine)
    try:
        theirs = store.get("job").decode()
        # only now: rank 0, whose process holds the store, may leave as soon as it has read this
        store.set(f"here/{world.rank}", mine)
        if theirs == mine:
            store.wait([f"here/{rank}" for rank in range(world.size)])
            ids = [store.get(f"here/{rank}").decode() for rank in range(world.size)]
    except Exception as error:
        away = [str(rank) for rank in range(world.size) if not store.check([f"here/{rank}"])]
        raise EchoFreeError(
            f"rank {world.rank} on {socket.gethostname()} has waited dist.start_timeout_s={start_timeout_s:g} s for "
            f"rank(s) {', '.join(away)} of {world.size}, which never came: what do their logs say?"
        ) from error
    if theirs != mine:
        raise EchoFreeError(
            f"rank {world.rank} of job {mine!r} met rank 0 of job {theirs!r} at {os.environ.get('MASTER_ADDR')}:"
            f"{os.environ.get('MASTER_PORT')}: two jobs share one port. Give each torchrun its own --rdzv-endpoint or "
            f"--standalone, each sbatch script its own MASTER_PORT (or none)"
        )
    strangers = [f"rank {rank} of job {job!r}" for rank, job in enumerate(ids) if job != mine]
    if strangers:
        raise EchoFreeError(
            f"rank {world.rank} of job {mine!r} met {', '.join(strangers)}: two jobs share one port. Give each "
            "torchrun its own --rdzv-endpoint or --standalone"
        )
    if store.add("joined", 1) > world.size:
        raise EchoFreeError(f"more than {world.size} ranks joined job {mine!r}: a second start uses the same port")


def check_interface(asked: str | None) -> None:
    """gloo's own message for a wrong interface names neither the variable nor what would be right.

    Raises:
        ConfigError: no such interface on this machine.
    """
    have = [name for _, name in socket.if_nameindex()]
    wrong = [name for name in (asked or "").split(",") if name and name not in have]
    if wrong:
        ncclish = " (^ for exclusion is NCCL's syntax, gloo doesn't know it)" if wrong[0].startswith("^") else ""
        raise ConfigError(
            f"{INTERFACE}={asked}: {socket.gethostname()} has no interface {wrong[0]!r}{ncclish}. It has "
            f"{', '.join(have)}. Type: unset {INTERFACE}, or export {INTERFACE}={have[-1]}"
        )
