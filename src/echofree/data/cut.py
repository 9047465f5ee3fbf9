"""A corpus cut down for a comparison of runs: few clips, and if wanted of unequal lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from echofree.contracts import Clip, Dataset, DataSource

SHORTEST = 0.5  # of the whole clip


class CutDataset:
    """The first `num_clips` clips of a dataset, from the start again when there are fewer.

    Args:
        uneven: leaves of clip i a share of SHORTEST to 1 that depends on i alone.
    """

    def __init__(self, dataset: Dataset, num_clips: int, uneven: bool):
        self.dataset, self.num_clips, self.uneven = dataset, num_clips, uneven
        self.sample_rate = dataset.sample_rate

    def __len__(self) -> int:
        return self.num_clips

    def item(self, index: int, epoch: int) -> Clip:
        clip = self.dataset.item(index % len(self.dataset), epoch)
        if not self.uneven:
            return replace(clip, index=index)
        share = SHORTEST + (1 - SHORTEST) * np.random.default_rng([0xC07, index]).random()
        length = max(1, round(len(clip.mic) * share))

        def part(wave: np.ndarray | None) -> np.ndarray | None:
            return None if wave is None else wave[:length]

        mic, far = clip.mic[:length], clip.far[:length]
        near, echo, noise = part(clip.near), part(clip.echo), part(clip.noise)
        return replace(clip, index=index, mic=mic, far=far, near=near, echo=echo, noise=noise)


class Cut:
    """A source with nothing but `num_clips` training clips of another.

    Args:
        source: the corpus.
        num_clips: clips of an epoch.
        uneven: whether to make their lengths unequal.
    """

    def __init__(self, source: DataSource, num_clips: int, uneven: bool):
        self.source, self.num_clips, self.uneven = source, num_clips, uneven
        self.sample_rate = source.sample_rate

    def split(self, name: str) -> CutDataset | None:
        """Training clips; None for any other split, and of a corpus without clips to train on."""
        inner = self.source.split("train") if name == "train" else None
        return None if inner is None or not len(inner) else CutDataset(inner, self.num_clips, self.uneven)

    def fingerprint(self) -> str:
        return f"{self.source.fingerprint()}-{self.num_clips}{'-uneven' if self.uneven else ''}"

    def survey(self) -> list[tuple[str, str]]:
        lengths = "of unequal lengths" if self.uneven else "as they are"
        return [*self.source.survey(), ("cut down", f"to {self.num_clips} training clips {lengths}")]
