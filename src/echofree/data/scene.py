"""Scenes: what the microphone of a hands-free device hears, drawn and rendered from a seed.

A scene is drawn first (`draw`: a `Recipe` of numbers) and rendered from it (`SceneMaker.render`: sound). The order of
events is that of the device:

    far -> tap (what a canceller is given) -> gain control -> distortion -> clock -> equaliser, room, case -> delay
    near talker -> room;  noise;  all -> microphone equaliser -> sum -> gain control, clipping, offset, 16 bit

Legend: T samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echofree.contracts import Clip
from echofree.data import device, noise, voice
from echofree.data.level import ratio_gain, snr_gain
from echofree.data.noise import NoisePool
from echofree.data.recipe import Recipe, SceneConfig, draw
from echofree.data.room import RoomDraw, RoomPool
from echofree.data.speech import SpeechPool


@dataclass(frozen=True)
class Sources:
    """Where one split's sounds come from."""

    speech: SpeechPool
    noise: NoisePool
    rooms: RoomPool


class SceneMaker:
    """Renders scenes of one split.

    Args:
        config: ranges and probabilities.
        sources: speech, noise and rooms of the split.
        sample_rate: Hz.
    """

    def __init__(self, config: SceneConfig, sources: Sources, sample_rate: int):
        self.config, self.sources, self.sample_rate = config, sources, sample_rate

    def make(self, rng: np.random.Generator, num_samples: int, name: str = "", index: int = 0, seed: int = 0) -> Clip:
        """Draws and renders one scene: a function of the generator's state alone."""
        return self.render(draw(self.config, rng, self.sources.speech.embedded), rng, num_samples, name, index, seed)

    def render(
        self, recipe: Recipe, rng: np.random.Generator, num_samples: int, name: str = "", index: int = 0, seed: int = 0
    ) -> Clip:
        """-> a clip with mic = near + echo + noise to the last bit, unless the recipe clips or quantises the microphone
        (both act on the sum; the parts stay as they were).

        `delay_samples` is the lag of the direct path at the middle of the clip, -1 without an echo.
        """
        r, rate = recipe, self.sample_rate
        room = self.sources.rooms.draw(rng)
        far_talker, near_talker = self._two_talkers(rng)
        silent = np.zeros(num_samples, dtype=np.float32)
        mic_eq = device.microphone_eq(rng, rate, self.config.mic_eq_db) if r.mic_eq else None

        far = self._far_end(r, rng, far_talker, num_samples) if r.far_active else silent
        echo, delay = silent, -1
        if r.has_echo:
            echo, delay = self._echo(r, rng, far, room, mic_eq)
        heard, target = silent, silent
        if r.near_active:
            heard, target = self._near_end(r, rng, near_talker, room, mic_eq, num_samples)
        hiss = self.sources.noise.draw(rng, num_samples) if r.noise else silent
        if r.mic_band_limited:
            band, plain = device.telephone_band(rate), heard is target
            heard, echo, hiss = (device.convolve(w, band)[0] for w in (heard, echo, hiss))
            target = heard if plain else device.convolve(target, band)[0]

        if r.glitch == "mic":
            holes = _holes(rng, num_samples, rate)
            heard, target, echo, hiss = (_punch(w, holes) for w in (heard, target, echo, hiss))
        if r.near_active and r.has_echo:
            echo = echo * ratio_gain(heard, echo, r.ser_db, rate)
        hiss = hiss * snr_gain(heard if r.near_active else echo, hiss, r.snr_db, rate)
        # What the target leaves out of the near end (late reverberation) counts as noise.
        hiss = hiss + (heard - target) if heard is not target else hiss
        mic, near, echo, hiss = self._microphone(r, rng, target, echo, hiss)
        if r.glitch == "far":
            far = _punch(far, _holes(rng, num_samples, rate))
        return Clip(mic, _at_peak(far, r.far_peak_db), near, echo, hiss, r.scenario, delay, name, index, seed)

    def _two_talkers(self, rng: np.random.Generator) -> tuple[int, int]:
        """Two different speakers, those with many recordings more often."""
        speech = self.sources.speech
        first = int(rng.choice(len(speech.talkers), p=speech.share))
        share = speech.share.copy()
        share[first] = 0.0
        return first, int(rng.choice(len(share), p=share / share.sum()))

    def _talk(
        self, r: Recipe, rng: np.random.Generator, talker: int, num_samples: int, generated: bool, varied: bool
    ) -> np.ndarray:
        """One talker of this scene, unlike the other one: a recording, varied or not, or a made-up voice."""
        if generated:
            return voice.speak(rng, num_samples, self.sample_rate)
        speech = self.sources.speech
        variation = voice.draw_variation(rng) if varied else voice.Variation()
        needed = int(num_samples * variation.rate) + self.sample_rate // 20
        wave = speech.talk(rng, speech.talkers[talker], needed, self.config.pause_s)
        return voice.vary(wave, variation, num_samples, self.sample_rate)

    def _far_end(self, r: Recipe, rng: np.random.Generator, talker: int, num_samples: int) -> np.ndarray:
        """The loopback signal at no particular level."""
        rate = self.sample_rate
        if r.far_content == "idle":
            return noise.colored(rng, num_samples, rate)
        if r.far_content == "music":
            wave = noise.music(rng, num_samples, rate)
        elif r.far_content == "tones":
            wave = noise.tones(rng, num_samples, rate)
        else:
            wave = self._talk(r, rng, talker, num_samples, r.far_generated, r.far_varied)
        if r.far_snr_db is not None:
            hiss = self.sources.noise.draw(rng, num_samples)
            wave = wave + hiss * snr_gain(wave, hiss, r.far_snr_db, rate)
        if r.far_band_limited:
            wave = device.convolve(wave, device.telephone_band(rate))[0]
        if r.far_jump_db is not None:
            wave = wave * _step(rng, num_samples, r.far_jump_db, rate)
        return wave

    def _echo(
        self, r: Recipe, rng: np.random.Generator, far: np.ndarray, room: RoomDraw, mic_eq: np.ndarray | None
    ) -> tuple[np.ndarray, int]:
        """Loudspeaker, room and delay -> (echo [T], its lag in samples at the middle)."""
        rate, num_samples = self.sample_rate, len(far)
        played = _at_peak(far, 0.0)
        if r.playback_agc:
            gain = device.gain_control(played, rate, rng.uniform(-30.0, -15.0), 12.0, 0.03, rng.uniform(0.3, 2.0))
            played = _at_peak(played * gain ** np.float32(rng.uniform(0.3, 0.8)), 0.0)  # a ratio of 1.4 to 5
        if r.distortion:
            played = device.distort(rng, played, r.distortion, rate)
        if r.drift_ppm:
            played = resample_clock(played, r.drift_ppm)
        filters = []
        if r.loudspeaker_eq:
            c = self.config
            filters.append(
                device.loudspeaker_eq(
                    rng, rate, c.loudspeaker_eq_db, c.loudspeaker_high_pass_hz, c.loudspeaker_low_pass_hz
                )
            )
        if mic_eq is not None:
            filters.append(mic_eq)
        responses = [room.echo, room.echo_moved] if r.path_change == "move" else [room.echo]
        if r.structure_db is not None:
            case = device.structure_path(rng, rate, r.structure_db, room.direct)
            responses = [_sum_taps(taps, case) for taps in responses]
        waves = device.convolve(played, *[device.chain(taps, *filters) for taps in responses])
        echo = waves[0]
        if r.path_change == "move":
            fade = _crossfade(rng, num_samples, rng.uniform(*self.config.path_change_ms) / 1000, rate)
            echo = waves[0] + fade * (waves[1] - waves[0])
        elif r.path_change == "gain":
            echo = echo * _step(rng, num_samples, float(rng.uniform(-10.0, 10.0)), rate)
        bulk = round(r.delay_ms * rate / 1000)
        moved = max(0, bulk + round(r.delay_jump_ms * rate / 1000))
        drift = round(r.drift_ppm * 1e-6 * num_samples / 2)
        if moved == bulk:
            return _delayed(echo, bulk), bulk + room.direct - drift
        at = int(rng.uniform(0.2, 0.8) * num_samples)
        jumped = np.concatenate([_delayed(echo, bulk)[:at], _delayed(echo, moved)[at:]])
        return jumped, (bulk if at > num_samples // 2 else moved) + room.direct - drift

    def _near_end(
        self,
        r: Recipe,
        rng: np.random.Generator,
        talker: int,
        room: RoomDraw,
        mic_eq: np.ndarray | None,
        num_samples: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """-> (near end at the microphone [T], the target [T]); one and the same array when the target is reverberant.

        All targets go through the same direct path, so they are aligned with the microphone.
        """
        dry = self._talk(r, rng, talker, num_samples, r.near_generated, r.near_varied)
        taps = np.ones(1, dtype=np.float32) if r.near_dry else room.near
        filters = [] if mic_eq is None else [mic_eq]
        full = device.chain(taps, *filters)
        if self.config.near_target == "reverberant" or r.near_dry:
            wave = device.convolve(dry, full)[0] if len(full) > 1 else dry
            return wave, wave
        keep_s = 0.05 if self.config.near_target == "early" else 0.001
        part = _early(taps, 0 if r.near_dry else room.near_direct, keep_s, self.sample_rate)
        heard, target = device.convolve(dry, full, device.chain(part, *filters))
        return heard, target

    def _microphone(
        self, r: Recipe, rng: np.random.Generator, near: np.ndarray, echo: np.ndarray, hiss: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """-> (mic, near, echo, noise): suppression, gain control and the joint gain act on the
        parts alike."""
        total = near + echo + hiss
        if r.transmit_ns:
            gain = voice.suppression_gain(voice.stft(total), float(rng.uniform(0.1, 0.4)))
            near, echo, hiss = (voice.istft(voice.stft(w) * gain, len(w)) for w in (near, echo, hiss))
            total = near + echo + hiss
        if r.transmit_agc:
            gain = device.gain_control(_at_peak(total, -6.0), self.sample_rate, rng.uniform(-28, -18), 15.0, 0.02, 0.5)
            near, echo, hiss = near * gain, echo * gain, hiss * gain
            total = near + echo + hiss
        scale = peak_gain(total, r.mic_peak_db)
        near, echo, hiss = near * scale, echo * scale, hiss * scale
        if r.dc_offset:
            hiss = hiss + np.float32(r.dc_offset * 10 ** (r.mic_peak_db / 20))
        mic = near + echo + hiss
        if r.mic_clip:
            limit = np.float32(10 ** (r.mic_peak_db / 20) * r.mic_clip_at)
            mic = np.clip(mic, -limit, limit) if r.mic_clip == "hard" else limit * np.tanh(mic / limit)
        if r.quantise:
            mic = (np.clip(np.round(mic * 32768.0), -32768, 32767) / 32768.0).astype(np.float32)
        return mic, near, echo, hiss


def peak_gain(wave: np.ndarray, peak_db: float) -> np.float32:
    """The factor that brings the peak to `peak_db` dBFS; 1 for silence."""
    peak = float(np.abs(wave).max())
    return np.float32(10 ** (peak_db / 20) / peak) if peak > 1e-9 else np.float32(1.0)


def resample_clock(wave: np.ndarray, ppm: float) -> np.ndarray:
    """A microphone clock that runs off by `ppm`: out(t) = wave((1 + ppm 1e-6) t), float32 [T] -> [T]."""
    import soxr

    return voice.fit(soxr.resample(wave, 1.0 + ppm * 1e-6, 1.0, quality="HQ"), len(wave))


def _at_peak(wave: np.ndarray, peak_db: float) -> np.ndarray:
    return wave * peak_gain(wave, peak_db)


def _delayed(wave: np.ndarray, delay: int) -> np.ndarray:
    """Later by `delay` samples, zeros in front, same length."""
    if delay == 0:
        return wave
    out = np.zeros_like(wave)
    out[delay:] = wave[: max(0, len(wave) - delay)]
    return out


def _step(rng: np.random.Generator, num_samples: int, step_db: float, rate_hz: int) -> np.ndarray:
    """A gain of 1 that becomes `step_db` within 20 ms at a random time."""
    fade = _crossfade(rng, num_samples, 0.02, rate_hz)
    return (1.0 + fade * (10 ** (step_db / 20) - 1.0)).astype(np.float32)


def _crossfade(rng: np.random.Generator, num_samples: int, seconds: float, rate_hz: int) -> np.ndarray:
    """0 that becomes 1 within `seconds`, somewhere in the middle 60 % of the clip."""
    start = rng.uniform(0.2, 0.8) * num_samples
    ramp = (np.arange(num_samples, dtype=np.float32) - np.float32(start)) / np.float32(max(1.0, seconds * rate_hz))
    return np.clip(ramp, 0.0, 1.0)


def _sum_taps(taps: np.ndarray, more: np.ndarray) -> np.ndarray:
    out = np.zeros(max(len(taps), len(more)), dtype=np.float32)
    out[: len(taps)] += taps
    out[: len(more)] += more
    return out


def _early(taps: np.ndarray, direct: int, seconds: float, rate_hz: int) -> np.ndarray:
    """The response up to `seconds` after the direct path, with a fade of 2 ms."""
    end = direct + max(1, round(seconds * rate_hz))
    fade = max(1, round(0.002 * rate_hz))
    out = taps[: end + fade].copy()
    tail = out[end:]
    tail *= np.linspace(1.0, 0.0, len(tail) + 1, dtype=np.float32)[1:]
    return out


def _holes(rng: np.random.Generator, num_samples: int, rate_hz: int) -> list[tuple[int, int, bool]]:
    """1 to 3 blocks of 10 ms that a driver lost: (start, length, filled with the block before or with zeros)."""
    length = rate_hz // 100
    last = max(length + 1, num_samples - length)
    return [(int(rng.integers(length, last)), length, bool(rng.random() < 0.5)) for _ in range(int(rng.integers(1, 4)))]


def _punch(wave: np.ndarray, holes: list[tuple[int, int, bool]]) -> np.ndarray:
    out = wave.copy()
    for start, length, repeat in holes:
        stop = min(start + length, len(wave))
        out[start:stop] = wave[start - length : stop - length] if repeat else 0.0
    return out
