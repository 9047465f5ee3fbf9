"""Runs a function on several ranks of this machine, in about a second, and tells what happened on each.

The ranks are forked (a spawned rank pays for importing torch again), meet through a file (no ports, so any number of
tests may run at once), and have a time limit. A failure shows every rank's traceback, and for a stuck rank the line
where it stands.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

GRACE_S = 5.0  # for the other ranks to end by themselves once one has failed
INIT_METHOD = "RANKS_INIT_METHOD"  # the variable that tells a rank where to meet, for functions that start the group


class RanksFailed(AssertionError):
    """At least one rank failed or was too slow.

    Args:
        reports: what happened, by rank: "" for a rank that ended well.
    """

    def __init__(self, reports: list[str]):
        self.reports = reports
        bad = [f"--- rank {rank} of {len(reports)} ---\n{text}" for rank, text in enumerate(reports) if text]
        super().__init__("\n".join([f"{len(bad)} of {len(reports)} ranks failed", *bad]))


def run_ranks(
    fn: Callable[..., Any],
    n: int,
    timeout: float = 60.0,
    args: tuple[Any, ...] = (),
    init: bool = True,
    group_timeout: float = 30.0,
) -> list[Any]:
    """Calls fn(rank, n, *args) on `n` forked ranks over gloo.

    Args:
        fn: any function, closures included.
        n: ranks.
        timeout: seconds for all of it.
        args: handed to every rank.
        init: starts the process group first and ends it afterwards. Without it the rank finds the place to meet in
            the variable RANKS_INIT_METHOD. RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are set either way.
        group_timeout: seconds after which a collective gives up.

    Returns:
        What each rank returned, by rank (anything that can be pickled; tensors travel by value).

    Raises:
        RanksFailed: a rank raised, died, or was too slow.
    """
    _check_parent()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        context = multiprocessing.get_context("fork")
        ranks = [
            context.Process(target=_rank, args=(fn, rank, n, args, folder, init, group_timeout)) for rank in range(n)
        ]
        for process in ranks:
            process.start()
        late = _wait(ranks, Path(folder), timeout)
        reports = [_report(process, rank, Path(folder), rank in late, timeout) for rank, process in enumerate(ranks)]
        if any(reports):
            raise RanksFailed(reports)
        return [pickle.loads((Path(folder) / f"{rank}.result").read_bytes()) for rank in range(n)]


def _check_parent() -> None:
    """A fork copies one thread only: whatever lock another thread holds stays locked in the child for ever."""
    threads = [t.name for t in threading.enumerate()]
    assert len(threads) == 1, f"ranks are forked, which needs a parent with one thread; here are {threads} (pytest -n?)"
    assert not (torch.cuda.is_available() and torch.cuda.is_initialized()), "a forked rank can't use the parent's GPU"


def _rank(
    fn: Callable[..., Any], rank: int, n: int, args: tuple[Any, ...], folder: str, init: bool, group_timeout: float
) -> None:
    """The life of one rank. It leaves through os._exit: gloo can abort while the interpreter is being taken down."""
    here, code = Path(folder), 1
    stuck = (here / f"{rank}.stack").open("w")
    faulthandler.register(signal.SIGUSR1, file=stuck, all_threads=True)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(n), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(n))
    os.environ[INIT_METHOD] = f"file://{folder}/meet"
    torch.set_num_threads(1)  # the parent's pool of threads wasn't forked along
    random.seed(rank)
    np.random.seed(rank)  # a fork would give every rank the same global state
    torch.manual_seed(rank)
    try:
        result = _call(fn, rank, n, args, init, group_timeout)
        (here / f"{rank}.result").write_bytes(pickle.dumps(result))
        code = 0
    except BaseException:
        (here / f"{rank}.error").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _call(fn: Callable[..., Any], rank: int, n: int, args: tuple[Any, ...], init: bool, group_timeout: float) -> Any:
    if not init:
        return fn(rank, n, *args)
    import datetime

    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=os.environ[INIT_METHOD],
        rank=rank,
        world_size=n,
        timeout=datetime.timedelta(seconds=group_timeout),
    )
    result = fn(rank, n, *args)
    dist.barrier()  # a rank that leaves early would reset the connections of the others
    dist.destroy_process_group()
    return result


def _wait(ranks: list[BaseProcess], folder: Path, timeout: float) -> set[int]:
    """Waits for all ranks; -> those that had to be killed, after their stacks were written."""
    end = time.monotonic() + timeout
    while any(p.is_alive() for p in ranks) and time.monotonic() < end:
        if any(p.exitcode not in (None, 0) for p in ranks):
            end = min(end, time.monotonic() + GRACE_S)
            _join(ranks, end)
            break
        time.sleep(0.01)
    late = {rank for rank, p in enumerate(ranks) if p.is_alive()}
    for rank in late:
        os.kill(_pid(ranks[rank]), signal.SIGUSR1)
    if late:
        time.sleep(0.3)  # for the stacks
    for rank in late:
        ranks[rank].kill()
    _join(ranks, time.monotonic() + 10)
    return late


def _join(ranks: list[BaseProcess], end: float) -> None:
    for process in ranks:
        process.join(max(end - time.monotonic(), 0))


def _pid(process: BaseProcess) -> int:
    assert process.pid is not None
    return process.pid


def _report(process: BaseProcess, rank: int, folder: Path, late: bool, timeout: float) -> str:
    error = folder / f"{rank}.error"
    if error.exists():
        return error.read_text()
    if late:
        return f"didn't end within {timeout:g} s; it stood here:\n" + (folder / f"{rank}.stack").read_text()
    return "" if process.exitcode == 0 else f"died with exit code {process.exitcode}"
