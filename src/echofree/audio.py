"""Audio files in and out: one place that decides about rates, channels, scales and broken files.

`read` gives mono float32 in [-1, 1] at the rate asked for, or raises `DataError` with the file and what is wrong with
it: missing, empty, truncated, not audio, a git-LFS pointer, NaN, integers stored as floats. `write` never leaves half a
file.

Legend: T samples, C channels.
"""

from __future__ import annotations

import os
import struct
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from echofree.errors import DataError

EXTENSIONS = (".wav", ".flac", ".ogg", ".aiff", ".aif", ".au", ".w64")
LFS_HEAD = b"version https://git-lfs"
MAX_FLOAT_PEAK = 100.0  # a float file beyond this holds integers that nobody divided by 32768
UNKNOWN_SIZE = (0, 0xFFFFFFFF)  # what a program that writes to a pipe puts into the WAV header


@dataclass(frozen=True)
class AudioInfo:
    """What the header of a file says.

    Attributes:
        num_samples: samples of each channel.
        rate_hz: sampling rate.
        channels: number of channels.
        subtype: encoding as libsndfile names it: PCM_16, PCM_24, FLOAT, ...
    """

    num_samples: int
    rate_hz: int
    channels: int
    subtype: str

    @property
    def duration_s(self) -> float:
        return self.num_samples / self.rate_hz


def info(path: str | os.PathLike[str]) -> AudioInfo:
    """Reads the header only.

    Raises:
        DataError: missing, empty, truncated (WAV), a git-LFS pointer, or not audio.
    """
    import soundfile as sf

    path = Path(path)
    _check_file(path)
    try:
        header = sf.info(str(path))
    except sf.LibsndfileError as error:
        raise DataError(f"{path}: can't be read as audio ({error.error_string}). Convert it to wav or flac.") from error
    if header.frames <= 0:
        raise DataError(f"{path}: holds no samples.")
    return AudioInfo(int(header.frames), int(header.samplerate), int(header.channels), str(header.subtype))


def read(
    path: str | os.PathLike[str],
    rate: int | None = None,
    channel: str | int = "mean",
    start_s: float = 0.0,
    stop_s: float | None = None,
) -> tuple[np.ndarray, int]:
    """Reads one file as mono.

    Args:
        path: any format that libsndfile reads; integers of any width and floats.
        rate: Hz to resample to (soxr, high quality); None keeps the file's own.
        channel: what to do with several channels: "mean", "first", or an index from 0.
        start_s, stop_s: the stretch to read, in seconds of the file; None reads to the end.

    Returns:
        (float32 [T] in [-1, 1], the file's own rate in Hz). A float file that exceeds 1 a little is given as it is.

    Raises:
        DataError: see the module's head; also a channel that the file doesn't have.
    """
    import soundfile as sf

    path = Path(path)
    header = info(path)
    first = round(start_s * header.rate_hz)
    last = header.num_samples if stop_s is None else min(header.num_samples, round(stop_s * header.rate_hz))
    if not 0 <= first < last:
        raise DataError(f"{path}: asked for {start_s} s to {stop_s} s of {header.duration_s:.3f} s.")
    try:
        wave, _ = sf.read(str(path), start=first, frames=last - first, dtype="float32", always_2d=True)  # [T, C]
    except sf.LibsndfileError as error:
        raise DataError(f"{path}: damaged or truncated ({error.error_string}).") from error
    if len(wave) < last - first:
        raise DataError(f"{path}: truncated: the header promises {last - first} samples, {len(wave)} are there.")
    mono = pick_channel(wave, channel, path)  # [T]
    _check_samples(mono, path)
    return (mono if rate is None else resample(mono, header.rate_hz, rate)), header.rate_hz


def pick_channel(wave: np.ndarray, channel: str | int, path: str | os.PathLike[str] = "") -> np.ndarray:
    """float32 [T, C] -> [T] by the stated policy: "mean", "first", or an index from 0."""
    count = wave.shape[1]
    if channel == "mean":
        return wave[:, 0] if count == 1 else wave.mean(axis=1, dtype=np.float32)
    index = 0 if channel == "first" else channel
    if not isinstance(index, int) or isinstance(index, bool):
        raise DataError(f"channel={channel!r}: give mean, first, or a number from 0.")
    if not 0 <= index < count:
        raise DataError(f"{path}: has {count} channel(s), so channel={index} doesn't exist. Give 0 to {count - 1}.")
    return np.ascontiguousarray(wave[:, index])


