"""How many clips at once: the arithmetic of a global batch, and the search for the largest micro-batch that fits.

    global batch = micro-batch x data ranks x accumulation, in clips

The left side is what an experiment means and never changes by itself. `train.batch_size=auto` finds the largest
micro-batch that divides each rank's share and fits in the memory of every rank; accumulation follows.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from echofree import meter, oom
from echofree.config.schema import TrainConfig
from echofree.contracts import Strategy
from echofree.dist.batchnorm import SyncBatchNorm
from echofree.dist.world import World
from echofree.errors import ConfigError, OutOfMemory
from echofree.rehearsal import Rehearsal

log = logging.getLogger("echofree")

AUTO = "auto"
SMALL = (2, 3)  # clips, by which memory is extrapolated
# Of what is free that a step may take. On a CPU glibc keeps freed pieces: 1.55 times of what is alive was seen.
SHARE = {"cuda": 0.92, "cpu": 0.6}


@dataclass(frozen=True)
class Size:
    """The arithmetic of a step.

    Attributes:
        batch_size: clips of one data rank and one micro-batch.
        accumulation: micro-batches of a step.
        data_size: ranks that read different clips.
        found: whether the search found batch_size.
    """

    batch_size: int
    accumulation: int
    data_size: int
    found: bool = False

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.accumulation * self.data_size

    def note(self) -> dict[str, Any]:
        """For run.json."""
        return {**asdict(self), "global_batch": self.global_batch}

    def applied(self, config: Any) -> Any:
        """A copy of the config in which these numbers stand; the frozen one stays as it was typed."""
        config = config.copy()
        config.train.batch_size, config.train.gradient_accumulation_steps = self.batch_size, self.accumulation
        return config


def asked(train: TrainConfig) -> int | None:
    """Clips of one data rank and micro-batch that are typed; None when they have to be found."""
    return train.batch_size if isinstance(train.batch_size, int) else None


def usual(train: TrainConfig) -> int:
    """Clips of one data rank and micro-batch before any search: those typed, N of auto:N, the default of auto."""
    _, _, typed = str(train.batch_size).rpartition(":")
    return int(typed if typed.isdigit() else TrainConfig.batch_size)


def share(train: TrainConfig, data_size: int, before: Mapping[str, Any] | None = None) -> int:
    """Clips of one data rank in one step.

    Args:
        before: the note of an earlier start of this run, whose global batch goes on where it can be shared out.

    Raises:
        ConfigError: the global batch can't be shared out evenly.
    """
    whole = train.global_batch_size
    if whole is None and before and asked(train) is None and before["global_batch"] % data_size == 0:
        whole = int(before["global_batch"])
    if whole is None:
        return usual(train) * train.gradient_accumulation_steps
    least = data_size * (asked(train) or 1)
    if whole % least:
        near = max(1, round(whole / least)) * least
        of = f"{data_size} data rank(s)" + (f" x train.batch_size={asked(train)}" if asked(train) else "")
        raise ConfigError(
            f"train.global_batch_size={whole} isn't a multiple of {of} = {least} clips. Type "
            f"train.global_batch_size={near}"
        )
    return whole // data_size


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def search(world: World, candidates: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest candidate that fits on every rank; None when not even the first does. Every rank calls it.

    All ranks try the same candidate at the same time and agree on the outcome before the next: a rank with less memory
    decides for all.

    Args:
        candidates: ascending.
        fits: tries that many clips on this rank. What doesn't fit makes everything larger unfit.
    """
    low, high = -1, len(candidates)
    middle = high - 1  # mostly all of it fits
    while high - low > 1:
        bad = 0.0 if fits(candidates[middle]) else 1.0
        if world.sum([bad])[0] > 0:
            high = middle
        else:
            low = middle
        middle = (low + high) // 2
    return candidates[low] if low >= 0 else None


