"""How the tasks of one srun find each other: without a file, and without a port that somebody has to choose.

The ports to try follow from the job's identity (id, step, number of requeues), below the range that the kernel hands
out. Rank 0 takes the first that is free and writes the identity into its store; the others knock at its node, and go by
whoever answers with another identity: two jobs at one port never meet. A node's ranks talk over the interface that
leads to the meeting point. Rank 0 also says which `dist` holds: the others need no config of their own to come.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import random
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from echofree.dist import network
from echofree.dist.endpoint import LinkCut, within
from echofree.errors import ConfigError, EchoFreeError
from echofree.slurm.env import Task

log = logging.getLogger("echofree")

PORTS, NUM_PORTS = range(20000, 32000), 8
KEY, WAY, SETTINGS = "echofree/identity", "echofree/way", "echofree/settings"
LIMIT_S = 600.0  # before rank 0 has said what dist.start_timeout_s is
CONNECT_S, ANSWER_S = 2.0, 4.0
POLL_S = 0.05
INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Settings:
    """What a rank has to know to join, said by rank 0.

    Attributes:
        device: `train.device`; the others are keys of `dist`.
    """

    backend: str
    interface: str | None
    init_method: str
    timeout_s: float
    start_timeout_s: float
    device: str


def lead(task: Task, settings: Settings) -> Any:
    """Rank 0's part. -> the store

    Raises:
        EchoFreeError: no free port.
    """
    store, address = _serve(task, os.environ, settings.start_timeout_s)
    store.set(SETTINGS, json.dumps(asdict(settings)))
    _use_interface(task, settings, store, address, time.monotonic() + settings.start_timeout_s)
    return store


def follow(task: Task, limit_s: float = LIMIT_S) -> tuple[Any, Settings]:
    """The others' part. -> (the store, what rank 0 says)

    Raises:
        ConfigError: the first node's name leads nowhere.
        EchoFreeError: rank 0 didn't answer in time.
    """
    end = time.monotonic() + limit_s
    store, address = _knock(task, os.environ, end, limit_s)
    settings = Settings(**json.loads(store.get(SETTINGS)))
    _use_interface(task, settings, store, address, end)
    return store, settings


def _use_interface(task: Task, settings: Settings, store: Any, address: str, end: float) -> None:
    """`dist.interface`, else what the user has exported, else the one that leads to the others."""
    if settings.interface is not None:
        os.environ[INTERFACE] = os.environ["NCCL_SOCKET_IFNAME"] = settings.interface
    elif INTERFACE not in os.environ:
        _use_way(task, store, address, end)


def ports(task: Task, environ: Mapping[str, str]) -> list[int]:
    """Where rank 0 may listen. MASTER_PORT is taken at its word."""
    if given := environ.get("MASTER_PORT"):
        return [int(given)]
    return random.Random(task.identity).sample(PORTS, NUM_PORTS)


def _serve(task: Task, environ: Mapping[str, str], limit_s: float) -> tuple[Any, str]:
    tried = ports(task, environ)
    for port in tried:
        try:
            store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=limit_s))
        except RuntimeError as error:  # torch's DistNetworkError
            log.debug("port %d: %s", port, error)
            continue
        store.set(KEY, task.identity)
        _remember(LOOPBACK, port)
        return store, LOOPBACK
    told = " (MASTER_PORT)" if "MASTER_PORT" in environ else ""
    raise EchoFreeError(
        f"{socket.gethostname()} has no free port among {', '.join(map(str, tried))}{told}: another job listens there. "
        + ("Type: unset MASTER_PORT, and a free one is found" if told else "Start again; name one with MASTER_PORT")
    )


def _knock(task: Task, environ: Mapping[str, str], end: float, limit_s: float) -> tuple[Any, str]:
    """-> (store, own address on the way there)"""
    home = task.node == 0
    host = LOOPBACK if home else environ.get("MASTER_ADDR") or task.nodes[0]
    addresses, tried, why = [LOOPBACK] if home else addresses_of(host), ports(task, environ), "nobody listens there"
    while time.monotonic() < end:
        for port in tried:
            for address in addresses:
                try:
                    with socket.create_connection((address, port), timeout=CONNECT_S) as line:
                        mine = str(line.getsockname()[0])
                    store = within(ANSWER_S, functools.partial(_client, address, port, limit_s))
                    told = within(ANSWER_S, functools.partial(_identity, store))
                except OSError as error:
                    why = f"{address} port {port}: {error.strerror or error}"
                    continue
                except LinkCut as error:
                    why = f"{address} port {port}: something answers that isn't a run of EchoFree ({error})"
                    continue
                if told == task.identity:
                    _remember(address, port)
                    return store, mine
                why = f"{address} port {port} belongs to {told}"
        time.sleep(POLL_S)
    raise EchoFreeError(
        f"rank {task.rank} of {task.size} on {socket.gethostname()} has not found rank 0 on {task.nodes[0]} within "
        f"dist.start_timeout_s={limit_s:g} s ({why}). Has rank 0 ended? Can the nodes reach each other? "
        f"{socket.gethostname()} has {network.described(network.interfaces())}"
    )


def addresses_of(node: str) -> list[str]:
    """Where a node is: what its name leads to, else the address that SLURM knows.

    Raises:
        ConfigError: neither leads anywhere.
    """
    try:
        return network.addresses_of(node)
    except OSError as error:
        from echofree.slurm.states import ask, parse_facts

        known = parse_facts(ask(["scontrol", "show", "node", "-o", node])[1]).get("NodeAddr", node)
        try:
            return network.addresses_of(known)
        except OSError:
            raise ConfigError(
                f"{socket.gethostname()} can't find the node {node}: its name leads to no address ({error.strerror}). "
                "Type: export MASTER_ADDR=<an address of it> in the job's script"
            ) from error


def _client(address: str, port: int, limit_s: float) -> Any:
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=limit_s))


def _identity(store: Any) -> str:
    end = time.monotonic() + ANSWER_S / 2
    while time.monotonic() < end:
        if store.check([KEY]):
            return str(store.get(KEY).decode())
        time.sleep(POLL_S)
    return "a program that isn't EchoFree"


def _use_way(task: Task, store: Any, mine: str, end: float) -> None:
    """The interface that leads to the other nodes. Rank 0's node learns it from the first that has come from elsewhere:
    its own idea of its name may be 127.0.1.1."""
    if len(task.nodes) == 1:
        os.environ[INTERFACE] = "lo"
        return
    if task.node != 0:
        peer = os.environ["MASTER_ADDR"]
        store.set(WAY, peer)
    else:
        while not store.check([WAY]):
            if time.monotonic() > end:
                return  # whoever waits for that rank says so
            time.sleep(POLL_S)
        mine = store.get(WAY).decode()
    found = network.holding(mine, network.interfaces())
    if found is None:
        log.warning("no interface of %s has the address %s that other nodes reach it at", socket.gethostname(), mine)
        return
    os.environ[INTERFACE] = found.name
    os.environ.setdefault("NCCL_SOCKET_IFNAME", found.name)


def _remember(address: str, port: int) -> None:
    """For messages, and for libraries that look there."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
