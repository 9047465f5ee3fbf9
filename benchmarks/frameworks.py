"""Side by side: the same model, batches, clipping and optimizer in a bare loop, EchoFree, Lightning and accelerate.

    python benchmarks/frameworks.py [--ranks 1|2] [--rounds 5] [--steps 8] [--peers FOLDER]

Lightning and accelerate are no dependencies of EchoFree. Install them into a folder of their own and name it; torch
stays the one that is there:

    pip install --no-deps --target FOLDER lightning pytorch-lightning lightning-utilities torchmetrics accelerate \
        tqdm psutil pyyaml safetensors huggingface_hub fsspec packaging
    python benchmarks/frameworks.py --peers FOLDER

A peer that can't be imported is left out, and that is said. All train `tiny` on clips held in memory, in turns, so that
a busy machine slows all of them; with two ranks all use DDP over gloo, gradients as views of buckets and the same
synchronised batch norm. Loggers, checkpoints, bars and summaries of the peers are off, and they get finished batches,
while EchoFree's loader stacks its clips in each step. Prints a line per framework and one JSON line: seconds a step
and EchoFree's ratio to each (medians over rounds), by the clock and in processor time of rank 0. The latter, the
difference between a run of several steps and one of a single step, still says something on a busy machine. The target:
EchoFree is at least as fast as both frameworks.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import logging
import os
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader

from echofree.config.build import build_model, build_task
from echofree.config.compose import compose
from echofree.contracts import Batch, Task
from echofree.data.loader import Plan, TrainLoader
from echofree.dist.batchnorm import has_batchnorm, synchronise
from echofree.dist.world import World, join
from loop import CLIPS, CPU, InMemory, bare, ours

LR, CLIP_NORM = 1e-3, 5.0
LAUNCHED = "TORCHELASTIC_RUN_ID"  # tells both peers that the ranks are there already
CONFIG = compose([]).config
Run = Callable[[torch.nn.Module, Task, list[Batch], World, int], float]


def lightning(model: torch.nn.Module, task: Task, batches: list[Batch], world: World, steps: int) -> float:
    """-> seconds per step, from the first batch to the end of the last step."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    clock: list[float] = []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, number: int) -> torch.Tensor:
            loss, weight, _ = task.loss(self.model, batch)
            return loss / weight

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)

    class Clock(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            clock.append(time.perf_counter())

        def on_train_end(self, *args: Any) -> None:
            clock.append(time.perf_counter())

    strategy: Any = "auto"
    if world.size > 1:
        strategy = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
    trainer = Trainer(
        accelerator="cpu", devices=world.size, strategy=strategy, max_steps=steps, gradient_clip_val=CLIP_NORM,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, callbacks=[Clock()],
    )  # fmt: skip
    data = DataLoader(list(itertools.islice(itertools.cycle(batches), steps)), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(Module(), train_dataloaders=data)
    assert trainer.global_step == steps
    return (clock[-1] - clock[0]) / steps


def accelerate(model: torch.nn.Module, task: Task, batches: list[Batch], world: World, steps: int) -> float:
    """-> seconds per step."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
    assert accelerator.num_processes == world.size
    wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True))
    wrapped.train()
    begin = time.perf_counter()
    for step in range(steps):
        loss, weight, _ = task.loss(wrapped, batches[step % len(batches)])
        accelerator.backward(loss / weight)
        accelerator.clip_grad_norm_(wrapped.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return (time.perf_counter() - begin) / steps


def peers() -> dict[str, Run]:
    """Those that can be imported; the others are named on standard error."""
    found: dict[str, Run] = {}
    for name, run in (("lightning", lightning), ("accelerate", accelerate)):
        try:
            __import__(name)
        except ImportError as error:
            print(f"{name} is left out: {error}. See the head of {Path(__file__).name}", file=sys.stderr)
        else:
            found[name] = run
    return found


def measure(rank: int, ranks: int, rounds: int, steps: int, port: int, folder: str | None) -> None:
    if folder is not None:
        sys.path.append(folder)  # behind ours, so that torch stays the one that is there
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    world = World(rank, ranks, rank, ranks)
    if ranks > 1:
        names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({k: str(v) for k, v in names.items()}, MASTER_ADDR="localhost", MASTER_PORT=str(port))
        join(world, "gloo", CPU, 60, 60)
    data = InMemory(4 * CLIPS * ranks)
    plan = Plan(len(data), CLIPS, 1, ranks, 0)
    loader = TrainLoader(data, plan, rank, 1)
    batches = [loader.next_step(step)[0] for step in range(plan.steps_per_epoch)]
    torch.manual_seed(0)
    model = build_model(CONFIG)
    others = peers()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ("bare", "echofree", *others)}
    with tempfile.TemporaryDirectory() as place:
        for number in range(rounds + 1):
            for name in taken:
                spent = []
                for count in (1, steps):
                    begin = time.process_time()
                    wall = once(name, others, model, data, batches, world, count, Path(place))
                    spent.append(time.process_time() - begin)
                if number:  # the first round warms up
                    taken[name].append((wall, (spent[1] - spent[0]) / (steps - 1)))
    if world.is_first:
        report(ranks, taken)
    if ranks > 1:
        dist.barrier()
        os._exit(0)


def once(
    name: str,
    others: dict[str, Run],
    model: torch.nn.Module,
    data: InMemory,
    batches: list[Batch],
    world: World,
    steps: int,
    place: Path,
) -> float:
    """One framework, one round; -> seconds per step."""
    fresh = copy.deepcopy(model)
    world.barrier()
    if name == "bare":
        return bare(fresh, batches, world, steps)
    if name == "echofree":
        return ours(fresh, data, world, steps, place)
    if world.size > 1 and has_batchnorm(fresh):
        synchronise(fresh)
    if world.size > 1:
        os.environ[LAUNCHED] = "frameworks"
    try:
        return others[name](fresh, build_task(CONFIG), batches, world, steps)
    finally:
        os.environ.pop(LAUNCHED, None)


def report(ranks: int, taken: dict[str, list[tuple[float, float]]]) -> None:
    result: dict[str, Any] = {"benchmark": "frameworks", "ranks": ranks, "rounds": len(taken["bare"])}
    for place, kind in enumerate(("step_s", "cpu_s")):
        each = {name: [row[place] for row in rows] for name, rows in taken.items()}
        result[kind] = {name: round(statistics.median(values), 4) for name, values in each.items()}
        for base in ("bare", *(name for name in taken if name not in ("bare", "echofree"))):
            pairs = [a / b for a, b in zip(each["echofree"], each[base])]
            result[f"{kind}_echofree_to_{base}"] = round(statistics.median(pairs), 4)
    for name in taken:
        wall, cpu = 1e3 * result["step_s"][name], 1e3 * result["cpu_s"][name]
        print(f"{ranks} rank(s): {name:<10} {wall:8.1f} ms a step, {cpu:8.1f} ms of a processor")
    print(json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--peers", help="the folder into which the peers are installed")
    args = parser.parse_args()
    if args.ranks == 1:
        measure(0, 1, args.rounds, args.steps, 0, args.peers)
        return
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    words = (args.ranks, args.rounds, args.steps, port, args.peers)
    mp.start_processes(measure, words, args.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
