"""What `cancel` runs: an exported artifact or a torch model, both as a stream; and raw sound from stdin to stdout.

Legend: n samples of a chunk.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import numpy as np

from echofree.errors import ConfigError, DataError

if TYPE_CHECKING:
    import torch

FORMATS: dict[str, np.dtype[Any]] = {"s16": np.dtype("<i2"), "f32": np.dtype("<f4")}
READ_BYTES = 1 << 16


class Live(Protocol):
    """A stream: `echofree.runtime.Canceller`, or `TorchLive`."""

    sample_rate: int
    latency_samples: int

    def process(self, mic: np.ndarray, far: np.ndarray) -> np.ndarray:
        """[n], [n] -> [n], late by latency_samples."""

    def flush(self) -> np.ndarray:
        """[latency_samples]: what is still owed."""

    def flags(self) -> dict[str, Any]:
        """What the linear front end found, if there is one."""


class TorchLive:
    """A model of this process as a stream, on one thread: the steps of one stream are too small to share, and on a busy
    machine a second thread costs ten times.

    Args:
        model: in evaluation mode.
    """

    def __init__(self, model: Any):
        from echofree.model.streaming import Stream

        self.model, self.stream = model, Stream(model)
        self.sample_rate, self.latency_samples = int(model.sample_rate), int(model.latency_samples)

    def process(self, mic: np.ndarray, far: np.ndarray) -> np.ndarray:
        return self._alone(lambda: self.stream.process(_floats(mic), _floats(far)))

    def flush(self) -> np.ndarray:
        return self._alone(lambda: np.asarray(self.stream.flush().cpu())[0])

    def flags(self) -> dict[str, Any]:
        from echofree.model.chain import FRONT_END
        from echofree.model.frontend import FrontEnd

        front = next((m for m in self.model.modules() if isinstance(m, FrontEnd)), None)
        if front is None:
            return {}
        state = {name.removeprefix(FRONT_END): value for name, value in self.stream.state.items()}
        return {name: value[0].item() for name, value in front.flags(state).items()}

    @staticmethod
    def _alone(work: Callable[[], Any]) -> np.ndarray:
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return np.asarray(work(), np.float32)
        finally:
            torch.set_num_threads(threads)


def _floats(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) / 32768 if x.dtype == np.int16 else x


def is_artifact(name: str) -> bool:
    """Whether a path is what `python -m echofree.export` writes: the folder, or the graph in it."""
    path = Path(name)
    return path.is_file() or (path / "contract.json").is_file()


def as_live(model: torch.nn.Module | Live) -> Live:
    """A stream of whatever `model=` named."""
    return model if hasattr(model, "process") else TorchLive(model)  # type: ignore[return-value]


def pipe(live: Live, form: str, source: IO[bytes] | None = None, sink: IO[bytes] | None = None) -> int:
    """Cancels raw sound as it comes until it ends: interleaved (mic, far) in, one channel out, as many samples, late by
    the latency; what is owed then follows.

    Args:
        live: fresh.
        form: s16 or f32, little endian, of input and output.
        source, sink: stdin and stdout when not given.

    Returns:
        Samples read.

    Raises:
        DataError: half a sample at the end, NaN or infinite samples.
    """
    source, sink = source or sys.stdin.buffer, sink or sys.stdout.buffer
    kind, rest, count = FORMATS[form], b"", 0
    read: Callable[[int], bytes] = getattr(source, "read1", source.read)  # what is there, without waiting for more
    size = 2 * kind.itemsize
    while chunk := read(READ_BYTES):
        data = rest + chunk
        whole = len(data) // size * size
        data, rest = data[:whole], data[whole:]
        pair = np.frombuffer(data, kind).reshape(-1, 2)
        if not np.isfinite(pair).all():
            bad = int(np.flatnonzero(~np.isfinite(pair).all(axis=1))[0])
            raise DataError(f"sample {count + bad} of the input is NaN or infinite: is it really format={form}?")
        sink.write(_bytes(live.process(np.ascontiguousarray(pair[:, 0]), np.ascontiguousarray(pair[:, 1])), kind))
        sink.flush()
        count += len(pair)
    if rest:
        raise DataError(
            f"the input ended in the middle of a sample: two channels (mic, far) of {form} were expected, {size} bytes "
            "a sample. With sox: -t raw -e signed -b 16 -c 2"
        )
    sink.write(_bytes(live.flush(), kind))
    sink.flush()
    return count


def _bytes(out: np.ndarray, kind: np.dtype[Any]) -> bytes:
    if kind.kind == "i" and out.dtype != np.int16:
        out = np.clip(np.rint(out * 32768.0), -32768, 32767)
    return out.astype(kind).tobytes()


def check_rate(live: Live, given: str | None) -> None:
    """Raw sound carries no rate: what the user says of it must be the model's.

    Raises:
        ConfigError: it isn't.
    """
    if given is not None and given != str(live.sample_rate):
        raise ConfigError(
            f"rate={given}: this model runs at {live.sample_rate} Hz, and a stream isn't resampled here. Let the "
            f"program before do it (sox: -r {live.sample_rate}, ffmpeg: -ar {live.sample_rate})"
        )
