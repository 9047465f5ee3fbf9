"""Where the time of a step goes: each part alone, then the whole, on every rank; and what that says.

Each part is timed on batches that are there already, so that nothing hides behind anything else. A step with one clip
shows what a step costs whatever the work: launching operations one after another.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from echofree.contracts import Batch
from echofree.errors import ConfigError
from echofree.meter import peak_mb

if TYPE_CHECKING:
    from echofree.loop import Loop

WARM_UP = 2
DATA, COMMUNICATION, LAUNCH, COMPUTE = "data", "communication", "launch", "compute"


@dataclass
class Times:
    """Seconds of one rank and one optimizer step, medians. nan: this strategy can't do it alone.

    Attributes:
        first_batch: until the loader gave its first step.
        data: a step's batches, when nothing else is done.
        copy: moving them to the device.
        forward: forward pass and loss.
        local: forward and backward, no gradients exchanged.
        exchanged: the same, gradients exchanged.
        single: `local` with one clip instead of the micro-batch.
        update: clipping and optimizer.
        step: the whole.
        wait, agree: of it, waiting for data and for the other ranks before the step.
        peak_mb: the most memory so far.
    """

    first_batch: float
    data: float
    copy: float
    forward: float
    local: float
    exchanged: float
    single: float
    update: float
    step: float
    wait: float
    agree: float
    peak_mb: float


class Stopwatch:
    """Times calls on a device that may still be busy when they return."""

    def __init__(self, device: torch.device, steps: int):
        self.device, self.steps = device, steps

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def once(self, call: Callable[[], Any]) -> float:
        self.sync()
        began = time.perf_counter()
        call()
        self.sync()
        return time.perf_counter() - began

    def median(self, call: Callable[[], Any]) -> float:
        return statistics.median(self.once(call) for _ in range(self.steps))

    def medians(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        """In turns, so that a machine that slows down slows all of them."""
        seen: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(WARM_UP + self.steps):
            for name, call in calls.items():
                seconds = self.once(call)
                if number >= WARM_UP:
                    seen[name].append(seconds)
        return {name: statistics.median(values) for name, values in seen.items()}


def times(loop: Loop, steps: int) -> Times:
    """Measures this rank; every rank calls it. The loop has trained a few steps afterwards.

    Raises:
        ConfigError: the data has too few steps.
    """
    there = loop.config.train.epochs * loop.plan.steps_per_epoch - WARM_UP - 1
    if there < 1:
        raise ConfigError(
            f"the data has {there + WARM_UP + 1} steps; {WARM_UP + 2} are needed. Type train.batch_size=1, or more "
            "train.epochs"
        )
    steps = min(steps, there)
    watch = Stopwatch(loop.device, steps)
    first, data, host = _data(loop, steps)
    batches = [batch.to(loop.device) for batch in host]
    loop.strategy.model.train()
    loop.pulse.at("forward and backward")
    copy = watch.median(lambda: [b.to(loop.device, non_blocking=True) for b in host])
    weight = loop.world.sum([sum(loop.task.weight(batch) for batch in batches)])[0]
    one = [batch.map(lambda t: t[:1]) for batch in batches]
    calls: dict[str, Callable[[], Any]] = {}
    if loop.config.dist.name.value != "pipeline":  # its ranks can only run together
        calls["forward"] = lambda: _local(loop, batches, backward=False)
        calls["local"] = lambda: _local(loop, batches)
        calls["single"] = lambda: _local(loop, one)
    calls["exchanged"] = lambda: _exchanged(loop, batches, weight)  # last: it leaves gradients for the update
    took = watch.medians(calls)
    update = watch.median(lambda: _update(loop))
    loop.optimizer.zero_grad(set_to_none=True)
    nan = float("nan")
    whole, wait, agree = _whole(loop, watch, steps)
    return Times(
        first_batch=first, data=data, copy=copy, forward=took.get("forward", nan), local=took.get("local", nan),
        exchanged=took["exchanged"], single=took.get("single", nan), update=update, step=whole, wait=wait,
        agree=agree, peak_mb=peak_mb(loop.device),
    )  # fmt: skip


def _data(loop: Loop, steps: int) -> tuple[float, float, list[Batch]]:
    """-> (seconds to the first step's batches, seconds of each later step's, the last batches)"""
    loop.pulse.at("data")
    loader = loop.make_loader((0, 0))
    loop.pulse.board = loader.board
    began = time.perf_counter()
    try:
        batches = loader.next_step(0)
        first = time.perf_counter()
        for number in range(1, steps + 1):
            batches = loader.next_step(number % loop.plan.steps_per_epoch)
        each = (time.perf_counter() - first) / steps
    finally:
        loader.close()
    return first - began, each, batches


def _local(loop: Loop, batches: Sequence[Batch], backward: bool = True) -> None:
    """A step's micro-batches without the exchange of gradients."""
    for batch in batches:
        with loop.strategy.micro(last=False):
            with loop.amp.autocast():
                loss, _, _ = loop.task.loss(loop.strategy.model, batch)
            if backward:
                loop.amp.backward(loss)
    loop.optimizer.zero_grad(set_to_none=True)


def _exchanged(loop: Loop, batches: Sequence[Batch], weight: float) -> None:
    loop.optimizer.zero_grad(set_to_none=True)
    loop.strategy.run(loop.task, batches, weight)


def _update(loop: Loop) -> None:
    norm = loop.strategy.clip(loop.config.train.clip_norm)
    if not loop.amp.scaler.is_enabled():  # a scaler wants to see its own backward pass before each update
        loop.amp.update(loop.optimizer, norm)


