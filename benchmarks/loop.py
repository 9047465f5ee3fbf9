"""What the loop costs: an EchoFree step against a bare PyTorch step on the same model and batches, in one run.

    python benchmarks/loop.py [--ranks 1|2] [--rounds 7] [--steps 8]

Both sides train `tiny` (gradient clipping, fused AdamW) on clips held in memory, in turns, so that a busy machine slows
both. The EchoFree side is the whole of `Loop.fit`: loader, weights over ranks, stop flag, window, watchdog's pulse.
With two ranks both sides use DDP over gloo and the same synchronised batch norm. Prints a line and one JSON line; the
target is a ratio of 1.03 (median over rounds).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from omegaconf import OmegaConf

from echofree.config.build import build_model, build_task
from echofree.config.compose import compose
from echofree.contracts import Batch, Clip
from echofree.data.loader import Plan, TrainLoader
from echofree.data.synthetic import Synthetic
from echofree.dist.strategy import Amp, build_strategy
from echofree.dist.world import World, join
from echofree.log import Position
from echofree.loop import Loop
from echofree.optim import build_optimizer
from echofree.rundir import RunDir, create
from echofree.stop import StopFlag

TARGET = 1.03
CLIPS, SECONDS = 4, 2.0
CPU = torch.device("cpu")


class InMemory:
    """Clips made once."""

    def __init__(self, count: int):
        scenes = Synthetic(num_train=count, segment_s=SECONDS).split("train")
        assert scenes is not None
        self.sample_rate, self.clips = scenes.sample_rate, [scenes.item(i, 0) for i in range(count)]

    def __len__(self) -> int:
        return len(self.clips)

    def item(self, index: int, epoch: int) -> Clip:
        return self.clips[index]


def ours(model: torch.nn.Module, data: InMemory, world: World, steps: int, folder: Path) -> float:
    """-> seconds per step as metrics.jsonl has them."""
    words = [f"train.batch_size={CLIPS}", f"train.max_steps={steps}", f"train.log_every={steps}", "train.epochs=1000"]
    words += [f"dist={'ddp' if world.size > 1 else 'single'}"]
    config = compose(words).config
    OmegaConf.set_struct(config, False)
    amp = Amp("fp32", CPU)
    strategy = build_strategy(config.dist, model, amp, world)
    plan = Plan(len(data), CLIPS, 1, strategy.data_size, 0)

    def loader(start: tuple[int, int]) -> TrainLoader:
        return TrainLoader(data, plan, strategy.data_rank, 1000, start)

    run = RunDir(Path(world.from_first(str(create(folder, "", [], 0)) if world.is_first else "")), world.is_first)
    optimizer = build_optimizer(config.optim, model.parameters())
    task = build_task(config)
    loop = Loop(
        config, world, strategy, amp, task, optimizer, plan, loader, None, run, None, Position(), StopFlag(), CPU
    )  # fmt: skip
    loop.save = lambda better=False: folder  # type: ignore[method-assign]  # a step is measured, not the disk
    loop.fit()
    return float(world.from_first(run.metrics()[-1]["step_s"] if world.is_first else 0.0))


def bare(model: torch.nn.Module, batches: list[Batch], world: World, steps: int) -> float:
    """A loop as one would write it by hand; -> seconds per step."""
    config = compose(["dist=ddp" if world.size > 1 else "dist=single"]).config
    wrapped = build_strategy(config.dist, model, Amp("fp32", CPU), world).model
    task = build_task(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model.train()
    begin = time.perf_counter()
    for step in range(steps):
        batch = batches[step % len(batches)]
        loss, weight, _ = task.loss(wrapped, batch)
        (loss / weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return (time.perf_counter() - begin) / steps


def measure(rank: int, ranks: int, rounds: int, steps: int, port: int) -> None:
    torch.set_num_threads(1)
    names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({k: str(v) for k, v in names.items()}, MASTER_ADDR="localhost", MASTER_PORT=str(port))
    world = World(rank, ranks, rank, ranks)
    join(world, "gloo", CPU, 60, 60)
    data = InMemory(4 * CLIPS * ranks)
    plan = Plan(len(data), CLIPS, 1, ranks, 0)
    loader = TrainLoader(data, plan, rank, 1)
    batches = [loader.next_step(step)[0] for step in range(plan.steps_per_epoch)]
    torch.manual_seed(0)
    model = build_model(compose([]).config)
    pairs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            one = ours(copy.deepcopy(model), data, world, steps, Path(folder))
            other = bare(copy.deepcopy(model), batches, world, steps)
            if number:  # the first round warms up
                pairs.append((one, other))
    if world.is_first:
        report(ranks, pairs)
    if ranks > 1:
        dist.barrier()
        os._exit(0)


def report(ranks: int, pairs: list[tuple[float, float]]) -> None:
    ratios = sorted(a / b for a, b in pairs)
    result: dict[str, Any] = {
        "benchmark": "loop",
        "ranks": ranks,
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_min": round(ratios[0], 4),
        "ratio_max": round(ratios[-1], 4),
        "bare_step_s": round(statistics.median(b for _, b in pairs), 4),
        "target": TARGET,
    }
    print(f"{ranks} rank(s): an EchoFree step takes {result['ratio_median']} of a bare one")
    print(json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    if args.ranks == 1:
        measure(0, 1, args.rounds, args.steps, 0)
        return
    import socket

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    mp.start_processes(measure, (args.ranks, args.rounds, args.steps, port), args.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
