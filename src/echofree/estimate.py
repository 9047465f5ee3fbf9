"""What a rank will hold in memory, told from its config: a few clips on a CPU, counted and scaled, instead of a run.

Every operation of a step on 2 and on 3 clips is followed (`meter.Meter`); since operation i of both is the same one,
what is alive behind it is a line in the number of clips, and the peak of a step is the largest value of these lines.
Weights, gradients and optimizer states are known exactly; how a strategy shares them out is arithmetic. Not seen: what
kernels take for themselves while they run, and what an allocator keeps back. On a CPU the latter is much: with 16
clips of `tiny` a process held 195 MB more than with 2, as told here, when freed memory was given back at once
(MALLOC_MMAP_THRESHOLD_=65536), and 300 MB more by glibc's own rules.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from echofree import resident
from echofree.config import layout
from echofree.config.schema import OptimKind, StrategyKind
from echofree.meter import MB, Meter
from echofree.rehearsal import Rehearsal, longest_samples
from echofree.sizing import SMALL, Size, asked, share

if TYPE_CHECKING:
    from echofree.parts import Parts


@dataclass(frozen=True)
class Estimate:
    """MB of one rank, the fullest where they differ.

    Attributes:
        rows: (what, MB, remark), in the order in which they fill up.
        size: the step that was assumed.
        num_samples: of its clips.
    """

    rows: list[tuple[str, float, str]]
    size: Size
    num_samples: int

    @property
    def total_mb(self) -> float:
        return sum(mb for _, mb, _ in self.rows)

    def table(self) -> str:
        shape = f"{self.size.batch_size} clips of {self.num_samples} samples"
        head = f"memory of one rank, {shape} at once, {self.size.accumulation} accumulation:"
        rows = [*self.rows, ("in all", self.total_mb, "")]
        return "\n".join([head, *(f"  {what:<28} {mb:>10.1f} MB  {remark}".rstrip() for what, mb, remark in rows)])


def estimate(config: Any, parts: Parts, ranks: int, device: str) -> Estimate:
    """For a config whose parts are built, on `ranks` ranks. `device`: cpu | cuda; only a CPU's rank counts the
    interpreter, since a GPU's memory holds tensors alone."""
    from echofree.dist.strategy import Amp, Single
    from echofree.recompute import recompute

    train, kind = config.train, config.dist.name
    axes = (
        layout.axes(kind.value, layout.asked(config.dist.mesh), ranks)
        if kind is not StrategyKind.single and ranks > 1
        else {}
    )
    data_size = layout.data_size(axes) if axes else 1
    mine = share(train, data_size) if asked(train) is None or train.global_batch_size is not None else None
    number = asked(train) or mine or 1
    size = Size(number, mine // number if mine else train.gradient_accumulation_steps, data_size)

    data = parts.source.split("train")
    num_samples = longest_samples(data)
    import_all()
    held = sum(t.nbytes for t in (*parts.model.parameters(), *parts.model.buffers()))
    base_mb = resident.now_mb() - held / MB if device == "cpu" else 0.0
    if train.activation_checkpointing:
        recompute(parts.model)
    precision = "bf16" if train.precision.value == "fp16" else train.precision.value  # a CPU lacks fp16; equally wide
    cpu = torch.device("cpu")
    strategy = Single(parts.model, Amp(precision, cpu))
    trial = Rehearsal(config, strategy, parts.task, cpu, data.sample_rate, num_samples)
    peak = _peak(trial, min(2, size.accumulation), size.batch_size)

    weights = sum(p.nbytes for p in strategy.parameters)
    states = weights * (1 if config.optim.name is OptimKind.sgd else 2)
    batch = sum(t.nbytes for t in vars(trial.batch(1)).values() if isinstance(t, torch.Tensor)) * size.batch_size
    rest = max(0, peak - states - batch - weights)  # gradients are as large as weights
    part, extra, remark = _shared(config, parts.model, axes, weights)
    active, note = _active(config, axes)
    rows = [
        ("interpreter, libraries, data", base_mb, "as in this process"),
        ("weights and buffers", (weights * part + held - weights) / MB, remark),
        ("collected from other ranks", extra / MB, "the largest blocks, whole"),
        ("gradients", weights * part / MB, ""),
        ("optimizer states", states * part / MB, config.optim.name.value),
        ("average of the weights", weights * part * (train.ema_decay > 0) / MB, "train.ema_decay"),
        ("a micro-batch", batch / MB, ""),
        ("activations and temporaries", rest * active / MB, note),
    ]
    return Estimate([row for row in rows if abs(row[1]) > 0.05], size, num_samples)


def import_all() -> None:
    """What a training imports, late and all: the first step of an optimizer brings a compiler along."""
    for name in ("torch._dynamo", "echofree.loop", "echofree.final"):
        importlib.import_module(name)


def _peak(trial: Rehearsal, micro_batches: int, clips: int) -> int:
    """Bytes beyond weights at the fullest moment of a step of so many clips."""
    strategy = trial.strategy
    lines = []
    for number in SMALL:
        with Meter([*strategy.bare.parameters(), *strategy.bare.buffers()]) as counted:
            trial.step(number, micro_batches)
        lines.append(np.asarray(counted.timeline, dtype=np.float64))
    few, more = lines
    if len(few) != len(more):  # what a model does depends on the number of clips: then only the peaks can be compared
        few, more = few.max(keepdims=True), more.max(keepdims=True)
    return int((few + (clips - SMALL[0]) * (more - few) / (SMALL[1] - SMALL[0])).max())


def _shared(config: Any, model: Any, axes: dict[str, int], weights: int) -> tuple[float, float, str]:
    """-> (share of the weights that a rank keeps, bytes that it holds whole for a while, remark)."""
    kind, part, extra, said = config.dist.name, 1.0, 0.0, []
    blocks: Sequence[Any] = list(model.blocks()) if callable(getattr(model, "blocks", None)) else []
    sizes = sorted((sum(p.nbytes for p in b.parameters() if p.requires_grad) for b in blocks), reverse=True)
    if kind is StrategyKind.fsdp and axes:
        count = axes.get("data", 1)
        part /= count
        outside = weights - sum(sizes)
        extra = outside + (sum(sizes[:2]) if config.dist.reshard_after_forward else sum(sizes))
        said.append(f"shared out over {count} ranks")
    if "tensor" in axes:
        planned = {f"{name}." for name in model.tensor_plan()}
        split = sum(p.nbytes for n, p in model.named_parameters() if n.startswith(tuple(planned)))
        part *= 1 - split / weights * (1 - 1 / axes["tensor"])
        said.append(f"Linear layers split over {axes['tensor']} ranks")
    if "pipeline" in axes:
        part /= axes["pipeline"]
        said.append(f"blocks laid out over {axes['pipeline']} ranks, about evenly")
    return part, extra, "; ".join(said)


def _active(config: Any, axes: dict[str, int]) -> tuple[float, str]:
    """-> (share of one process's activations, remark)."""
    if "pipeline" in axes:
        ranks, pieces = axes["pipeline"], config.dist.microbatches
        under_way = pieces if config.dist.schedule == "gpipe" else min(ranks, pieces)
        return under_way / pieces / ranks, f"{under_way} of {pieces} parts of a batch under way at once"
    if "tensor" in axes:
        return 1.0, "at most: those of split layers are split, too"
    return 1.0, ""
