"""Losses as per-clip values, so that any split of a batch over ranks and micro-batches gives the same gradient.

A *term* gives one value per clip, a mean over the clip's valid audio: padding never matters, a clip it says nothing
about (no target, another scenario) gets exactly 0, and so does a filler. `Weighted` adds terms up into what the loop
calls. All terms work in float32 whatever the model's precision, and their gradients are finite on silence.

Legend: B batch, T samples, L frames, K bands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from echofree.contracts import Batch
from echofree.errors import ConfigError
from echofree.spectral import distance

LEVEL_FLOOR = 1e-4  # rms; a quieter microphone (-80 dBFS) is not raised any further
FRAME_SAMPLES = 320  # 20 ms at 16 kHz: where activity is decided
NEAR_OPEN_DB = -50.0  # a frame is near-end speech above this, relative to the clip's loudest near-end frame


class Term(Protocol):
    """One part of a loss.

    Attributes:
        needs: names that the model must return beyond "est".
    """

    needs: tuple[str, ...]

    def __call__(self, out: Mapping[str, Any], batch: Batch) -> Tensor:
        """-> [B] float32, finite; 0 for clips that the term says nothing about."""


class Weighted:
    """The weighted sum of terms: what a `loss` config builds.

    Args:
        terms: the terms by name; the names appear as parts in metrics.jsonl.
        weights: factor of each term; 0 leaves the term out, and what it needs from the model with it.
        noise_keep: share (amplitude, 0 to 1) of the background noise that stays in the target. 0: the model learns to
            remove noise as well, 1: it learns to remove echo only. Clips whose noise isn't known keep their target.

    Raises:
        ConfigError: terms and weights don't match, a negative weight, all weights 0, noise_keep out of range.
    """

    def __init__(self, terms: Mapping[str, Term], weights: Mapping[str, float], noise_keep: float = 0.0):
        problems = [
            f"loss.weights.{n}: there is no such term; terms: {', '.join(terms)}" for n in weights if n not in terms
        ]
        problems += [f"loss.terms.{n} has no weight: add loss.weights.{n}=1.0" for n in terms if n not in weights]
        problems += [f"loss.weights.{n}={w}: must be 0 or more" for n, w in weights.items() if not w >= 0]
        if not problems and not any(weights.values()):
            problems.append("loss.weights: all are 0, so nothing would be learnt")
        if not 0 <= noise_keep <= 1:
            problems.append(f"loss.noise_keep={noise_keep}: must lie in 0 to 1")
        if problems:
            raise ConfigError(problems)
        self.terms = {name: term for name, term in terms.items() if weights[name] > 0}
        self.weights = {name: float(weights[name]) for name in self.terms}
        self.noise_keep = float(noise_keep)
        self.needs: tuple[str, ...] = tuple(dict.fromkeys(n for term in self.terms.values() for n in term.needs))

    def __call__(self, out: Mapping[str, Any], batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """-> (sum over clips of value x seconds, seconds, {term: its sum before weighting, detached})."""
        values, parts = self.per_clip(out, batch)
        seconds = batch.weight.to(values)
        sums = {name: (part.detach() * seconds).sum() for name, part in parts.items()}
        return (values * seconds).sum(), seconds.sum(), sums

    def per_clip(self, out: Mapping[str, Any], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """-> (the weighted values [B], each term's values [B])."""
        valid = valid_samples(batch)  # [B, T]
        est = torch.where(valid, out["est"].float(), 0.0)  # [B, T]; a filler's NaN ends here, and so does its gradient
        near = batch.near.float()
        if self.noise_keep > 0:
            near = near + self.noise_keep * batch.noise.float()
        batch = replace(batch, mic=batch.mic.float(), near=near)
        parts = {name: term({**out, "est": est}, batch) for name, term in self.terms.items()}
        total = torch.stack([self.weights[name] * value for name, value in parts.items()]).sum(0)  # [B]
        return total, parts


class CompressedSpectral:
    """Squared distance of compressed spectra, exponent 0.3, at one or several resolutions.

    value = mean over frames and bins of (1-m) |S^c - E^c|^2 + m (|S|^c - |E|^c)^2 + a max(|S|^c - |E|^c, 0)^2, where
    S^c keeps the phase (Braun and Tashev 2021, "A consolidated view of loss functions for supervised deep
    learning-based speech enhancement"); the last part counts over-suppression of the near end a second time. Both
    spectra are divided by the microphone's level, so that a quiet clip counts as much as a loud one. Runs from 0
    (equal) to about 1 (nothing done).

    Args:
        windows_samples: lengths of the Hann windows; the hop is a quarter of each.
        exponent: c.
        magnitude_share: m.
        oversuppression: a, 0 or more.
    """

    needs: tuple[str, ...] = ()

    def __init__(
        self,
        windows_samples: tuple[int, ...] = (512,),
        exponent: float = 0.3,
        magnitude_share: float = 0.7,
        oversuppression: float = 0.0,
    ):
        self.windows_samples = tuple(int(w) for w in windows_samples)
        self.exponent, self.share, self.oversuppression = exponent, magnitude_share, oversuppression
        if not self.windows_samples or any(w < 8 or w % 4 for w in self.windows_samples):
            raise ConfigError(f"windows_samples={windows_samples}: give lengths that are multiples of 4, 8 or more")
        if not 0 < exponent <= 1 or not 0 <= magnitude_share <= 1 or oversuppression < 0:
            raise ConfigError("exponent must lie in 0 to 1, magnitude_share in 0 to 1, oversuppression be 0 or more")

    def __call__(self, out: Mapping[str, Any], batch: Batch) -> Tensor:
        level = mic_level(batch)  # [B, 1]
        value = torch.zeros_like(level[:, 0])
        for window in self.windows_samples:
            hop = window // 4
            num_frames = torch.div(batch.num_samples + hop - 1, hop, rounding_mode="floor") + 3
            total = distance(
                out["est"] / level, batch.near / level, window, self.exponent, self.share, self.oversuppression
            )
            value = value + total / num_frames  # frames behind the clip hold zeros on both sides
        return torch.where(batch.has_near, value / len(self.windows_samples), 0.0)


class SiSdr:
    """Negative SI-SDR in dB, bounded softly at +-`max_db` so that neither perfect nor hopeless clips take over.

    value = -10 log10( (|t|^2 + q |s|^2) / (|e|^2 + q |s|^2) ), t = scaled target, e = est - t, q = 10^(-max_db/10) (a
    soft threshold as in Wisdom et al. 2020, "Unsupervised sound separation using mixture invariant training").
    Silence scores 0 dB. Counts where the clip has near-end speech.

    Args:
        max_db: the bound.
        free_scale: True: SI-SDR, the level doesn't matter; False: plain SDR, which also holds the level.
    """

    needs: tuple[str, ...] = ()

    def __init__(self, max_db: float = 30.0, free_scale: bool = True):
        if max_db <= 0:
            raise ConfigError(f"max_db={max_db}: must be above 0")
        self.max_db, self.free_scale = max_db, free_scale

    def __call__(self, out: Mapping[str, Any], batch: Batch) -> Tensor:
        level = mic_level(batch)
        est, near = out["est"] / level, batch.near / level  # [B, T]
        energy = near.square().sum(1, keepdim=True)  # [B, 1]
        active = batch.has_near & (energy[:, 0] > 1e-6 * batch.num_samples)
        scale = (est * near).sum(1, keepdim=True) / energy.clamp(min=1e-9) if self.free_scale else 1.0
        target = scale * near
        soft = 10 ** (-self.max_db / 10) * energy.clamp(min=1e-9)
        good, bad = target.square().sum(1, keepdim=True) + soft, (est - target).square().sum(1, keepdim=True) + soft
        return torch.where(active, 10 * (bad.log10() - good.log10())[:, 0], 0.0)


class BarkGain:
    """How far band gains are from the best ones: the gain loss of EchoFree (arXiv 2508.06271, L_Bark).

    value = mean over valid bands of 10 (g_hat^.5 - g^.5)^4 + (g_hat^.5 - g^.5)^2 + 0.01 CE(g_hat, g). The target is the
    level ratio per band, limited by what of the input correlates with the near end (real part, in phase):
    g = sqrt(E_near / E_in) * r^p, r = Re<in, near> / sqrt(E_in E_near), clipped to [0, 1]. With p = 1 that is the gain
    of least squared error, with p = 0 the one that keeps the level. Bands in which both are silent are left out by a
    mask of their own, never by a marker inside g.

    Needs from the model: "gain" [B, L, K] in [0, 1] and "filterbank", whose power(x [B, T]) gives the energies
    [B, L, K] of the same frames and bands. If the gain is applied to another wave than the
    microphone (the residual of a linear stage), the model names that wave "gain_input" [B, T].

    Args:
        correlation: p, 0 to 1.
        floor_db: bands below this, relative to the clip's loudest band, say nothing.
    """

    needs: tuple[str, ...] = ("gain", "filterbank")

    def __init__(self, correlation: float = 0.5, floor_db: float = -70.0):
        if not 0 <= correlation <= 1 or floor_db >= 0:
            raise ConfigError(f"correlation={correlation} must lie in 0 to 1 and floor_db={floor_db} below 0")
        self.correlation, self.floor_db = correlation, floor_db

    def __call__(self, out: Mapping[str, Any], batch: Batch) -> Tensor:
        source = out["gain_input"].detach().float() if "gain_input" in out else batch.mic
        target, valid = self.target(out["filterbank"].power, torch.where(valid_samples(batch), source, 0.0), batch.near)
        keep = valid & (batch.has_near & (batch.weight > 0))[:, None, None]  # [B, L, K]
        gain = torch.where(keep, out["gain"].float(), 0.5).clamp(1e-7, 1 - 1e-7)  # [B, L, K]
        target = torch.where(keep, target, 0.5)
        step = gain.sqrt() - target.sqrt()
        entropy = -(target * gain.log() + (1 - target) * (1 - gain).log())
        value = 10 * step**4 + step.square() + 0.01 * entropy
        return torch.where(keep, value, 0.0).sum((1, 2)) / keep.sum((1, 2)).clamp(min=1)

    @torch.no_grad()
    def target(self, power: Any, source: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
        """-> (gains [B, L, K] in [0, 1], which of them mean something [B, L, K] bool)."""
        source_p, near_p = power(source).float(), power(near).float()  # [B, L, K]
        cross = (power(source + near).float() - power(source - near).float()) / 4  # Re<in, near> per band
        loudest = torch.maximum(source_p, near_p)
        floor = loudest.amax((1, 2), keepdim=True) * 10 ** (self.floor_db / 10)
        valid = loudest > floor.clamp(min=1e-12)
        level = (near_p / source_p.clamp(min=1e-12)).sqrt()
        in_phase = (cross / (source_p * near_p).sqrt().clamp(min=1e-12)).clamp(0, 1)
        return (level * in_phase**self.correlation).clamp(0, 1), valid


class EchoResidual:
    """How loud the output is where only echo (and noise) reaches the microphone, in dB: negative is good.

    value = mean over frames with sound and without near-end speech of 10 log10((E_out + q E_mic) / E_mic), q the floor.
    Frames are 20 ms. Runs from `floor_db` (gone) to 0 (untouched); clips without such frames get 0.

    Args:
        floor_db: suppression beyond this isn't asked for.
    """

    needs: tuple[str, ...] = ()

    def __init__(self, floor_db: float = -50.0):
        if floor_db >= 0:
            raise ConfigError(f"floor_db={floor_db}: must be below 0")
        self.floor_db = floor_db

    def __call__(self, out: Mapping[str, Any], batch: Batch) -> Tensor:
        level = mic_level(batch)
        mic, near, est = (frame_energy(x / level) for x in (batch.mic, batch.near, out["est"]))  # [B, L]
        open_near = near > near.amax(1, keepdim=True) * 10 ** (NEAR_OPEN_DB / 10)
        counted = (mic > 1e-4 * FRAME_SAMPLES) & ~open_near & batch.has_near[:, None]  # within 40 dB of the level
        mic = torch.where(counted, mic, 1.0)
        ratio = (est / mic + 10 ** (self.floor_db / 10)).log10() * 10  # [B, L] dB
        return torch.where(counted, ratio, 0.0).sum(1) / counted.sum(1).clamp(min=1)


def valid_samples(batch: Batch) -> Tensor:
    """-> [B, T] bool: what is audio and neither padding nor a filler."""
    index = torch.arange(batch.mic.shape[1], device=batch.mic.device)
    return (index < batch.num_samples[:, None]) & (batch.weight[:, None] > 0)


def mic_level(batch: Batch) -> Tensor:
    """Root mean square of the microphone over the valid samples -> [B, 1], not below -80 dBFS."""
    count = batch.num_samples.clamp(min=1)[:, None]
    return (batch.mic.float().square().sum(1, keepdim=True) / count).sqrt().clamp(min=LEVEL_FLOOR)


def frame_energy(x: Tensor) -> Tensor:
    """[B, T] -> [B, L]: energy of frames of 20 ms, the last one filled up with zeros."""
    x = functional.pad(x, (0, -x.shape[1] % FRAME_SAMPLES))
    return x.unflatten(1, (-1, FRAME_SAMPLES)).square().sum(2)