def resample(wave: np.ndarray, from_hz: int, to_hz: int) -> np.ndarray:
    """float32 [T] at `from_hz` -> float32 [round(T * to_hz / from_hz)], aligned in time; equal rates: `wave`."""
    if from_hz == to_hz:
        return wave
    import soxr

    length = round(len(wave) * to_hz / from_hz)
    out = soxr.resample(wave, from_hz, to_hz, quality="HQ").astype(np.float32, copy=False)
    return fit(out, length)


def fit(wave: np.ndarray, length: int) -> np.ndarray:
    """[T] -> [length], cut at the end or padded with zeros there."""
    return wave[:length] if len(wave) >= length else np.pad(wave, (0, length - len(wave)))


def writable_subtype(path: str | os.PathLike[str], wanted: str) -> str:
    """`wanted` if the format of `path` (by its ending) can hold it, else the nearest it can: the caller says so.

    Raises:
        DataError: an ending that stands for no format that can be written.
    """
    import soundfile as sf

    name = _format(path)
    if sf.check_format(name, wanted):
        return wanted
    return "PCM_24" if sf.check_format(name, "PCM_24") else str(sf.default_subtype(name))


def write(path: str | os.PathLike[str], wave: np.ndarray, rate: int, subtype: str = "PCM_16") -> int:
    """Writes [T] or [T, C] whole or not at all: into a file beside it, flushed, then renamed over `path`.

    Args:
        path: the ending chooses the format.
        wave: samples in [-1, 1]; what exceeds that is clipped when `subtype` holds integers.
        rate: Hz.
        subtype: as libsndfile names it.

    Returns:
        How many samples were clipped.

    Raises:
        DataError: no such directory, an ending or subtype that can't be written, NaN or infinite samples.
    """
    import soundfile as sf

    path = Path(path)
    if not path.parent.is_dir():
        raise DataError(f"{path}: the directory {path.parent} doesn't exist. Type: mkdir -p {path.parent}")
    if path.is_dir():
        raise DataError(f"{path}: is a directory; give a file name.")
    name = _format(path)
    if not sf.check_format(name, subtype):
        raise DataError(f"{path}: {name} can't hold {subtype}; give one of {', '.join(sf.available_subtypes(name))}.")
    if not np.isfinite(wave).all():
        raise DataError(f"{path}: not written, {np.count_nonzero(~np.isfinite(wave))} samples are NaN or infinite.")
    clipped = 0 if subtype in ("FLOAT", "DOUBLE") else int(np.count_nonzero(np.abs(wave) > 1.0))
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with part.open("wb") as file:
            sf.write(file, np.clip(wave, -1.0, 1.0) if clipped else wave, rate, subtype=subtype, format=name)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise DataError(f"{path}: can't be written ({error.strerror or error}).") from error
    finally:
        part.unlink(missing_ok=True)
    return clipped


def _format(path: str | os.PathLike[str]) -> str:
    import soundfile as sf

    suffix = Path(path).suffix.lstrip(".").upper()
    name = {"AIF": "AIFF"}.get(suffix, suffix)
    if name not in sf.available_formats():
        raise DataError(f"{path}: the ending {Path(path).suffix!r} is no audio format. Give .wav or .flac.")
    return name


def _check_file(path: Path) -> None:
    """Cheap looks at the first bytes that give a better answer than a codec's error."""
    if path.is_dir():
        raise DataError(f"{path}: is a directory; an audio file was expected.")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(4096)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file.") from None
    except OSError as error:
        raise DataError(f"{path}: can't be opened ({error.strerror}).") from error
    if size == 0:
        raise DataError(f"{path}: is empty (0 bytes).")
    if head.startswith(LFS_HEAD):
        raise DataError(f"{path}: is a git-LFS pointer, not audio. Type: git lfs pull")
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        missing = _missing_bytes(head, size)
        if missing > 0:
            raise DataError(f"{path}: truncated: {missing} bytes fewer than its header promises.")


def _missing_bytes(head: bytes, size: int) -> int:
    """Bytes that the data chunk of a WAV promises beyond the end of the file. libsndfile reads such files silently."""
    at = 12
    while at + 8 <= len(head):
        chunk, length = struct.unpack_from("<4sI", head, at)
        if chunk == b"data":
            return 0 if length in UNKNOWN_SIZE else max(0, at + 8 + length - size)
        at += 8 + length + length % 2
    return 0


def _check_samples(wave: np.ndarray, path: Path) -> None:
    peak = float(np.abs(wave).max())  # NaN when any sample is
    if not np.isfinite(peak):
        bad = np.flatnonzero(~np.isfinite(wave))
        raise DataError(f"{path}: {len(bad)} samples are NaN or infinite, the first at sample {bad[0]}.")
    if peak > MAX_FLOAT_PEAK:
        raise DataError(f"{path}: samples reach {peak:.0f}: integers stored as floats. Divide them by 32768.")
