"""Scenes: what a hands-free device's microphone hears, made from a seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echofree.contracts import Clip, Scenario
from echofree.data.rir import RoomBank
from echofree.data.speech import SpeechPool


@dataclass(frozen=True)
class SceneConfig:
    scenario: tuple[float, float, float, float] = (0.55, 0.22, 0.18, 0.05)
    ser_db: tuple[float, float] = (-25.0, 15.0)
    delay_ms: tuple[float, float] = (1.0, 500.0)


class SceneMaker:
    def __init__(self, config: SceneConfig, sample_rate: int, split: str, speech: SpeechPool, rooms: RoomBank):
        self.config, self.sample_rate, self.split, self.speech, self.rooms = config, sample_rate, split, speech, rooms

    def make(self, rng: np.random.Generator, num_samples: int, name: str, index: int, seed: int) -> Clip:
        kind = Scenario(int(rng.choice(4, p=self.config.scenario)))
        a, b = rng.permutation(len(self.speech.talkers))[:2]
        far = self.speech.talk(rng, self.speech.talkers[a], num_samples, (0.2, 1.0))
        near = self.speech.talk(rng, self.speech.talkers[b], num_samples, (0.2, 1.0))
        room = self.rooms.rooms(self.split)[int(rng.integers(len(self.rooms.rooms(self.split))))]
        bulk = round(np.exp(rng.uniform(*np.log(self.config.delay_ms))) * self.sample_rate / 1000)
        echo = _convolve(far, self.rooms.taps[room, 0], num_samples, bulk)
        near = _convolve(near, self.rooms.taps[room, 2], num_samples, 0)
        gain = np.sqrt(np.sum(near**2) / max(np.sum(echo**2), 1e-9) / 10 ** (rng.uniform(*self.config.ser_db) / 10))
        echo = echo * np.float32(gain)
        delay = bulk + int(self.rooms.direct[room, 0])
        if kind in (Scenario.FAR_END, Scenario.SILENCE):
            near = near * 0
        if kind in (Scenario.NEAR_END, Scenario.SILENCE):
            far, echo, delay = far * 0, echo * 0, -1
        noise = (rng.standard_normal(num_samples, dtype=np.float32) * 1e-3).astype(np.float32)
        mic = near + echo + noise
        scale = np.float32(0.5 / max(np.abs(mic).max(), 1e-6))
        near, echo, noise = near * scale, echo * scale, noise * scale
        return Clip(near + echo + noise, far, near, echo, noise, kind, delay, name, index, seed)


def _convolve(x: np.ndarray, taps: np.ndarray, num_samples: int, delay: int) -> np.ndarray:
    n = num_samples + len(taps)
    y = np.fft.irfft(np.fft.rfft(x, n) * np.fft.rfft(taps.astype(np.float32), n), n)[:num_samples]
    return np.concatenate([np.zeros(delay, np.float32), y])[:num_samples].astype(np.float32)
