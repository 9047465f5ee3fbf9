"""`Canceller`: an exported model as a live stream. Chunks of any size in, as many samples out, late by
`latency_samples`.

Legend: S signals, F bins, M hop.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from echofree.errors import DataError
from echofree.runtime.contract import CHECKED, Contract, read
from echofree.runtime.design import irfft, rfft, vorbis_window
from echofree.runtime.engine import Runner, open_engine
from echofree.runtime.linear import LinearStage

FULL_SCALE = 32768.0
SHORT_S, MANY_RESETS = 0.2, 5  # so many calls in a row that were shorter: somebody resets at every chunk


class Canceller:
    """One stream. Keep it for the whole call: its states are what it has learnt. `Canceller.load` makes the first,
    `twin` more that share the weights and nothing else.

    Attributes:
        sample_rate: Hz.
        latency_samples: output sample i of the stream belongs to input sample i - latency_samples.
        hop_samples: samples worked on at once.
        contract: of the artifact.
    """

    def __init__(self, contract: Contract, make_runner: Callable[[], Runner] | None):
        self.contract, self._make_runner = contract, make_runner
        self.sample_rate, self.hop_samples = contract.sample_rate, contract.hop_samples
        self.latency_samples = contract.latency_samples
        self.runner = None if make_runner is None else make_runner()
        self.linear = None
        if contract.front_end is not None:
            self.linear = LinearStage(contract.front_end, self.sample_rate, self.hop_samples)
        hop = self.hop_samples
        self._mic, self._far, self._out = (np.zeros(hop, np.float32) for _ in range(3))
        self._fill = 0
        self._taken, self._short = 0, 0  # samples since the last reset; resets in a row after next to nothing
        self._hops: list[np.ndarray] = []
        if contract.kind == "spectra":
            assert self.linear is not None
            self._hops = [getattr(self.linear, name) for name in contract.signals]
            self._window = vorbis_window(2 * hop)
            self._frames = np.zeros((len(self._hops), 2 * hop), np.float32)
            self._windowed = np.zeros_like(self._frames)
            self._spectra = np.zeros((len(self._hops), hop + 1), np.complex64)
            self._wave, self._overlap = np.zeros(2 * hop, np.float32), np.zeros(hop, np.float32)
        self._step = {"spectra": self._spectra_step, "wave": self._wave_step, "linear": self._linear_step}[
            contract.kind
        ]

    @classmethod
    def load(cls, path: str | os.PathLike[str], allow: tuple[str, ...] = (CHECKED,)) -> Canceller:
        """Reads an exported folder (or the graph's file in it).

        Args:
            path: what `python -m echofree.export` wrote.
            allow: statuses of the artifact that are accepted; by default those that agree with their model.

        Raises:
            CheckpointError: no artifact, a rejected one, or another file than the one that was checked.
            MissingExtra: its engine isn't installed.
        """
        contract, folder = read(path, allow)
        return cls(contract, None if contract.engine == "none" else open_engine(contract, Path(folder)))

    def twin(self) -> Canceller:
        """Another stream through the same weights."""
        return Canceller(self.contract, self._make_runner)

    def reset(self) -> None:
        """Forgets everything: the next sample is the first of a new call. Warns when that happens at every chunk."""
        self._short = self._short + 1 if 0 < self._taken < SHORT_S * self.sample_rate else 0
        self._taken = 0
        if self._short == MANY_RESETS:
            warnings.warn(
                f"the stream was reset {MANY_RESETS} times in a row within less than {SHORT_S:g} s of sound each: a "
                "canceller has learnt nothing by then. Keep its state for the whole call",
                stacklevel=2,
            )
        for part in (self.linear, self.runner):
            if part is not None:
                part.reset()
        for array in (self._mic, self._far, self._out):
            array[:] = 0
        if self._hops:
            self._frames[:] = 0
            self._overlap[:] = 0
        self._fill = 0

    def process(self, mic: np.ndarray, far: np.ndarray | None, out: np.ndarray | None = None) -> np.ndarray:
        """mic, far [n], any n, float in [-1, 1] or int16 -> the estimate [n]: int16 if mic is, else float32.

        Args:
            mic, far: of one length. far None says that nothing is playing: silence. A far end that plays and isn't
                given can't be cancelled.
            out: written instead of a new array: [n], float32 or int16.

        Raises:
            DataError: other shapes or types, NaN or infinite samples; nothing was taken in.
        """
        mic = np.asarray(mic)
        far = np.zeros(mic.shape, np.float32) if far is None else np.asarray(far)
        self._check(mic, far)
        self._taken += len(mic)
        if out is None:
            out = np.empty(len(mic), np.int16 if mic.dtype == np.int16 else np.float32)
        at, hop, size = 0, self.hop_samples, len(mic)
        while at < size:
            take, fill = min(size - at, hop - self._fill), self._fill
            _scaled(mic[at : at + take], self._mic[fill : fill + take])
            _scaled(far[at : at + take], self._far[fill : fill + take])
            ready = self._out[fill : fill + take]
            out[at : at + take] = ready if out.dtype != np.int16 else to_int16(ready)
            at, self._fill = at + take, fill + take
            if self._fill == hop:
                self._step()
                self._fill = 0
        return out

    def flush(self) -> np.ndarray:
        """float32 [latency_samples]: what the stream still owes. Silence is given in their place, after which it may go
        on."""
        silence = np.zeros(self.latency_samples, np.float32)
        return self.process(silence, silence)

    def flags(self) -> dict[str, float | bool]:
        """What the linear stage found wrong with the pair of signals; empty without one."""
        return {} if self.linear is None else self.linear.flags()

    def states(self) -> dict[str, np.ndarray]:
        """All states by the model's names, for comparisons."""
        found = {} if self.runner is None else dict(self.runner.states())
        if self.linear is not None:
            found |= {f"front_end.{name}": value for name, value in self.linear.states().items()}
        return found

    def _check(self, mic: np.ndarray, far: np.ndarray) -> None:
        if mic.ndim != 1 or mic.shape != far.shape:
            raise DataError(f"mic {mic.shape} and far {far.shape}: give two arrays [n] of one length")
        for name, x in (("mic", mic), ("far", far)):
            if x.dtype != np.int16 and x.dtype.kind != "f":
                raise DataError(f"{name} is {x.dtype}: give float samples in [-1, 1] or int16")
            if x.dtype.kind == "f" and not np.isfinite(x).all():
                raise DataError(f"{name} holds {np.count_nonzero(~np.isfinite(x))} samples that are NaN or infinite")

    def _spectra_step(self) -> None:
        hop, frames, runner = self.hop_samples, self._frames, self.runner
        assert self.linear is not None
        assert runner is not None
        self.linear.step(self._mic, self._far)
        frames[:, :hop] = frames[:, hop:]
        for row, wave in enumerate(self._hops):
            frames[row, hop:] = wave
        np.multiply(frames, self._window, out=self._windowed)
        rfft(self._windowed, out=self._spectra)
        runner.inputs[0][...] = self._spectra.view(np.float32).reshape(runner.inputs[0].shape)
        spectrum = runner.run().reshape(-1).view(np.complex64)  # [F]
        irfft(spectrum, out=self._wave)
        self._wave *= self._window
        np.add(self._overlap, self._wave[:hop], out=self._out)
        self._overlap[:] = self._wave[hop:]

    def _wave_step(self) -> None:
        runner: Any = self.runner
        runner.inputs[0][0] = self._mic
        runner.inputs[1][0] = self._far
        self._out[:] = runner.run()[0]

    def _linear_step(self) -> None:
        assert self.linear is not None
        self.linear.step(self._mic, self._far)
        self._out[:] = self.linear.error


def _scaled(x: np.ndarray, into: np.ndarray) -> None:
    if x.dtype == np.int16:
        np.multiply(x, np.float32(1 / FULL_SCALE), out=into, casting="unsafe")
    else:
        into[:] = x


def to_int16(x: np.ndarray) -> np.ndarray:
    """float [-1, 1] -> int16, rounded, clipped at full scale."""
    return np.clip(np.rint(x * FULL_SCALE), -FULL_SCALE, FULL_SCALE - 1).astype(np.int16)
