"""Out of memory: what to say about it, in the order in which the cures should be tried."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import torch

from echofree import resident
from echofree.config.schema import Precision, StrategyKind

# How the CPU allocator and the loader say it; CUDA has an exception of its own.
CPU_TEXTS = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in CPU_TEXTS)


def is_killed_worker(error: BaseException) -> bool:
    """A loader worker that the kernel ended, nearly always for want of memory."""
    text = str(error)
    return (
        isinstance(error, RuntimeError)
        and "DataLoader worker" in text
        and ("signal: Killed" in text or "signal: Bus" in text)
    )


def describe(
    error: BaseException,
    config: Any,
    rank: int,
    step: int,
    phase: str,
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    data_size: int,
) -> str:
    """Rank, step, shapes, peak memory and the levers.

    Args:
        step: of the step that failed, counted from 1.
        shapes: of the microphone signals of its micro-batches, [B, T] each.
        data_size: ranks that read different data.
    """
    batch = " + ".join(f"[{', '.join(map(str, shape))}]" for shape in shapes) or "none yet"
    lines = [
        f"rank {rank} on {socket.gethostname()} ran out of memory in {phase!r} of step {step}",
        f"  micro-batches of this rank (clips, samples): {batch}; {_memory(device)}",
        f"  {str(error).splitlines()[0] if str(error) else type(error).__name__}",
        "What helps, in this order:",
    ]
    lines += [f"  {number}. {lever}" for number, lever in enumerate(_levers(config, data_size), 1)]
    return "\n".join(lines)


def describe_worker(error: BaseException, config: Any, rank: int, step: int) -> str:
    workers, prefetch = config.data.num_workers, config.data.prefetch_factor
    return (
        f"rank {rank}: a loader worker was killed before step {step} ({str(error).splitlines()[0]}). Nearly always the "
        f"machine ran out of memory (see dmesg) or of /dev/shm (df -h /dev/shm): {workers} workers keep "
        f"{workers * prefetch} batches ready. Type data.num_workers={max(1, workers // 2)} or data.prefetch_factor=1"
    )


def _memory(device: torch.device) -> str:
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return f"peak {torch.cuda.max_memory_allocated(device) / 2**30:.2f} of {total / 2**30:.2f} GiB on {device}"
    return f"peak {resident.peak_mb() / 2**10:.2f} GiB of this process"


def _levers(config: Any, data_size: int) -> list[str]:
    train = config.train
    batch, accumulation = train.batch_size, train.gradient_accumulation_steps
    levers = []
    if batch > 1:
        # a divisor keeps batch x accumulation, and with it what a step means
        smaller = next((d for d in range(batch // 2, 0, -1) if batch % d == 0), 1)
        more = accumulation * batch // smaller
        levers.append(
            f"train.batch_size={smaller} train.gradient_accumulation_steps={more} (the global batch stays "
            f"{batch * accumulation * data_size} clips)"
        )
    else:
        levers.append("shorter clips (data.segment_s): one clip is already all that a micro-batch holds")
    if train.precision is Precision.fp32:
        levers.append("train.precision=bf16 (activations take half)")
    if "fsdp" in StrategyKind.__members__ and config.dist.name is not StrategyKind["fsdp"]:
        levers.append("dist=fsdp (parameters, gradients and optimizer states are shared out over the ranks)")
    levers.append("a smaller model (model.hidden_size, model.num_layers)")
    return levers