def settle(
    config: Any,
    world: World,
    strategy: Strategy,
    amp: Any,
    rehearsal: Callable[[], Rehearsal],
    before: Mapping[str, Any] | None = None,
) -> Size:
    """The size of a step, the same on every rank; every rank calls it.

    Args:
        rehearsal: made only when something has to be tried.
        before: the note of an earlier start of this run: what was found then is taken again.

    Raises:
        ConfigError: the global batch can't be shared out evenly.
        OutOfMemory: not even one clip fits.
    """
    train, data_size = config.train, strategy.data_size
    number = asked(train)
    if number is not None and train.global_batch_size is None:
        return Size(number, train.gradient_accumulation_steps, data_size)
    mine = share(train, data_size, before)
    if number is not None:
        return Size(number, mine // number, data_size)
    if before and before["found"] and before["data_size"] == data_size and before["global_batch"] == mine * data_size:
        return Size(int(before["batch_size"]), int(before["accumulation"]), data_size, True)
    trial = rehearsal()
    found = search(world, divisors(mine), Fits(world, strategy, amp, trial))
    if found is None:
        raise OutOfMemory(_hopeless(config, world, trial))
    size = Size(found, mine // found, data_size, True)
    log.info(
        "train.batch_size=%s: %d clips fit at once on every rank; with %d accumulation the global batch stays %d clips",
        train.batch_size, size.batch_size, size.accumulation, size.global_batch,
    )  # fmt: skip
    if found < mine and 2 * found <= _largest_below(mine, found):
        log.warning("a share of %d clips has few divisors: another train.global_batch_size may run faster", mine)
    return size


def _largest_below(mine: int, found: int) -> int:
    """The next divisor: up to it, more clips may have fitted."""
    return next(d for d in divisors(mine) if d > found) - 1


def _hopeless(config: Any, world: World, trial: Rehearsal) -> str:
    one = Size(1, 1, 1).applied(config)
    error = MemoryError("not even one clip fits on every rank")
    shapes = [(1, trial.num_samples)]
    return oom.describe(error, one, world.rank, 1, "search of train.batch_size", shapes, trial.device, 1)


class Fits:
    """Whether this rank can take a step of so many clips.

    A rank that holds the whole model tries, without the others. Where ranks talk while they compute, an error of one
    would leave the others waiting: there, and on a CPU, whose kernel ends a process rather than refuse it memory, what
    two small steps took is extrapolated first.
    """

    def __init__(self, world: World, strategy: Strategy, amp: Any, trial: Rehearsal):
        self.world, self.amp, self.trial, self.device = world, amp, trial, trial.device
        self.alone = strategy.whole and not any(isinstance(m, SyncBatchNorm) for m in strategy.bare.modules())
        self._line: tuple[float, float] | None = None
        self.free = meter.available(self.device, world.local_size) * SHARE[self.device.type]

    def __call__(self, clips: int) -> bool:
        if not self.alone:
            return clips <= min(SMALL) or self.expected(clips) <= self.free
        spare = self._spare()
        try:
            if self.device.type != "cuda" and clips > min(SMALL) and self.expected(clips) > self.free:
                return False
            self.trial.alone(clips, self.amp)
        except (RuntimeError, MemoryError) as error:
            if not oom.is_out_of_memory(error):
                raise
            return False
        finally:
            del spare
            self._tidy()
        return True

    def expected(self, clips: int) -> float:
        """Bytes beyond what is held now, by a line through two small steps."""
        if self._line is None:
            few, more = (self._measured(number) for number in SMALL)
            slope = max(0.0, (more - few) / (SMALL[1] - SMALL[0]))
            self._line = (few - slope * SMALL[0], slope)
        return self._line[0] + self._line[1] * clips

    def _measured(self, clips: int) -> int:
        if self.device.type == "cuda":
            self._tidy()
            torch.cuda.reset_peak_memory_stats(self.device)
            held = torch.cuda.memory_allocated(self.device)
            self.run(clips)
            return torch.cuda.max_memory_allocated(self.device) - held
        strategy = self.trial.strategy
        with meter.Meter([*strategy.bare.parameters(), *strategy.bare.buffers()]) as counted:
            self.run(clips)
        return counted.peak

    def run(self, clips: int) -> None:
        if self.alone:
            self.trial.alone(clips, self.amp)
        else:
            self.trial.step(clips)

    def _spare(self) -> torch.Tensor | None:
        """Held while something is tried, so that it still fits when memory is in pieces."""
        if self.device.type != "cuda":
            return None
        size = int((1 - SHARE["cuda"]) * torch.cuda.mem_get_info(self.device)[0])
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _tidy(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
