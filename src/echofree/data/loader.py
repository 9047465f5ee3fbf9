"""Which clip goes to which rank, in which step: an order that is a pure function, and a loader that follows it.

Because an item depends only on (seed, epoch, index) and the order only on (seed, epoch), a position is two numbers
(epoch, step), and going on from it needs no replay and no state of the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from echofree.contracts import Batch, Clip, Dataset, State
from echofree.data.collate import collate
from echofree.data.worker import WorkerBoard

Ahead = Callable[[Tensor, Tensor], State]  # see `contracts.Model`

ORDER = 0x0D3  # keeps the shuffle's random stream apart from the clips' own


class Key(NamedTuple):
    """What a worker needs to make one clip."""

    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index
    filler: bool  # only keeps the ranks in step: weight 0


@dataclass(frozen=True)
class Plan:
    """The order of one corpus under one arithmetic: micro-batch x data ranks x accumulation = global batch, in clips.

    A global batch is cut from the shuffled list before it is dealt out, so that any (data_size, accumulation) with the
    same product sees the same clips in the same step, the last partial one included.
    """

    num_items: int
    batch_size: int
    accumulation: int
    data_size: int
    seed: int
    shuffle: bool = True

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.accumulation * self.data_size

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_items // self.global_batch)

    def order(self, epoch: int) -> np.ndarray:
        """[num_items] int64, the epoch's permutation."""
        if not self.shuffle:
            return np.arange(self.num_items)
        return np.random.default_rng([self.seed, ORDER, epoch]).permutation(self.num_items)

    def micro_batches(self, order: np.ndarray, epoch: int, step: int, data_rank: int) -> list[list[Key]]:
        """The micro-batches of `data_rank` in one step. Every rank gets equally many, none is empty."""
        clips = order[step * self.global_batch : (step + 1) * self.global_batch]
        size = self.batch_size * self.data_size
        result = []
        for start in range(0, len(clips), size):
            chunk = clips[start : start + size]
            mine = np.array_split(chunk, self.data_size)[data_rank]
            if len(mine):
                result.append([Key(epoch, int(i), False) for i in mine])
            else:
                result.append([Key(epoch, int(chunk[0]), True)])
        return result


class _Endless(Sampler[list[Key]]):
    """Micro-batches from a position to the last epoch, so that workers never stop between epochs."""

    def __init__(self, plan: Plan, data_rank: int, epochs: int, start: tuple[int, int]):
        self.plan, self.data_rank, self.epochs, self.start = plan, data_rank, epochs, start

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, first = self.start
        while epoch < self.epochs:
            order = self.plan.order(epoch)
            for step in range(first, self.plan.steps_per_epoch):
                yield from self.plan.micro_batches(order, epoch, step, self.data_rank)
            epoch, first = epoch + 1, 0


class _Items:
    """The map-style view that the loader's workers call with a list of keys."""

    def __init__(self, dataset: Dataset, board: WorkerBoard):
        self.dataset, self.board, self.worker = dataset, board, 0

    def start(self, worker: int) -> None:
        """In a forked worker, before its first clip."""
        torch.set_num_threads(1)
        self.worker = worker
        self.board.start(worker)

    def __getitems__(self, keys: Sequence[Key]) -> list[tuple[Clip, bool]]:
        clips = [self[k] for k in keys]
        self.board.rest(self.worker)
        return clips

    def __getitem__(self, key: Key) -> tuple[Clip, bool]:
        self.board.begin(self.worker, key.epoch, key.index)
        # scores are told apart by the index: a dataset that leaves it out must not lose clips
        return replace(self.dataset.item(key.index, key.epoch), index=key.index), key.filler

    def __len__(self) -> int:
        return len(self.dataset)


def _stack(items: list[tuple[Clip, bool]], sample_rate: int, ahead: Ahead | None) -> Batch:
    batch = collate([clip for clip, _ in items], sample_rate, filler=[filler for _, filler in items])
    return batch if ahead is None else replace(batch, front=ahead(batch.mic, batch.far))


def _loader(
    dataset: Dataset, batches: Any, num_workers: int, prefetch_factor: int, pin_memory: bool, ahead: Ahead | None
) -> DataLoader[Any]:
    items = _Items(dataset, WorkerBoard(num_workers))
    return DataLoader(
        items,  # type: ignore[arg-type]
        batch_sampler=batches,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
        collate_fn=partial(_stack, sample_rate=dataset.sample_rate, ahead=ahead),
        pin_memory=pin_memory,
        multiprocessing_context="fork" if num_workers else None,
        generator=torch.Generator().manual_seed(0),  # else every loader takes a number from the run's own random stream
        # the workers are forked, so this `items` is the one that they ask for clips
        worker_init_fn=items.start if num_workers else None,
    )


def board(loader: DataLoader[Any]) -> WorkerBoard:
    """What the workers of a loader made here are at."""
    items = loader.dataset
    assert isinstance(items, _Items)
    return items.board


class TrainLoader:
    """Yields the micro-batches of one optimizer step at a time, from any position on.

    Args:
        start: (epoch, step in that epoch) of the first step to yield.
        ahead: what the workers do for each micro-batch beside reading it.
    """

    def __init__(
        self,
        dataset: Dataset,
        plan: Plan,
        data_rank: int,
        epochs: int,
        start: tuple[int, int] = (0, 0),
        num_workers: int = 0,
        prefetch_factor: int = 4,
        pin_memory: bool = False,
        ahead: Ahead | None = None,
    ):
        self.plan, self.data_rank, self.num_workers = plan, data_rank, num_workers
        batches = _Endless(plan, data_rank, epochs, start)
        loader = _loader(dataset, batches, num_workers, prefetch_factor, pin_memory, ahead)
        self.board = board(loader)
        self._iterator: Iterator[Batch] = iter(loader)

    def next_step(self, step: int) -> list[Batch]:
        """The micro-batches of `step` (counted within its epoch); call it for every step in turn."""
        left = self.plan.num_items - step * self.plan.global_batch
        clips = min(left, self.plan.global_batch)
        count = -(-clips // (self.plan.batch_size * self.plan.data_size))
        return [next(self._iterator) for _ in range(count)]

    def doing(self) -> str:
        """What the loader is at, for a person who waits."""
        return str(self.board)

    def close(self) -> None:
        """Ends the workers."""
        shutdown = getattr(self._iterator, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()


def eval_batches(num_items: int, batch_size: int, data_rank: int, data_size: int) -> list[list[Key]]:
    """The evaluation batches of one rank: every clip exactly once over all ranks, equally many batches per rank.

    Batches are cut from the unshuffled list before they are dealt out, so that a clip sits among the same clips, with
    the same padding, under any number of ranks: scores are equal to the last digit.
    """
    batches = [range(i, min(i + batch_size, num_items)) for i in range(0, num_items, batch_size)]
    rounds = -(-len(batches) // data_size)
    mine = []
    for i in range(rounds):
        position = i * data_size + data_rank
        if position < len(batches):
            mine.append([Key(0, k, False) for k in batches[position]])
        else:
            mine.append([Key(0, 0, True)])
    return mine


def eval_loader(
    dataset: Dataset,
    batches: list[list[Key]],
    num_workers: int,
    prefetch_factor: int,
    pin_memory: bool,
    ahead: Ahead | None = None,
) -> DataLoader[Any]:
    """A loader over `eval_batches`; its workers live for one evaluation."""
    return _loader(dataset, batches, num_workers, prefetch_factor, pin_memory, ahead)
