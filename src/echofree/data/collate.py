"""Clips to a batch.

Legend: B batch, T samples of the longest clip.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from echofree.contracts import Batch, Clip


def collate(clips: Sequence[Clip], sample_rate: int, filler: Sequence[bool] | None = None) -> Batch:
    """Stacks clips, padding each with zeros on the right.

    Args:
        clips: B clips; arrays of one clip have one length.
        sample_rate: Hz; turns samples into seconds.
        filler: True for a clip that only keeps ranks in step: its weight becomes 0.

    Raises:
        ValueError: no clips, or a flag missing.
    """
    if not clips:
        raise ValueError("collate needs at least one clip.")
    flags = [False] * len(clips) if filler is None else list(filler)
    if len(flags) != len(clips):
        raise ValueError(f"{len(clips)} clips but {len(flags)} filler flags.")
    num_samples = [len(clip.mic) for clip in clips]
    seconds = [0.0 if skip else n / sample_rate for n, skip in zip(num_samples, flags)]
    return Batch(
        mic=_stack([c.mic for c in clips], num_samples),
        far=_stack([c.far for c in clips], num_samples),
        near=_stack([c.near for c in clips], num_samples),
        echo=_stack([c.echo for c in clips], num_samples),
        noise=_stack([c.noise for c in clips], num_samples),
        has_near=torch.tensor([c.near is not None for c in clips]),
        has_echo=torch.tensor([c.echo is not None for c in clips]),
        num_samples=torch.tensor(num_samples, dtype=torch.int64),
        weight=torch.tensor(seconds, dtype=torch.float32),
        scenario=torch.tensor([int(c.scenario) for c in clips], dtype=torch.int64),
        delay_samples=torch.tensor([c.delay_samples for c in clips], dtype=torch.int64),
        index=torch.tensor([c.index for c in clips], dtype=torch.int64),
        name=[c.name for c in clips],
    )


def _stack(waves: Sequence[np.ndarray | None], num_samples: Sequence[int]) -> Tensor:
    """B arrays [t <= T], or None for zeros -> float32 [B, T]."""
    out = np.zeros((len(waves), max(num_samples)), dtype=np.float32)  # [B, T]
    for row, wave, n in zip(out, waves, num_samples):
        if wave is None:
            continue
        if len(wave) != n:
            raise ValueError(f"an array of {len(wave)} samples in a clip whose microphone has {n}.")
        row[:n] = wave
    return torch.from_numpy(out)
