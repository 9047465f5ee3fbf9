"""How far a student is from its teacher, one value per clip, and where the teacher is worth following.

Each term compares at its own frames what both make of the same samples, so that teacher and student may have other
frame lengths, widths and rates. Nothing here has weights: it works the same however the student is shared out.

A teacher isn't right everywhere. Where the target is known, a frame (or band, or clip) counts only if the teacher is
nearer to it than the student, as selective distillation does for patches of the spectrum (arXiv 2509.15922). The mean
is over all valid frames, counted or not: the less there is to learn from the teacher, the less its term weighs.

Legend: B batch, T samples, L frames, F bins, K bands, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from echofree.contracts import Batch
from echofree.loss import BarkGain, mic_level
from echofree.spectral import spectrum

WINDOW_SAMPLES = 512
EXPONENT, MAGNITUDE_SHARE = 0.3, 0.7
SPAN_FRAMES = 64  # frames whose likeness to one another is compared
BAND_SHARE = 0.95  # of the teacher's Nyquist frequency: above it the teacher says nothing
SELECTS = ("frame", "clip", "none")


class Output:
    """Distance of compressed spectra of the two outputs, as `loss.CompressedSpectral` measures it to the target.

    Args:
        select: frame | clip | none.
        share: of the bins, from below, about which the teacher says something.
    """

    needs: tuple[str, ...] = ()

    def __init__(self, select: str, share: float = 1.0):
        self.select, self.share = select, share

    def __call__(self, out: Mapping[str, Any], est: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """out["est"], est: student and teacher [B, T], zero in the padding. -> (values [B], share of the frames that
        count [B])."""
        level = mic_level(batch)
        mine, theirs, near = (self._compressed(x / level) for x in (out["est"], est, batch.near))  # [B, L, F]
        error = _distance(mine, theirs).mean(2)  # [B, L]
        num_frames = torch.div(batch.num_samples + WINDOW_SAMPLES // 4 - 1, WINDOW_SAMPLES // 4, rounding_mode="floor")
        inside = torch.arange(error.shape[1], device=error.device) < num_frames[:, None] + 3
        with torch.no_grad():
            counts = self._counts(_distance(theirs, near).mean(2), _distance(mine, near).mean(2), inside, batch)
        return (error * counts).sum(1) / (num_frames + 3), counts.sum(1) / (num_frames + 3)

    def _compressed(self, wave: Tensor) -> tuple[Tensor, Tensor]:
        x = spectrum(wave, WINDOW_SAMPLES)
        x = x[..., : max(2, round(x.shape[-1] * self.share))]
        power = x.real.square() + x.imag.square() + 1e-6
        return x * power ** ((EXPONENT - 1) / 2), power ** (EXPONENT / 2)

    def _counts(self, teacher: Tensor, student: Tensor, inside: Tensor, batch: Batch) -> Tensor:
        """Their errors [B, L] -> [B, L] 1 where the teacher is followed: everywhere in a clip without a target."""
        if self.select == "none":
            return inside.to(teacher)
        if self.select == "clip":
            teacher, student = teacher.sum(1, keepdim=True), student.sum(1, keepdim=True)
        better = (teacher < student) | ~batch.has_near[:, None]
        return (better & inside).to(teacher)


def _distance(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """Two (compressed spectrum, magnitude) -> [B, L, F]."""
    phase = torch.view_as_real(a[0] - b[0]).square().sum(-1)
    return (1 - MAGNITUDE_SHARE) * phase + MAGNITUDE_SHARE * (a[1] - b[1]).square()


class Gain:
    """Distance of the student's band gains from those that would turn its own input into the teacher's output.

    value = mean over valid bands of w (sqrt(g) - sqrt(g_t))^2, w = 1 where sqrt(g_t) is nearer than sqrt(g) to the root
    of the best gain. g_t and the best gain are those of `loss.BarkGain`, on the student's own frames and bands, so that
    any teacher has them, whatever it computes inside.

    Args:
        select: frame (here: band of a frame) | clip | none.
    """

    needs: tuple[str, ...] = ("gain", "filterbank")

    def __init__(self, select: str):
        self.select, self.best = select, BarkGain()

    def __call__(self, out: Mapping[str, Any], est: Tensor, batch: Batch) -> Tensor:
        """est [B, T] of the teacher -> values [B]."""
        source = out["gain_input"].detach().float() if "gain_input" in out else batch.mic.float()
        inside = torch.arange(est.shape[1], device=est.device) < batch.num_samples[:, None]
        source = torch.where(inside, source, 0.0)
        power = out["filterbank"].power
        teacher, valid = self.best.target(power, source, est)  # [B, L, K]
        valid = valid & (batch.weight > 0)[:, None, None]
        gain = torch.where(valid, out["gain"].float(), 0.5).clamp(min=1e-7).sqrt()
        teacher = torch.where(valid, teacher, 0.5).sqrt()
        error = (gain - teacher).square()
        if self.select != "none":
            best = self.best.target(power, source, batch.near.float())[0].sqrt()
            theirs, mine = (teacher - best).square(), (gain.detach() - best).square()
            if self.select == "clip":
                theirs, mine = ((x * valid).sum((1, 2), keepdim=True) for x in (theirs, mine))
            error = error * ((theirs < mine) | ~batch.has_near[:, None, None])
        return torch.where(valid, error, 0.0).sum((1, 2)) / valid.sum((1, 2)).clamp(min=1)


class Latent:
    """Whether two moments that are alike to the teacher are alike to the student: no layer has to translate between
    their widths.

    value = mean over pairs of frames, at most 64 frames apart, of (cos(h_l, h_m) - cos(t_l, t_m))^2, after
    similarity-preserving distillation (Tung and Mori 2019, arXiv 1907.09682; over time for speech enhancement: Nathoo
    et al. 2023, arXiv 2309.08144). The teacher's frames are interpolated to the times of the student's.

    Args:
        student_s, teacher_s: seconds from frame to frame.
    """

    needs: tuple[str, ...] = ("latent",)

    def __init__(self, student_s: float, teacher_s: float, rate_hz: int):
        self.student_s, self.teacher_s, self.rate_hz = student_s, teacher_s, rate_hz

    def __call__(self, out: Mapping[str, Any], latent: Tensor, batch: Batch) -> Tensor:
        """latent [B, L', H'] of the teacher -> values [B]."""
        mine = out["latent"].float()  # [B, L, H]
        theirs = at_times(latent, self.student_s / self.teacher_s, mine.shape[1])  # [B, L, H']
        num_frames = torch.ceil(batch.num_samples / self.rate_hz / self.student_s)
        inside = torch.arange(mine.shape[1], device=mine.device) < num_frames[:, None]  # [B, L]
        likeness = [_likeness(x, inside) for x in (mine, theirs)]  # [B, spans, 64, 64]
        pairs = _spans(inside[..., None].float())  # [B, spans, 64, 1]
        pairs = pairs * pairs.transpose(2, 3)
        error = (likeness[0] - likeness[1]).square() * pairs
        return error.sum((1, 2, 3)) / pairs.sum((1, 2, 3)).clamp(min=1)


def at_times(frames: Tensor, step: float, count: int) -> Tensor:
    """[B, L, H] -> [B, count, H]: linear interpolation at 0, step, 2 step ... frames; the last frame holds on."""
    place = (torch.arange(count, device=frames.device, dtype=torch.float64) * step).clamp(max=frames.shape[1] - 1)
    low = place.floor().long()
    share = (place - low).to(frames)[:, None]
    high = (low + 1).clamp(max=frames.shape[1] - 1)
    return frames[:, low].lerp(frames[:, high], share.expand(-1, frames.shape[2]))


def _likeness(frames: Tensor, inside: Tensor) -> Tensor:
    x = torch.nn.functional.normalize(torch.where(inside[..., None], frames, 0.0), dim=-1, eps=1e-6)
    x = _spans(x)
    return x @ x.transpose(2, 3)


def _spans(frames: Tensor) -> Tensor:
    """[B, L, H] -> [B, spans, 64, H], filled up with zeros."""
    behind = -frames.shape[1] % SPAN_FRAMES
    return torch.nn.functional.pad(frames, (0, 0, 0, behind)).unflatten(1, (-1, SPAN_FRAMES))
