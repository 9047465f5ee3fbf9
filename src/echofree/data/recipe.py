"""The numbers behind a scene: ranges in `SceneConfig`, one draw of them in `Recipe`."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from echofree.contracts import Scenario
from echofree.data.device import DISTORTIONS
from echofree.errors import ConfigError

Range = tuple[float, float]
SCENARIOS = ("double_talk", "far_end", "near_end", "silence")
NEAR_TARGETS = ("reverberant", "early", "dry")


def _default_distortion() -> dict[str, float]:
    """Shares of the distortions. The sigmoid and the one-sided gain stay rare: they leave a linear filter 6 to 12 dB,
    and a network that meets them often learns to ignore the filter."""
    rare = {"sigmoid": 0.07, "one_sided": 0.07, "volterra": 0.06, "memory": 0.06, "wiener_hammerstein": 0.06}
    return {"hard_clip": 0.2, "soft_clip": 0.18, "sef": 0.15, "saturation": 0.08, "hammerstein": 0.07} | rare


@dataclass(frozen=True)
class SceneConfig:
    """Ranges [low, high] and probabilities. Keys that end in `_probability` are P, the others are drawn uniformly.

    Attributes:
        scenario_probability: shares of double talk, far end, near end, silence.
        far_probability: shares of speech, music, tones in the far end.
        far_noise_probability, far_snr_db: noise in the far end.
        far_band_limit_probability: a telephone's 300 to 3400 Hz in the far end.
        far_level_jump_probability, far_level_jump_db: one step in the far end's level.
        far_peak_db: peak of the far end, dBFS, independent of the microphone's.
        idle_far_probability: a near-end scene whose far end carries faint noise rather than zeros.
        headset_probability: a near-end scene whose far end talks without being heard.
        speech_generated_probability, speech_varied_probability: a talker who is made up; else one whose pitch,
            formants, tempo and tone are changed. null: 0.25 and 0.9 with the embedded readings, 0 and 0.3 with a
            user's folder.
        pause_s: between two utterances.
        playback_agc_probability: gain control after the tap.
        loudspeaker_eq_probability, loudspeaker_eq_db, loudspeaker_high_pass_hz, loudspeaker_low_pass_hz.
        distortion_probability, distortion_share: whether, and which (relative shares by name).
        structure_probability, structure_db: sound through the case, relative to the direct path.
        delay_ms: bulk delay, log-uniform; no_delay_probability, long_delay_probability, long_delay_ms.
        delay_jump_probability, delay_jump_ms: one step of either sign.
        glitch_probability: 1 to 3 lost blocks in the far end or the microphone.
        drift_probability, drift_ppm, large_drift_probability (among the drifting), large_drift_ppm: clocks.
        path_change_probability, path_change_ms: crossfade to a moved loudspeaker, or a gain step (half each).
        ser_db: near end to echo over frames where both are active.
        near_dry_probability: a near end without a room.
        near_target: reverberant (as it arrives), early (50 ms), dry (direct path only).
        noise_probability, snr_db: noise at the microphone, relative to the near end, or to the echo without one.
        mic_eq_probability, mic_eq_db: equaliser of the microphone.
        mic_band_limit_probability: a telephone's 300 to 3400 Hz at the microphone, in all that it hears.
        mic_clip_probability, mic_clip_at: clipping, soft or hard, at this share of the peak.
        dc_probability, dc_offset: relative to the peak.
        quantise_probability: rounding to 16 bit.
        transmit_agc_probability, transmit_ns_probability: gain control, noise suppression that ran
            before the canceller.
        mic_peak_db: peak of the microphone, dBFS.
    """

    scenario_probability: tuple[float, float, float, float] = (0.55, 0.22, 0.18, 0.05)
    far_probability: tuple[float, float, float] = (0.85, 0.10, 0.05)
    far_noise_probability: float = 0.5
    far_snr_db: Range = (0.0, 40.0)
    far_band_limit_probability: float = 0.05
    far_level_jump_probability: float = 0.2
    far_level_jump_db: Range = (-12.0, 12.0)
    far_peak_db: Range = (-35.0, 0.0)
    idle_far_probability: float = 0.3
    headset_probability: float = 0.1
    speech_generated_probability: float | None = None
    speech_varied_probability: float | None = None
    pause_s: Range = (0.15, 1.0)
    playback_agc_probability: float = 0.2
    loudspeaker_eq_probability: float = 0.8
    loudspeaker_eq_db: float = 6.0
    loudspeaker_high_pass_hz: Range = (80.0, 400.0)
    loudspeaker_low_pass_hz: Range = (5000.0, 8000.0)
    distortion_probability: float = 0.8
    distortion_share: Mapping[str, float] = field(default_factory=_default_distortion)
    structure_probability: float = 0.3
    structure_db: Range = (-30.0, -10.0)
    delay_ms: Range = (1.0, 500.0)
    no_delay_probability: float = 0.1
    long_delay_probability: float = 0.05
    long_delay_ms: Range = (500.0, 1000.0)
    delay_jump_probability: float = 0.1
    delay_jump_ms: Range = (8.0, 64.0)
    glitch_probability: float = 0.05
    drift_probability: float = 0.3
    drift_ppm: Range = (-100.0, 100.0)
    large_drift_probability: float = 0.05
    large_drift_ppm: Range = (-500.0, 500.0)
    path_change_probability: float = 0.3
    path_change_ms: Range = (20.0, 200.0)
    ser_db: Range = (-25.0, 15.0)
    near_dry_probability: float = 0.1
    near_target: str = "reverberant"
    noise_probability: float = 0.5
    snr_db: Range = (0.0, 40.0)
    mic_eq_probability: float = 0.5
    mic_eq_db: float = 4.0
    mic_band_limit_probability: float = 0.05
    mic_clip_probability: float = 0.1
    mic_clip_at: Range = (0.3, 0.95)
    dc_probability: float = 0.1
    dc_offset: Range = (-0.02, 0.02)
    quantise_probability: float = 0.5
    transmit_agc_probability: float = 0.07
    transmit_ns_probability: float = 0.05
    mic_peak_db: Range = (-30.0, 0.0)

    @classmethod
    def build(cls, values: Mapping[str, Any], where: str = "data.scene") -> SceneConfig:
        """Checked against the fields' types and meaning.

        Raises:
            ConfigError: all problems at once, each with the key.
        """
        hints = get_type_hints(cls)
        problems, clean = [], {}
        for key, value in values.items():
            if key not in hints:
                close = get_close_matches(key, hints, 1)
                hint = f" Did you mean {close[0]}?" if close else f" Valid keys: {', '.join(hints)}."
                problems.append(f"{where}.{key}: no such key.{hint}")
                continue
            problem, clean[key] = _convert(key, value, hints[key])
            if problem:
                problems.append(f"{where}.{key}={value!r}: {problem}")
        if problems:
            raise ConfigError(problems)
        return cls(**clean)


@dataclass(frozen=True)
class Recipe:
    """One scene in numbers; None or "" where something doesn't happen. Fields are named as in `SceneConfig`."""

    scenario: Scenario
    far_active: bool = False
    has_echo: bool = False
    near_active: bool = False
    far_content: str = "speech"  # speech, music, tones, idle
    far_generated: bool = False
    far_varied: bool = False
    near_generated: bool = False
    near_varied: bool = False
    far_snr_db: float | None = None
    far_band_limited: bool = False
    far_jump_db: float | None = None
    far_peak_db: float = -10.0
    playback_agc: bool = False
    loudspeaker_eq: bool = False
    distortion: str = ""
    structure_db: float | None = None
    delay_ms: float = 0.0
    delay_jump_ms: float = 0.0
    glitch: str = ""  # far, mic
    drift_ppm: float = 0.0
    path_change: str = ""  # move, gain
    ser_db: float = 0.0
    near_dry: bool = False
    noise: bool = False
    snr_db: float = 30.0
    mic_eq: bool = False
    mic_band_limited: bool = False
    mic_clip: str = ""  # hard, soft
    mic_clip_at: float = 1.0
    dc_offset: float = 0.0
    quantise: bool = False
    transmit_agc: bool = False
    transmit_ns: bool = False
    mic_peak_db: float = -6.0


