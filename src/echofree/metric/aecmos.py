"""AECMOS: what listeners would say about the echo and about other degradations, 1 to 5 (Purin et al. 2022, "AECMOS: a
speech quality assessment metric for echo impairment"; models of the package speechmos, in the extra `metrics`).

It does not see level, and silence scores close to 5, so it means something only beside speech survival; it depends on
the declared scenario, on the cut and on the alignment of the far end, which is given here as captured. `protocol` says
all of that and is stored with the scores. The package itself is not imported, since it wants librosa (212 MB):
its model files are found and the mel front end is written out below.

Legend: T samples, L frames, F bins, K bands.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from echofree.audio import resample
from echofree.contracts import Scenario
from echofree.errors import ConfigError, MissingExtra
from echofree.metric.core import View
from echofree.metric.intrusive import need

MODEL_FILE = "aecmos_models/Run_1663915512_Stage_0.onnx"  # 16 kHz, told the scenario
RATE_HZ = 16000
WINDOW = 513  # samples, and the length of the FFT: odd, as the model was trained
HOP = 256
NUM_BANDS = 160
MAX_S = 20.0
CUTS = ("whole", "challenge")


def model_path() -> Path:
    """Where the package keeps the model. Raises MissingExtra."""
    spec = importlib.util.find_spec("speechmos")
    folders = list(spec.submodule_search_locations or []) if spec else []
    path = Path(folders[0]) / MODEL_FILE if folders else None
    if path is None or not path.is_file():
        raise MissingExtra("speechmos", "metrics", "The metric aecmos")
    return path


def mel_matrix() -> np.ndarray:
    """-> float64 [K, F]: triangles of area 1 on Slaney's mel scale (linear to 1 kHz, then logarithmic), 0 to 8 kHz."""
    break_hz, step = 1000.0, np.log(6.4) / 27  # 15 mel, 200/3 Hz each, then 27 mel per factor 6.4
    top = 15 + np.log(RATE_HZ / 2 / break_hz) / step
    mel = np.linspace(0, top, NUM_BANDS + 2)
    edge_hz = np.where(mel < 15, mel * 200 / 3, break_hz * np.exp(step * (mel - 15)))
    bin_hz = np.fft.rfftfreq(WINDOW, 1 / RATE_HZ)  # [F]
    low, centre, high = edge_hz[:-2, None], edge_hz[1:-1, None], edge_hz[2:, None]
    rise, fall = (bin_hz - low) / (centre - low), (high - bin_hz) / (high - centre)
    return np.maximum(0, np.minimum(rise, fall)) * 2 / (high - low)


def features(wave: np.ndarray, mel: np.ndarray) -> np.ndarray:
    """[T] at 16 kHz -> float64 [L, K]: mel power in dB below the clip's maximum, 80 dB deep, mapped to [-1, 1]."""
    padded = np.pad(wave, WINDOW // 2)
    blocks = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP]  # [L, WINDOW]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    power = np.abs(np.fft.rfft(blocks * hann)) ** 2 @ mel.T  # [L, K]
    level_db = 10 * np.log10(np.maximum(power, 1e-10))
    level_db -= level_db.max()
    return (np.maximum(level_db, -80) + 40) / 40


def cut_span(num_samples: int, rate_hz: int, scenario: Scenario, cut: str) -> tuple[int, int]:
    """The samples that are scored: at most 20 s of all (`whole`), or as the challenge cuts its clips: the last half in
    far-end single talk, the last (length - 15 s) / 2 in double talk longer than 15 s, all of it otherwise."""
    start = 0
    if cut == "challenge" and scenario == Scenario.FAR_END:
        start = num_samples // 2
    elif cut == "challenge" and scenario == Scenario.DOUBLE_TALK and num_samples > 15 * rate_hz:
        start = num_samples - (num_samples - 15 * rate_hz) // 2
    return start, min(num_samples, start + round(MAX_S * rate_hz))


class AecmosModel:
    """The network. One object serves both scores: it remembers the clip that it saw last."""

    def __init__(self, sample_rate: int, cut: str = "whole"):
        if cut not in CUTS:
            raise ConfigError(f"cut={cut!r}: give one of {', '.join(CUTS)}")
        self.sample_rate, self.cut = sample_rate, cut
        self._path = model_path()
        self._runtime = need("onnxruntime", "The metric aecmos")
        self._last: tuple[Any, tuple[float, float]] | None = None

    @property
    def protocol(self) -> Mapping[str, Any]:
        """What must be equal for two scores to be comparable."""
        return {
            "model": self._path.name,
            "rate_hz": RATE_HZ,
            "cut": self.cut,
            "max_s": MAX_S,
            "scenario_given": True,
            "far_end": "as captured, not aligned",
            "resampling": "none" if self.sample_rate == RATE_HZ else "soxr HQ",
        }

    @cached_property
    def _session(self) -> Any:
        options = self._runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        return self._runtime.InferenceSession(str(self._path), options, providers=["CPUExecutionProvider"])

    @cached_property
    def _mel(self) -> np.ndarray:
        return mel_matrix()

    def __call__(self, view: View) -> tuple[float, float] | None:
        """-> (echo, other degradation), 1 to 5; None for a scenario that it doesn't know."""
        if view.scenario not in (Scenario.FAR_END, Scenario.NEAR_END, Scenario.DOUBLE_TALK):
            return None
        key = (view.name, view.scenario, len(view.est), hash(view.est.tobytes()))
        if self._last is None or self._last[0] != key:
            start, stop = cut_span(len(view.est), self.sample_rate, view.scenario, self.cut)
            cut = (x[start:stop] for x in (view.far, view.mic, view.est))
            far, mic, est = (resample(x, self.sample_rate, RATE_HZ) for x in cut)
            self._last = (key, self.score(far, mic, est, view.scenario))
        return self._last[1]

    def score(self, far: np.ndarray, mic: np.ndarray, est: np.ndarray, scenario: Scenario) -> tuple[float, float]:
        """Three waves of one length at 16 kHz -> (echo, other degradation)."""
        marks = (scenario != Scenario.NEAR_END, scenario != Scenario.FAR_END, True)  # far end talks, near end talks, -
        planes = []
        for wave, mark in zip((far, mic, est), marks):
            plane = features(wave, self._mel)  # [L, K]
            planes.append(np.concatenate([plane, np.full((20, NUM_BANDS), float(mark)), np.zeros((20, NUM_BANDS))]))
        inputs = {self._session.get_inputs()[0].name: np.stack(planes)[None].astype(np.float32)}  # [1, 3, L + 40, K]
        inputs["h0"] = np.zeros((4, 1, 64), np.float32)
        result = self._session.run([], inputs)[0]
        return float(result[0]), float(result[1])


def aecmos(model: AecmosModel, which: str) -> Callable[[View], float | None]:
    """One of the two scores: "echo" (far-end single talk, double talk) or "deg" (near-end single talk, double talk)."""
    absent, index = (Scenario.NEAR_END, 0) if which == "echo" else (Scenario.FAR_END, 1)

    def score(view: View) -> float | None:
        scores = None if view.scenario == absent else model(view)
        return None if scores is None else scores[index]

    return score
