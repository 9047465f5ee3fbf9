"""Where talkers come from: the embedded readings or a user's folder, split so that no file is in two splits.

A talker speaks by `SpeechPool.talk`: utterances of one speaker, one after another with pauses. How the few embedded
voices become many is in `voice.py`.

Legend: T samples.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from echofree import audio
from echofree.data.device import fast_length
from echofree.errors import DataError

EMBEDDED = Path(__file__).parent / "embedded"
# Held-out readings of the embedded set; each split has at least two speakers.
EMBEDDED_SPLIT = {
    "valid": ("austen-0880", "cards-002"),
    "test": ("austen-0930", "cards-003", "numbers-002"),
}
SPEAKER_PATTERN = r"^[^-]+(?=-)"
HELD_OUT_SHARE = 0.06  # of the speakers (or files), for validation and again for test
CACHE_SAMPLES = 120_000_000  # kept in one process as 16 bit: two hours at 16 kHz, 240 MB
HIGH_PASS_HZ = 50.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Talker:
    """One speaker.

    Attributes:
        name: the speaker as the file names tell, or the file's own stem.
        paths: recordings of this speaker.
    """

    name: str
    paths: tuple[Path, ...]


class WaveCache:
    """Decoded files of one process, the longest unused dropped first. Each file is read when it's first needed.

    Args:
        sample_rate: Hz to which everything is resampled.
        speech: remove rumble and bring the active level to -26 dBFS.
    """

    def __init__(self, sample_rate: int, speech: bool = False):
        self.sample_rate, self.speech = sample_rate, speech
        self._waves: OrderedDict[Path, tuple[np.ndarray, np.float32]] = OrderedDict()  # 16 bit, step
        self._num_samples = 0

    def wave(self, path: Path) -> np.ndarray:
        """float32 [T]; several channels are averaged. Rounded to 16 bit of its own peak.

        A file that turns out to be damaged is said in the log and gives 0.1 s of silence: an epoch doesn't end because
        of one file.
        """
        if path in self._waves:
            self._waves.move_to_end(path)
            steps, step = self._waves[path]
            return steps * step
        try:
            wave, _ = audio.read(path, self.sample_rate)
        except DataError as error:
            log.warning("silence in place of a file: %s", error)
            wave = np.zeros(self.sample_rate // 10, dtype=np.float32)
        if self.speech:
            wave = level(high_pass(wave, self.sample_rate), self.sample_rate)
        step = np.float32(max(float(np.abs(wave).max(initial=0.0)), 1e-9) / 32767)
        steps = np.round(wave / step).astype(np.int16)
        self._waves[path] = steps, step
        self._num_samples += len(wave)
        while self._num_samples > CACHE_SAMPLES and len(self._waves) > 1:
            self._num_samples -= len(self._waves.popitem(last=False)[1][0])
        return steps * step


class SpeechPool:
    """Clean speech of one split.

    Args:
        split: train, valid or test.
        sample_rate: Hz to which everything is resampled.
        root: a user's folder, searched recursively; None for the embedded readings.
        speaker_pattern: a regular expression; what it matches at the start of a stem is the speaker.

    Attributes:
        talkers: speakers of the split, at least two.
        left_out: (file, why) of a user's files that can't be read.
        share: [talkers] float64, how often each is to be drawn.

    Raises:
        DataError: no such folder, or too little in it to make three splits.
    """

    def __init__(
        self, split: str, sample_rate: int, root: str | Path | None = None, speaker_pattern: str = SPEAKER_PATTERN
    ):
        self.split, self.sample_rate = split, sample_rate
        self.embedded = root is None
        if root is None:
            paths = [p for p in sorted(EMBEDDED.glob("*.flac")) if _embedded_split(p) == split]
            self.talkers = group_by_speaker(paths, speaker_pattern)
        else:
            everyone = group_by_speaker(list_audio(root, "data.speech_root"), speaker_pattern)
            self.talkers = _share_out(everyone, split, root)
        self.left_out: list[tuple[str, str]] = []
        if root is not None:
            self._leave_out_unreadable(root)
        # A speaker with many recordings comes more often, but doesn't crowd out the others.
        weight = np.sqrt([float(len(t.paths)) for t in self.talkers])
        self.share = weight / weight.sum()
        self._cache = WaveCache(sample_rate, speech=True)

    def _leave_out_unreadable(self, root: str | Path) -> None:
        good, self.left_out = readable([p for t in self.talkers for p in t.paths])
        kept = [Talker(t.name, tuple(p for p in t.paths if p in good)) for t in self.talkers]
        self.talkers = [t for t in kept if t.paths]
        if len(self.talkers) < 2:
            name, why = self.left_out[0]
            raise DataError(
                f"data.speech_root={root}: fewer than two speakers can be read for {self.split}; {name}: {why}"
            )

    def wave(self, path: Path) -> np.ndarray:
        """float32 [T] of one file, without rumble below 50 Hz, at an active level of -26 dBFS."""
        return self._cache.wave(path)

    def talk(
        self, rng: np.random.Generator, talker: Talker, num_samples: int, pause_s: tuple[float, float]
    ) -> np.ndarray:
        """Utterances of one speaker in a row -> float32 [num_samples].

        Args:
            pause_s: shortest and longest pause between two utterances.
        """
        out = np.zeros(num_samples, dtype=np.float32)
        # Starting before 0 lets a clip begin in the middle of a sentence.
        at = round(rng.uniform(-1.5, 0.8) * self.sample_rate)
        while at < num_samples:
            wave = self.wave(talker.paths[rng.integers(len(talker.paths))])
            if len(wave) > 2 * num_samples:  # a long reading: any stretch of it
                start = int(rng.integers(len(wave) - num_samples))
                wave = wave[start : start + num_samples]
            first, last = max(at, 0), min(at + len(wave), num_samples)
            if last > first:
                out[first:last] = wave[first - at : last - at]
            at += max(1, len(wave)) + round(rng.uniform(*pause_s) * self.sample_rate)
        return out


def list_audio(root: str | Path, key: str) -> list[Path]:
    """Audio files below a folder, sorted by their path.

    Raises:
        DataError: naming `key` when the folder is missing or holds no audio.
    """
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise DataError(f"{key}={root}: no such folder. Give a folder with {', '.join(audio.EXTENSIONS[:2])} files.")
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in audio.EXTENSIONS and p.is_file())
    if not paths:
        raise DataError(f"{key}={root}: no audio files ({', '.join(audio.EXTENSIONS)}) in this folder or below it.")
    return paths


def readable(paths: Sequence[Path]) -> tuple[set[Path], list[tuple[str, str]]]:
    """Looks at all headers -> (files that are audio, (name, why) of the others: LFS pointers, truncated, empty)."""

    def problem(path: Path) -> str:
        try:
            audio.info(path)
        except DataError as error:
            return str(error).removeprefix(f"{path}: ")
        return ""

    with ThreadPoolExecutor(8) as pool:
        problems = list(pool.map(problem, paths))
    good = {path for path, text in zip(paths, problems) if not text}
    return good, [(path.name, text) for path, text in zip(paths, problems) if text]


def choose_split(root: str | Path, split: str, key: str) -> tuple[list[Path], list[tuple[str, str]]]:
    """Files of one split from a user's folder: an eighth each, at least one, for valid and test, by a hash of the
    path's last two parts.

    Returns:
        (readable files, (name, why) of the others).

    Raises:
        DataError: naming `key` when there are fewer than 3 files, or none of the split's can be read.
    """
    paths = list_audio(root, key)
    if len(paths) < 3:
        raise DataError(
            f"{key}={root}: {len(paths)} files; at least 3 are needed, one each for training, validation and test."
        )
    order = sorted(paths, key=lambda p: stable_order("/".join(p.parts[-2:])))
    held = max(1, len(order) // 8)
    chosen = sorted({"valid": order[:held], "test": order[held : 2 * held], "train": order[2 * held :]}[split])
    good, left_out = readable(chosen)
    if not good:
        raise DataError(f"{key}={root}: no file for {split} can be read; {left_out[0][0]}: {left_out[0][1]}")
    return sorted(good), left_out


def group_by_speaker(paths: Sequence[Path], pattern: str) -> list[Talker]:
    """Files -> talkers, sorted by name."""
    groups: dict[str, list[Path]] = {}
    for path in paths:
        match = re.match(pattern, path.stem)
        groups.setdefault(match.group(0) if match else path.stem, []).append(path)
    return [Talker(name, tuple(files)) for name, files in sorted(groups.items())]


def stable_order(name: str) -> str:
    """A key that puts names in an arbitrary order, the same on every machine."""
    return hashlib.sha256(name.encode()).hexdigest()


def high_pass(wave: np.ndarray, rate_hz: int, corner_hz: float = HIGH_PASS_HZ) -> np.ndarray:
    """Removes DC and rumble without phase shift: float32 [T] -> [T]."""
    size = fast_length(len(wave) + rate_hz // 10)
    spectrum = np.fft.rfft(wave, size)
    count = int(1.4 * corner_hz * size / rate_hz) + 1  # bins that change
    freq_hz = np.arange(count) * (rate_hz / size)
    spectrum[:count] *= np.clip((freq_hz - 0.6 * corner_hz) / (0.8 * corner_hz), 0.0, 1.0)
    return np.fft.irfft(spectrum, size)[: len(wave)].astype(np.float32)


def level(wave: np.ndarray, rate_hz: int, target_db: float = -26.0) -> np.ndarray:
    """Scales so that the active frames have `target_db` dBFS; silence stays as it is."""
    frame = max(rate_hz // 50, 1)
    count = len(wave) // frame
    if count == 0:
        return wave
    power = np.square(wave[: count * frame], dtype=np.float64).reshape(count, frame).mean(axis=1)
    active = power > power.max() * 1e-3
    mean = power[active].mean() if active.any() else 0.0
    return wave if mean < 1e-12 else (wave * np.sqrt(10 ** (target_db / 10) / mean)).astype(np.float32)


def _embedded_split(path: Path) -> str:
    return next((split for split, stems in EMBEDDED_SPLIT.items() if path.stem in stems), "train")


def _share_out(talkers: list[Talker], split: str, root: str | Path) -> list[Talker]:
    """Speakers to splits; with few speakers, files to splits."""
    if len(talkers) < 12:
        talkers = [Talker(f"{t.name}/{p.stem}", (p,)) for t in talkers for p in t.paths]
    if len(talkers) < 6:
        raise DataError(
            f"data.speech_root={root}: {len(talkers)} files; at least 6 are needed, two each for training, validation "
            "and test."
        )
    order = sorted(talkers, key=lambda t: stable_order(t.name))
    held = max(2, round(HELD_OUT_SHARE * len(order)))
    parts = {"valid": order[:held], "test": order[held : 2 * held], "train": order[2 * held :]}
    return sorted(parts[split], key=lambda t: t.name)