def draw(config: SceneConfig, rng: np.random.Generator, embedded: bool = True) -> Recipe:
    """One recipe.

    Args:
        embedded: whether the speech is the embedded readings, which decides the defaults of varying it.
    """
    c = config
    scenario = Scenario(_pick(rng, c.scenario_probability))
    near_active = scenario in (Scenario.DOUBLE_TALK, Scenario.NEAR_END)
    has_echo = scenario in (Scenario.DOUBLE_TALK, Scenario.FAR_END)
    far_content = ("speech", "music", "tones")[_pick(rng, c.far_probability)]
    far_active, far_peak_db = has_echo, float(rng.uniform(*c.far_peak_db))
    if scenario == Scenario.NEAR_END:
        if _happens(rng, c.headset_probability):
            far_active = True
        elif _happens(rng, c.idle_far_probability):
            far_active, far_content, far_peak_db = True, "idle", float(rng.uniform(-75.0, -50.0))
    generated = c.speech_generated_probability
    generated = (0.25 if embedded else 0.0) if generated is None else generated
    varied = c.speech_varied_probability
    varied = (0.9 if embedded else 0.3) if varied is None else varied
    mic_clip = ("hard", "soft")[int(rng.integers(2))] if _happens(rng, c.mic_clip_probability) else ""
    noise = _happens(rng, c.noise_probability)
    silence = scenario == Scenario.SILENCE
    return Recipe(
        scenario=scenario,
        far_active=far_active,
        has_echo=has_echo,
        near_active=near_active,
        far_content=far_content,
        far_generated=_happens(rng, generated),
        far_varied=_happens(rng, varied),
        near_generated=_happens(rng, generated),
        near_varied=_happens(rng, varied),
        far_snr_db=_maybe(rng, c.far_noise_probability, c.far_snr_db),
        far_band_limited=_happens(rng, c.far_band_limit_probability),
        far_jump_db=_maybe(rng, c.far_level_jump_probability, c.far_level_jump_db),
        far_peak_db=far_peak_db,
        playback_agc=_happens(rng, c.playback_agc_probability),
        loudspeaker_eq=_happens(rng, c.loudspeaker_eq_probability),
        distortion=_distortion(c, rng),
        structure_db=_maybe(rng, c.structure_probability, c.structure_db),
        delay_ms=_delay_ms(c, rng),
        delay_jump_ms=(_maybe(rng, c.delay_jump_probability, c.delay_jump_ms) or 0.0) * float(rng.choice((-1.0, 1.0))),
        glitch=("far", "mic")[int(rng.integers(2))] if _happens(rng, c.glitch_probability) else "",
        drift_ppm=_drift_ppm(c, rng),
        path_change=("move", "gain")[int(rng.integers(2))] if _happens(rng, c.path_change_probability) else "",
        ser_db=float(rng.uniform(*c.ser_db)),
        near_dry=_happens(rng, c.near_dry_probability),
        noise=noise or (silence and _happens(rng, 0.8)),  # all-zero clips are rare in life
        snr_db=float(rng.uniform(*c.snr_db)),
        mic_eq=_happens(rng, c.mic_eq_probability),
        mic_clip=mic_clip,
        mic_clip_at=float(rng.uniform(*c.mic_clip_at)),
        dc_offset=_maybe(rng, c.dc_probability, c.dc_offset) or 0.0,
        quantise=_happens(rng, c.quantise_probability),
        transmit_agc=_happens(rng, c.transmit_agc_probability) and not silence,
        transmit_ns=_happens(rng, c.transmit_ns_probability) and not silence,
        # Nobody talks: the microphone's own peak is that of the noise floor.
        mic_peak_db=float(rng.uniform(-75.0, -35.0) if silence else rng.uniform(*c.mic_peak_db)),
        mic_band_limited=_happens(rng, c.mic_band_limit_probability),
    )


