"""Old data mixed into new, so that a model that goes on learning doesn't forget: `data.replay`.

Every epoch has all new clips, and as many old ones as make up `share` of it, other ones each time until all have come.
Which they are depends on (seed, epoch) alone. Validation and test are those of the new data; the old data's validation
clips are what `checkpoint.guard` watches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from echofree.contracts import Clip, Dataset, DataSource
from echofree.data.rounds import picks
from echofree.errors import ConfigError, DataError

STREAM = 0x01D  # keeps this random stream apart from others of the same seed


class Replay:
    """A source of new data with old mixed in (a `DataSource`).

    Args:
        new: what is learnt.
        old: what isn't to be forgotten.
        share: of an epoch's training clips that are old, 0 to below 1.
        seed: of the choice.

    Raises:
        ConfigError: a share that can't be, rates that differ.
    """

    def __init__(self, new: DataSource, old: DataSource, share: float, seed: int):
        if not 0 <= share < 1:
            raise ConfigError(
                f"data.replay.share={share}: must be from 0 up to, but without, 1. Type: data.replay.share=0.3"
            )
        if new.sample_rate != old.sample_rate:
            raise ConfigError(f"data.replay: the old data has {old.sample_rate} Hz, the new {new.sample_rate} Hz")
        self.new, self.old, self.share, self.seed = new, old, share, seed
        self.sample_rate = new.sample_rate

    def split(self, name: str) -> Dataset | None:
        """train: mixed; any other: that of the new data."""
        fresh = self.new.split(name)
        if name != "train" or fresh is None or self.share == 0:
            return fresh
        past = self.old.split(name)
        if past is None or len(past) == 0:
            raise DataError("data.replay: the old data has no clips to train on. Name another data.replay.run")
        return Mixed(fresh, past, self.share, self.seed)

    def fingerprint(self) -> str:
        return f"{self.new.fingerprint()}+{self.share:g}x{self.old.fingerprint()}"

    def survey(self) -> list[tuple[str, str]]:
        """The new data's rows, then the old data's."""
        rows = [("replay", f"{100 * self.share:g} % of the training clips are old data")] if self.share else []
        return [*self.new.survey(), *rows, *((f"old {what}", value) for what, value in self.old.survey())]


class Mixed:
    """New clips first, old ones behind; the order of an epoch is the loader's.

    Args:
        new, old: training clips.
        share: of the old ones in an epoch.
        seed: of their choice.
    """

    def __init__(self, new: Dataset, old: Dataset, share: float, seed: int):
        self.new, self.old, self.seed, self.sample_rate = new, old, seed, new.sample_rate
        self.num_old = round(len(new) * share / (1 - share))
        self._chosen: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.new) + self.num_old

    @property
    def longest_samples(self) -> Any:
        """Samples of the longest item, where both know it."""
        lengths = [getattr(part, "longest_samples", None) for part in (self.new, self.old)]
        return None if None in lengths else max(lengths)  # type: ignore[type-var]

    def item(self, index: int, epoch: int) -> Clip:
        if index < len(self.new):
            return self.new.item(index, epoch)
        which = int(self.chosen(epoch)[index - len(self.new)])
        clip = self.old.item(which, epoch)
        return replace(clip, name=f"old: {clip.name}", index=index)

    def chosen(self, epoch: int) -> np.ndarray:
        """[num_old] indices of the old clips of an epoch; in the long run each comes equally often."""
        if self._chosen[0] != epoch:
            self._chosen = (epoch, picks(len(self.old), self.num_old, epoch, (self.seed, STREAM)))
        return self._chosen[1]
