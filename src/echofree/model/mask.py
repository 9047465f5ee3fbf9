"""Complex masks: several spectra, each times a bounded complex number per bin, added up.

Legend: B batch, S signals, M masked signals, L frames, F bins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from echofree.errors import ConfigError

RAW = 3  # real numbers from which a mask is made
OPEN = 0.95  # sum of the untrained masks


class MaskedSum(nn.Module):
    """Raw network outputs to the estimate's spectrum.

    With mic and error masked, the network chooses per bin between the microphone and what the linear stage left of it:
    a diverged filter can be shut out, a good one used.

    Args:
        inputs: names of the signals in the spectra.
        mask_on: those of them that are masked and added up.
        limit: magnitude that no mask exceeds; 1 or more.
    """

    def __init__(self, inputs: Sequence[str], mask_on: Sequence[str], limit: float):
        super().__init__()
        problems = [
            f"model.mask_on names {name}, which model.inputs={list(inputs)} lacks."
            for name in mask_on
            if name not in inputs
        ]
        if not mask_on or not set(mask_on) <= {"mic", "error"} or len(set(mask_on)) != len(mask_on):
            problems.append(f"model.mask_on={list(mask_on)} must be [mic], [error] or [mic,error].")
        if limit < 1:
            problems.append(f"model.mask_limit={limit} must be 1 or more.")
        if problems:
            raise ConfigError(problems)
        self.rows = [list(inputs).index(name) for name in mask_on]
        self.limit = float(limit)
        self.num_outputs = RAW * len(self.rows)

    def forward(self, raw: Tensor, spectra: Tensor) -> tuple[Tensor, Tensor]:
        """raw [B, L, F, 3 M], spectra [B, S, L, F] complex -> (sum [B, L, F] complex, masks [B, L, F, M] complex)."""
        mask = bounded_mask(raw.unflatten(-1, (-1, RAW)), self.limit)  # [B, L, F, M]
        return sum(mask[..., i] * spectra[:, row] for i, row in enumerate(self.rows)), mask  # type: ignore[return-value]

    def open(self, weight: Tensor, bias: Tensor) -> None:
        """Sets the layer that makes `raw` (its outputs end in (M, 3)) so that the untrained sum passes its input."""
        share = OPEN / len(self.rows) / self.limit
        with torch.no_grad():
            weight.mul_(0.1)
            bias.zero_()
            bias.view(-1, RAW)[:, 0] = math.log(share / (1 - share))


def bounded_mask(raw: Tensor, limit: float) -> Tensor:
    """Complex mask of magnitude below `limit`: a sigmoid says how much, a direction says which phase.

    A sigmoid reaches silence by saturating (-60 dB at -7.6), which a pair of tanh cannot: it'd have to hit zero
    exactly. Zeros give limit / 2 and phase 0.

    Args:
        raw: [..., 3] real: logit of the magnitude, real part of the direction minus 1, its imaginary part.

    Returns:
        [...] complex.
    """
    raw = raw.float() if raw.dtype in (torch.float16, torch.bfloat16) else raw  # half has no complex
    return torch.complex(*bounded_parts(raw, limit))


def bounded_parts(raw: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """`bounded_mask` as (real part, imaginary part)."""
    size, real, imag = raw[..., 0], 1 + raw[..., 1], raw[..., 2]
    scale = limit * torch.sigmoid(size) * torch.rsqrt(real.square() + imag.square() + 1e-4)
    return scale * real, scale * imag