def _happens(rng: np.random.Generator, probability: float) -> bool:
    return bool(rng.random() < probability)


def _maybe(rng: np.random.Generator, probability: float, limits: Range) -> float | None:
    return float(rng.uniform(*limits)) if _happens(rng, probability) else None


def _pick(rng: np.random.Generator, shares: tuple[float, ...]) -> int:
    total = np.cumsum(shares)
    return min(int(np.searchsorted(total, rng.random() * total[-1], side="right")), len(shares) - 1)


def _distortion(c: SceneConfig, rng: np.random.Generator) -> str:
    if not _happens(rng, c.distortion_probability):
        return ""
    names = [n for n in DISTORTIONS if c.distortion_share.get(n, 0.0) > 0]
    return names[_pick(rng, tuple(c.distortion_share[n] for n in names))]


def _delay_ms(c: SceneConfig, rng: np.random.Generator) -> float:
    kind = rng.random()
    if kind < c.no_delay_probability:
        return 0.0
    if kind < c.no_delay_probability + c.long_delay_probability:
        return float(rng.uniform(*c.long_delay_ms))
    return float(np.exp(rng.uniform(*np.log(c.delay_ms))))


def _drift_ppm(c: SceneConfig, rng: np.random.Generator) -> float:
    if not _happens(rng, c.drift_probability):
        return 0.0
    return float(rng.uniform(*(c.large_drift_ppm if _happens(rng, c.large_drift_probability) else c.drift_ppm)))