def _whole(loop: Loop, watch: Stopwatch, steps: int) -> tuple[float, float, float]:
    """-> seconds of whole steps, of waiting for data, of agreeing"""
    loader = loop.make_loader((0, 0))
    loop.pulse.board = loader.board
    seen: list[tuple[float, float, float]] = []
    try:
        for _ in range(WARM_UP + steps):
            before = loop.window.wait_s, loop.window.agree_s
            taken = watch.once(lambda: turn(loop, loader))
            seen.append((taken, loop.window.wait_s - before[0], loop.window.agree_s - before[1]))
    finally:
        loader.close()
    columns = list(zip(*seen[WARM_UP:], strict=True))
    return statistics.median(columns[0]), statistics.fmean(columns[1]), statistics.fmean(columns[2])


def turn(loop: Loop, loader: Any) -> None:
    """One whole step of the loop; the epoch turns where it is time."""
    loop.turn(loader)
    if loop.state.step_in_epoch == loop.plan.steps_per_epoch:
        loop.state.epoch, loop.state.step_in_epoch = loop.state.epoch + 1, 0


def mean(ranks: Sequence[Times]) -> dict[str, float]:
    """Means over ranks. Of the wait for data the longest, since all others wait for that rank when they agree: what
    they do so is taken off `agree`."""
    names = [field.name for field in dataclasses.fields(Times)]
    of = {name: statistics.fmean(getattr(rank, name) for rank in ranks) for name in names}
    longest = max(rank.wait for rank in ranks)
    return {**of, "wait": longest, "agree": max(0.0, of["agree"] - (longest - of["wait"]))}


def shares(of: Mapping[str, float], clips: int) -> dict[str, float]:
    """What bounds a step, as shares of it that add up to 1.

    Args:
        of: the means of `Times`.
        clips: of a micro-batch, to which `local` belongs.
    """
    local = of["local"] if of["local"] == of["local"] else of["exchanged"]
    fixed = 0.0
    if clips > 1 and of["single"] == of["single"]:  # a line through one clip and all of them
        fixed = min(max(0.0, (clips * of["single"] - local) / (clips - 1)), local)
    parts = {
        DATA: of["wait"] + of["copy"],
        COMMUNICATION: max(0.0, of["exchanged"] - local) + of["agree"],
        LAUNCH: fixed,
        COMPUTE: local - fixed + of["update"],
    }
    total = sum(parts.values())
    return {name: seconds / total for name, seconds in parts.items()}


def verdict(share: Mapping[str, float]) -> str:
    """data | compute | communication | launch: the largest share."""
    return max(share, key=lambda name: share[name])


def advice(bound: str, of: Mapping[str, float], config: Any, world_size: int, device: str) -> list[str]:
    """What to change, the most promising first; of the means in `of`."""
    train, clips, workers = config.train, config.train.batch_size, config.data.num_workers
    bigger = f"train.batch_size={2 * clips} (or auto) with the same train.global_batch_size: fewer, larger operations"
    if bound == DATA:
        rest = max(1e-9, of["exchanged"] + of["update"])
        needed = max(1, round(1.2 * max(1, workers) * of["data"] / rest + 0.5))
        return [
            (
                f"data.num_workers={max(needed, workers + 1)}: a step's clips take {1e3 * of['data']:.0f} ms with "
                f"{workers} worker(s), the rest of a step {1e3 * rest:.0f} ms"
            ),
            "a faster disk or shorter files, where clips are read; more cores, where they are made",
        ]
    if bound == COMMUNICATION:
        found = [
            (
                "more accumulation (gradients travel once a step): train.gradient_accumulation_steps, with a larger "
                "global batch"
            ),
            f"dist.bucket_cap_mb={2 * config.dist.bucket_cap_mb:g} (fewer, larger messages), where dist=ddp",
            "a faster connection: dist.backend=nccl on GPUs; dist.interface; ranks that talk most on one machine",
        ]
        return found if world_size > 1 else found[:1]
    if bound == LAUNCH:
        return [
            (
                f"{bigger}. A step with one clip takes {1e3 * of['single']:.0f} ms, with {clips} it takes "
                f"{1e3 * of['local']:.0f} ms"
            ),
            *([] if train.compile else ["train.compile=true: operations are fused"]),
        ]
    found = ["train.precision=bf16"] if device == "cuda" and train.precision.value == "fp32" else []
    found += (
        ["train.activation_checkpointing=false: nothing is computed twice"] if train.activation_checkpointing else []
    )
    found += [] if train.compile else ["train.compile=true"]
    return [*found, "more ranks: dist=ddp dist.num_procs=N on more GPUs or machines", "a smaller model"]


ROWS = (
    ("data alone", "data"),
    ("copy to the device", "copy"),
    ("forward alone", "forward"),
    ("forward and backward", "local"),
    ("  the same, one clip", "single"),
    ("  with exchange", "exchanged"),
    ("clip and update", "update"),
    ("whole step", "step"),
    ("  waiting for data", "wait"),
    ("  agreeing", "agree"),
)


def table(ranks: Sequence[Times]) -> list[str]:
    """Milliseconds: the mean over ranks, and the slowest rank."""
    lines = [f"  {'ms a step':<24} {'mean':>9} {'slowest':>9}"]
    for title, name in ROWS:
        values = [1e3 * getattr(rank, name) for rank in ranks]
        if values[0] == values[0]:
            worst = max(range(len(values)), key=values.__getitem__)
            who = f"  rank {worst}" if len(values) > 1 else ""
            lines.append(f"  {title:<24} {statistics.fmean(values):>9.1f} {values[worst]:>9.1f}{who}")
    peaks = ", ".join(f"{rank.peak_mb:.0f}" for rank in ranks)
    return [*lines, f"  first batch after {max(r.first_batch for r in ranks):.1f} s; peak memory {peaks} MB"]
