"""Metrics that need nothing but numpy and scipy, one clip at a time in float64.

Rules that hold for all of them: padding and fillers never count; a clip on which a metric says nothing (another
scenario, no target) has weight 0; an output that is missing, silent or not finite is *invalid*: NaN with weight 1,
never a good score, and the reason is kept in `failures`; no clip can stop the others from being scored.

scipy.signal is imported where it's used: it takes about as long as half of torch, and a training needs no metric before
its first evaluation.

Legend: B batch, T samples, L frames.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echofree.contracts import Batch, Scenario

FRAME_SAMPLES = 320  # 20 ms at 16 kHz
ACTIVE_DB = -40.0  # a frame is active above this, relative to the loudest frame of the clip
QUIET_POWER = 1e-9  # mean square below which (-90 dBFS) a signal counts as absent
SILENT_POWER = 1e-14  # mean square of an output that is not sound (-140 dBFS): below the last bit of 24
MUTED_DB = -60.0  # an output this far below the near end has lost it
SURVIVAL_DB = -20.0
TALK_MUTED_DB = -25.0  # the loudest frames of double talk: below it the talker went with the echo
MAX_SI_SDR_DB = 100.0
MAX_ERLE_DB = 60.0  # beyond it a difference can't be heard, and one muted clip would own the mean
NEAR_SCENARIOS = (Scenario.NEAR_END, Scenario.DOUBLE_TALK, Scenario.UNKNOWN)


class InvalidOutput(Exception):
    """This clip's output can't be scored; the text says why."""


@dataclass(frozen=True)
class View:
    """One clip without padding, float64 [T] each. `near`, `echo`, `noise` are None where unknown."""

    est: np.ndarray
    mic: np.ndarray
    far: np.ndarray
    near: np.ndarray | None
    echo: np.ndarray | None
    noise: np.ndarray | None
    scenario: Scenario
    name: str


class ClipMetric:
    """A metric (contracts.Metric) out of a function that scores one clip.

    Args:
        name: the key in tables and records.
        score: gives the clip's value, or None where it is undefined. What it raises makes the clip invalid.
        higher_is_better: for best checkpoints.

    Attributes:
        failures: one text per invalid clip, "clip: metric: reason"; the reader empties it.
    """

    def __init__(self, name: str, score: Callable[[View], float | None], higher_is_better: bool = True):
        self.name, self.higher_is_better = name, higher_is_better
        self.failures: list[str] = []
        self._score = score

    def __call__(self, est: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        values, weights = torch.zeros(len(batch), dtype=torch.float64), torch.zeros(len(batch), dtype=torch.float64)
        for i, view in enumerate(views(est, batch)):
            value = None if view is None else self.clip(view)
            if value is not None:
                values[i], weights[i] = value, 1.0
        return values, weights

    def clip(self, view: View) -> float | None:
        """The value of one clip: None undefined, NaN invalid."""
        try:
            value = self._score(view)
            if value is not None:
                check_output(view)
        except Exception as error:  # whatever is wrong with one clip, the others are scored; the reason is kept
            self.failures.append(f"{view.name}: {self.name}: {error or type(error).__name__}")
            return float("nan")
        return value


def views(est: Tensor, batch: Batch) -> list[View | None]:
    """The clips of a batch; None for fillers."""
    waves = {
        "est": est,
        "mic": batch.mic,
        "far": batch.far,
        "near": batch.near,
        "echo": batch.echo,
        "noise": batch.noise,
    }
    arrays = {k: v.detach().to("cpu", torch.float64).numpy() for k, v in waves.items()}
    lengths, counts = batch.num_samples.tolist(), (batch.weight > 0).tolist()
    known = {"near": batch.has_near.tolist(), "echo": batch.has_echo.tolist(), "noise": batch.has_echo.tolist()}
    result: list[View | None] = []
    for i, (length, count) in enumerate(zip(lengths, counts)):
        clip: dict[str, Any] = {k: v[i, :length] if k not in known or known[k][i] else None for k, v in arrays.items()}
        name = batch.name[i] if batch.name else str(int(batch.index[i]))
        result.append(View(**clip, scenario=Scenario(int(batch.scenario[i])), name=name) if count else None)
    return result


def check_output(view: View) -> None:
    """Raises InvalidOutput when the output is missing, silent or not finite. A silent microphone may stay silent."""
    if len(view.est) != len(view.mic):
        raise InvalidOutput(f"the output has {len(view.est)} samples, the microphone {len(view.mic)}")
    if not np.isfinite(view.est).all():
        raise InvalidOutput("the output has NaN or infinite samples")
    if power(view.mic) > QUIET_POWER and power(view.est) < SILENT_POWER:
        raise InvalidOutput("the output is silent")
    near = reference(view)
    if near is not None:
        active = active_frames(near)
        if active.any() and _ratio_db(frames(view.est)[active].sum(), frames(near)[active].sum()) < MUTED_DB:
            raise InvalidOutput(f"the near end is gone: the output lies more than {-MUTED_DB:.0f} dB below it")


def power(x: np.ndarray) -> float:
    return float(np.mean(x**2)) if len(x) else 0.0


def high_pass(x: np.ndarray, rate_hz: int) -> np.ndarray:
    """[T] -> [T] above 100 Hz, second order."""
    from scipy.signal import butter, sosfilt

    return np.asarray(sosfilt(butter(2, 100, "highpass", fs=rate_hz, output="sos"), x))


def frames(x: np.ndarray) -> np.ndarray:
    """[T] -> [L] energies of whole frames of 320 samples (20 ms at 16 kHz)."""
    count = len(x) // FRAME_SAMPLES
    return np.square(x[: count * FRAME_SAMPLES].reshape(count, FRAME_SAMPLES)).sum(1)


def active_frames(x: np.ndarray) -> np.ndarray:
    """[T] -> [L] bool: within 40 dB of the loudest frame, nowhere if all is below -90 dBFS."""
    energy = frames(x)
    loudest = energy.max(initial=0.0)
    return energy > max(loudest * 10 ** (ACTIVE_DB / 10), QUIET_POWER * FRAME_SAMPLES)


def reference(view: View) -> np.ndarray | None:
    """The near end: the target if there is one, in near-end single talk else the microphone, else None."""
    if view.scenario not in NEAR_SCENARIOS:
        return None
    if view.near is not None:
        return view.near
    return view.mic if view.scenario == Scenario.NEAR_END else None


def si_sdr(est: np.ndarray, near: np.ndarray) -> float:
    """Scale-invariant SDR in dB (Le Roux et al. 2019, "SDR - half-baked or well done?", eq. 4), within +-100 dB."""
    target = (est @ near) / (near @ near) * near
    return float(np.clip(_ratio_db(target @ target, np.square(est - target).sum()), -MAX_SI_SDR_DB, MAX_SI_SDR_DB))


def sdr(est: np.ndarray, near: np.ndarray, taps: int = 512, back: int = 128) -> float:
    """SDR in dB that forgives any fixed filter of `taps` taps, `back` of them acausal: a high-pass is no error."""
    from scipy.linalg import solve_toeplitz
    from scipy.signal import fftconvolve

    near, est = np.append(near, np.zeros(back)), np.append(np.zeros(back), est)
    size = 1 << (2 * len(near)).bit_length()
    near_f, est_f = np.fft.rfft(near, size), np.fft.rfft(est, size)
    auto = np.fft.irfft(np.abs(near_f) ** 2, size)[:taps]
    auto[0] = auto[0] * (1 + 1e-6) + 1e-9  # a pause makes the matrix singular
    target = fftconvolve(near, solve_toeplitz(auto, np.fft.irfft(est_f * near_f.conj(), size)[:taps]))[: len(est)]
    return float(np.clip(_ratio_db(target @ target, np.square(est - target).sum()), -MAX_SI_SDR_DB, MAX_SI_SDR_DB))


def erle(mic: np.ndarray, est: np.ndarray, far: np.ndarray, rate_hz: int, start_s: float = 0.0) -> float | None:
    """Echo return loss enhancement in dB: power of mic over power of est, both above 100 Hz, over the 10 ms frames in
    which the far end was active within the last 0.3 s. At most 60 dB; None with less than 0.5 s of such frames."""
    size = round(0.01 * rate_hz)
    count = len(mic) // size
    mic_h, est_h = (high_pass(x, rate_hz)[: count * size].reshape(count, size) for x in (mic, est))
    mic_e, est_e = np.square(mic_h).sum(1), np.square(est_h).sum(1)
    far_e = np.square(far[: count * size].reshape(count, size)).mean(1)
    active = far_e > max(far_e.max(initial=0.0) * 1e-4, QUIET_POWER)
    active = np.convolve(active, np.ones(30))[:count] > 0
    active[: round(start_s * 100)] = False
    if active.sum() < 50 or mic_e[active].sum() <= QUIET_POWER * size * active.sum():
        return None
    return min(MAX_ERLE_DB, _ratio_db(mic_e[active].sum(), est_e[active].sum()))


def lag_samples(est: np.ndarray, near: np.ndarray, most: int) -> int:
    """Samples by which est lags near (negative: leads), the largest cross-correlation within +-`most`."""
    from scipy.signal import correlate

    most = min(most, len(near) - 1)
    cross = correlate(est, near, mode="full", method="fft")[len(near) - 1 - most : len(near) + most]
    return int(np.argmax(np.abs(cross))) - most


def _ratio_db(a: float, b: float) -> float:
    return float(10 * np.log10((a + 1e-20) / (b + 1e-20)))


def target(view: View) -> np.ndarray | None:
    """The target, where there is one with speech in it."""
    if view.near is None or view.scenario not in NEAR_SCENARIOS or not active_frames(view.near).any():
        return None
    return view.near


def aligned(view: View, rate_hz: int, most_ms: float = 200.0) -> View:
    """The clip with the output's delay against the target taken out: what is left of both when one is shifted by the
    lag of `lag_samples`. The delay itself is what `clip_delay_ms` scores, so it is never lost."""
    if view.near is None or len(view.est) != len(view.near) or not active_frames(view.near).any():
        return view
    if not np.isfinite(view.est).all():
        return view  # `check_output` names it
    lag = lag_samples(view.est, view.near, round(most_ms * rate_hz / 1000))
    if lag == 0:
        return view
    kept = len(view.near) - abs(lag)

    def cut(wave: np.ndarray | None, first: int) -> Any:
        return None if wave is None else wave[first : first + kept]

    late, early = max(lag, 0), max(-lag, 0)
    waves = {name: cut(getattr(view, name), early) for name in ("mic", "far", "near", "echo", "noise")}
    return replace(view, est=cut(view.est, late), **waves)


def clip_si_sdr(view: View) -> float | None:
    """SI-SDR against the target, dB, for clips with near-end speech; nothing is aligned first."""
    near = target(view)
    return None if near is None else si_sdr(view.est, near)


def clip_si_sdr_improvement(view: View) -> float | None:
    """SI-SDR of the output less that of the microphone, dB; double talk only: elsewhere the latter may be perfect."""
    near = target(view)
    if near is None or view.scenario != Scenario.DOUBLE_TALK:
        return None
    return si_sdr(view.est, near) - si_sdr(view.mic, near)


def clip_sdr(view: View) -> float | None:
    """SDR that forgives a fixed filter of 512 taps, dB, for clips with near-end speech."""
    near = target(view)
    return None if near is None else sdr(view.est, near)


def clip_erle(view: View, rate_hz: int, start_s: float = 0.0) -> float | None:
    """ERLE, dB, far-end single talk only. A muting canceller wins it: read it beside the survival."""
    return erle(view.mic, view.est, view.far, rate_hz, start_s) if view.scenario == Scenario.FAR_END else None


def clip_true_erle(view: View) -> float | None:
    """10 log10(sum echo^2 / sum (est - near)^2), dB, at most 60: what is left of the echo plus what was done to the
    near end, in any scenario with a known echo. Noise that stays counts as left over."""
    if view.echo is None or view.near is None or power(view.echo) < QUIET_POWER:
        return None
    return min(MAX_ERLE_DB, _ratio_db(np.square(view.echo).sum(), np.square(view.est - view.near).sum()))


def clip_near_gain(view: View, rate_hz: int) -> float | None:
    """Level of the output over the near end in near-end-active frames, dB: 0 is right, -6 is half.

    The near end is the target; in recordings of near-end single talk, which have none, the microphone above 100 Hz.
    """
    near, est = reference(view), view.est
    if near is not None and view.near is None:
        near, est = high_pass(near, rate_hz), high_pass(est, rate_hz)
    if near is None or not (active := active_frames(near)).any():
        return None
    return _ratio_db(frames(est)[active].sum(), frames(near)[active].sum())


def clip_survival(view: View) -> float | None:
    """Share (0 to 1) of near-end-active frames in which the output is at most 20 dB below the near end; 1: nobody was
    muted. The near end is that of `clip_near_gain`."""
    near = reference(view)
    if near is None or not (active := active_frames(near)).any():
        return None
    return float((frames(view.est)[active] >= frames(near)[active] * 10 ** (SURVIVAL_DB / 10)).mean())


def clip_level_change(view: View, rate_hz: int) -> float | None:
    """Power of the output over that of the microphone, both above 100 Hz, dB, near-end single talk only: what a
    canceller does to the level when there is nothing to cancel. It needs no target, unlike `clip_near_gain`."""
    if view.scenario != Scenario.NEAR_END or power(view.mic) < QUIET_POWER:
        return None
    return _ratio_db(np.square(high_pass(view.est, rate_hz)).sum(), np.square(high_pass(view.mic, rate_hz)).sum())


def clip_talk_level(view: View) -> float | None:
    """The level of the loudest tenth of 20 ms frames, output over microphone, dB; double talk without a known near end
    only. Nobody can tell there what should be left, but where people talk some frames are theirs: far below
    `TALK_MUTED_DB` all of them are gone."""
    if view.scenario != Scenario.DOUBLE_TALK or view.near is not None:
        return None
    if not active_frames(view.mic).any():
        return None
    level_db = _ratio_db(np.percentile(frames(view.est), 90), np.percentile(frames(view.mic), 90))
    if level_db < MUTED_DB:
        raise InvalidOutput(f"double talk is muted: even its loudest parts are {-level_db:.0f} dB down")
    return level_db


def clip_delay_ms(view: View, rate_hz: int, most_ms: float = 200.0) -> float | None:
    """How late or early the output is against the near end, ms without sign; beyond 1 ms the others mean little."""
    near = reference(view)
    if near is None or not active_frames(near).any():
        return None
    return abs(lag_samples(view.est, near, round(most_ms * rate_hz / 1000))) * 1000 / rate_hz