def _convert(key: str, value: Any, hint: Any) -> tuple[str, Any]:
    """-> (what is wrong or "", the value in the field's type)."""
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return "", None
        hint = float
    if key == "near_target":
        return ("" if value in NEAR_TARGETS else f"give one of {', '.join(NEAR_TARGETS)}."), value
    if key == "distortion_share":
        return _convert_shares(value)
    if get_origin(hint) is tuple:
        return _convert_numbers(key, value, len(get_args(hint)))
    if not _is_number(value):
        return "give a number.", value
    if key.endswith("_probability") and not 0 <= value <= 1:
        return "give a probability from 0 to 1.", value
    return "", float(value)


def _convert_numbers(key: str, value: Any, count: int) -> tuple[str, Any]:
    if isinstance(value, str) or not hasattr(value, "__len__") or len(value) != count:
        return f"give a list of {count} numbers.", value
    numbers = list(value)
    if not all(_is_number(v) for v in numbers):
        return f"give a list of {count} numbers.", value
    if key.endswith("_probability"):
        good = min(numbers) >= 0 and sum(numbers) > 0
        return ("" if good else "give shares of at least 0, not all 0."), tuple(map(float, numbers))
    if numbers[0] > numbers[1]:
        return "the first number is the smallest: give [low, high].", value
    if key in ("delay_ms", "long_delay_ms", "path_change_ms", "delay_jump_ms", "pause_s") and numbers[0] < 0:
        return "give times of at least 0.", value
    if key == "delay_ms" and numbers[0] <= 0:
        return "the range is logarithmic: give a low end above 0 (no_delay_probability is for 0).", value
    return "", tuple(map(float, numbers))


def _convert_shares(value: Any) -> tuple[str, Any]:
    if not isinstance(value, Mapping) or not all(_is_number(v) and v >= 0 for v in value.values()):
        return "give shares by name, such as {hard_clip: 1}.", value
    unknown = [k for k in value if k not in DISTORTIONS]
    if unknown:
        return f"no distortion {unknown[0]!r}; there are {', '.join(DISTORTIONS)}.", value
    if not any(v > 0 for v in value.values()):
        return "all shares are 0; set distortion_probability=0 for none.", value
    return "", {str(k): float(v) for k, v in value.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and bool(np.isfinite(value))
