"""What the watchdog costs, as a share of a step: two DDP ranks over gloo, one run.

    python benchmarks/watchdog.py [--seconds 48]

Wall times of blocks with and without it alternate, and their ratio is printed; on a shared machine that ratio wanders
by more than the target, so the judgement is on what can be measured exactly: processor time of the watchdog's threads
per second, and the time of the heartbeats in the main thread per step. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

from echofree.dist.watchdog import Pulse, Watchdog
from echofree.dist.world import World, join
from echofree.log import Position
from echofree.rundir import RunDir

TARGET = 0.005
BLOCK_S = 6.0  # a watchdog starts once a run: its start must not count as if it came every second
PHASES = ("data", "agree", "forward and backward", "step", "log")  # of a step with logging


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=48.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "logs").mkdir()
        children = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                work(rank, Path(folder), args.seconds)
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0, 0], codes


def work(rank: int, folder: Path, seconds: float) -> None:
    torch.set_num_threads(1)
    world = join(World(rank, 2, rank, 2), "gloo", torch.device("cpu"), 60.0, 60.0, f"file://{folder}/meet")
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    model, batch = nn.parallel.DistributedDataParallel(net), torch.randn(64, 512)
    pulse = Pulse()
    times: dict[bool, list[float]] = {True: [], False: []}
    cpu_s = watched_s = 0.0
    rounds = max(2, round(seconds / BLOCK_S / 2))
    for number in range(2 * rounds):
        on = bool(number % 2)
        dog = Watchdog(pulse, Position(rank=rank), world, RunDir(folder, False), 60.0, 60.0, folder / "logs" / "x.log")
        if on:
            dog.start()
        began, steps = time.perf_counter(), 0
        while world.sum([float(time.perf_counter() - began < BLOCK_S)])[0] == world.size:
            for phase in PHASES if on else ():
                pulse.at(phase)
            model(batch).square().mean().backward()
            model.zero_grad()
            steps += 1
        wall_s = time.perf_counter() - began
        if on:
            cpu_s += sum(cpu_of(t) for t in threading.enumerate() if t.name.startswith("watchdog"))
            watched_s += wall_s
        times[on].append(wall_s / steps)
        if on:
            dog.stop()
            world.store = type(world.store)(f"again{number}", world.store)  # a fresh sheet for the next one
    if rank == 0:
        report(pulse, times, cpu_s / watched_s)
    world.barrier()
    os._exit(0)


def cpu_of(thread: threading.Thread) -> float:
    """Seconds of processor time of a living thread so far."""
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def report(pulse: Pulse, times: dict[bool, list[float]], threads_share: float) -> None:
    began = time.perf_counter()
    for _ in range(10000):
        pulse.at("step")
    beats_s = (time.perf_counter() - began) / 10000 * len(PHASES)
    step_s = statistics.median(times[False])
    share = threads_share + beats_s / step_s
    ratio = statistics.median(times[True]) / step_s
    print(
        f"step without it           {1e3 * step_s:8.2f} ms (blocks {', '.join(f'{1e3 * t:.1f}' for t in times[False])})"
    )
    print(f"step with it              {1e3 * statistics.median(times[True]):8.2f} ms, ratio {ratio:.4f}")
    print(f"its threads               {100 * threads_share:8.4f} % of one processor")
    print(f"heartbeats of one step    {1e6 * beats_s:8.2f} us")
    print(f"cost                      {100 * share:8.4f} % of a step (target {100 * TARGET} %)")
    result = {"benchmark": "watchdog", "share": round(share, 6), "wall_ratio": round(ratio, 4), "step_ms": 1e3 * step_s}
    print(json.dumps({**result, "target": TARGET, "reached": share < TARGET}), flush=True)


if __name__ == "__main__":
    main()
