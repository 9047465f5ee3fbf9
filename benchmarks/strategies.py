"""A step under fsdp, tensor and pipeline beside the bare torch recipe for the same model, batches and optimizer.

    python benchmarks/strategies.py [--rounds 12] [--hidden 128] [--layers 4] [--only fsdp]

Two gloo ranks, one thread each. Both sides run in the same processes, in turns (bare, ours, bare, ...), so that a busy
machine slows both; a round is one optimizer step of forward, backward, exchange, clipping and AdamW. Prints a line and
one JSON line per strategy: median seconds of both and the median of the ratios of neighbours. The target: 1.05.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from echofree.config.schema import DistConfig, StrategyKind
from echofree.contracts import Batch, Clip
from echofree.data.collate import collate
from echofree.dist import stages
from echofree.dist.strategy import Amp, build_strategy
from echofree.dist.world import World, join
from echofree.loss import CompressedSpectral, Weighted
from echofree.model.transformer import Transformer
from echofree.task.supervised import Supervised

RATE, CLIPS, SECONDS, MICROBATCHES = 16000, 4, 1.0, 2
CPU = torch.device("cpu")
LR, CLIP_NORM = 1e-4, 5.0
Step = Callable[[], None]


def clips() -> Batch:
    """[B, T] of noise with an echo; the same on all ranks."""
    generator = torch.Generator().manual_seed(7)
    waves = torch.randn(CLIPS, 2, int(RATE * SECONDS), generator=generator).numpy() * 0.1
    return collate([Clip(near + 0.5 * far, far, near, index=i) for i, (near, far) in enumerate(waves)], RATE)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, fused=True)


# --- the bare recipes: what torch's own tutorials do ------------------------------------------------------------------


def bare_fsdp(model: Transformer, task: Supervised, batch: Batch) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adam(model.parameters())
    share = batch.map(lambda t: t.chunk(dist.get_world_size())[dist.get_rank()])

    def step() -> None:
        loss, weight, _ = task.loss(model, share)
        (loss / weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def bare_tensor(model: Transformer, task: Supervised, batch: Batch) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    parallelize_module(model, mesh, {name: styles[how]() for name, how in model.tensor_plan().items()})
    # DTensors and plain tensors can't be clipped or updated in one list
    parameters = list(model.parameters())
    groups = [[p for p in parameters if hasattr(p, "placements") is sharded] for sharded in (True, False)]
    optimizers = [adam(group) for group in groups]

    def step() -> None:
        loss, weight, _ = task.loss(model, batch)
        (loss / weight).backward()
        norms = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
        norm = torch.stack([n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms]).square().sum().sqrt()
        factor = float((CLIP_NORM / (norm + 1e-6)).clamp(max=1.0))
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def bare_pipeline(model: Transformer, task: Supervised, batch: Batch) -> Step:
    rank, size = dist.get_rank(), dist.get_world_size()
    blocks = model.blocks()
    cuts = stages.balance(stages.costs(model, blocks), size)
    part = nn.Sequential(*(blocks[i] for i in cuts[rank]))
    optimizer = adam(part.parameters())
    pieces = [batch.map(lambda t, i=i: t.chunk(MICROBATCHES)[i]) for i in range(MICROBATCHES)]
    weight = batch.weight.sum()
    heard: list[Any] = []

    class Finished(nn.Module):
        """What the loss takes for the model: the estimate of a part that went through all stages."""

        def __init__(self, raw: Tensor, index: int):
            super().__init__()
            self.raw, self.index = raw, index

        def forward(self, mic: Tensor, far: Tensor) -> Any:
            return model.leave(self.raw, self.raw, heard[self.index])

    def loss(raw: Tensor, index: Tensor) -> Tensor:
        return task.loss(Finished(raw, int(index)), pieces[int(index)])[0] / weight

    stage = PipelineStage(part, rank, size, CPU)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss, scale_grads=False)

    def step() -> None:
        with torch.no_grad():
            packed, found = model.enter(batch.mic, batch.far)
        heard[:] = [
            {**found, "spectra": spectra} for spectra in found["spectra"].chunk(MICROBATCHES)
        ]  # fmt: skip
        schedule.step(*([packed] if rank == 0 else []), target=torch.arange(MICROBATCHES), return_outputs=False)
        total = nn.utils.get_total_norm([p.grad for p in part.parameters() if p.grad is not None]).square()
        dist.all_reduce(total)
        nn.utils.clip_grads_with_norm_(part.parameters(), CLIP_NORM, total.sqrt())
        optimizer.step()
        optimizer.zero_grad()

    return step


BARE = {"fsdp": bare_fsdp, "tensor": bare_tensor, "pipeline": bare_pipeline}


def ours(name: str, model: Transformer, task: Supervised, batch: Batch, world: World) -> Step:
    """The loop's own calls for one step."""
    config = DistConfig(name=StrategyKind[name], microbatches=MICROBATCHES)
    amp = Amp("fp32", CPU)
    strategy = build_strategy(config, model, amp, world)
    optimizer = adam(strategy.parameters)
    share, weight = batch, float(batch.weight.sum())
    if strategy.data_size > 1:
        share = batch.map(lambda t: t.chunk(strategy.data_size)[strategy.data_rank])

    def step() -> None:
        strategy.run(task, [share], weight)
        norm = strategy.clip(CLIP_NORM)
        amp.update(optimizer, norm)
        optimizer.zero_grad(set_to_none=True)

    return step


def rank(number: int, size: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = World(number, size, number, size, source="benchmark")
    join(world, "gloo", CPU, 120.0, 120.0, f"file://{folder}/meet")
    for name in options.only:
        measure(name, number, world, options)
    gc.collect()
    dist.barrier()
    world.close()
    os._exit(0)  # gloo can abort while an interpreter is taken down


def measure(name: str, number: int, world: World, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = Transformer(hidden_size=options.hidden, num_layers=options.layers, num_heads=4, context_frames=16)
    task = Supervised(Weighted({"spectral": CompressedSpectral()}, {"spectral": 1.0}), [], RATE)
    batch = clips()
    sides = {"bare": BARE[name](copy.deepcopy(model), task, batch), "ours": ours(name, model, task, batch, world)}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(options.rounds + 2):
        for side in sorted(sides, reverse=turn % 2 == 1):  # who goes first changes
            dist.barrier()
            began = time.perf_counter()
            sides[side]()
            dist.barrier()
            if turn > 1:
                times[side].append(time.perf_counter() - began)
    if number == 0:
        middle = {side: statistics.median(values) for side, values in times.items()}
        ratio = statistics.median(a / b for a, b in zip(times["ours"], times["bare"], strict=True))
        print(f"{name:9} bare {middle['bare']:.3f} s, ours {middle['ours']:.3f} s, ratio {ratio:.3f}")
        print(json.dumps({"strategy": name, **{f"{k}_s": v for k, v in middle.items()}, "ratio": ratio}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=list(BARE), choices=list(BARE))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, args=(2, str(Path(folder)), options), nprocs=2)


if __name__ == "__main__":
    main()
