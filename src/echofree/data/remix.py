"""`data=remix`: a device's own echoes, mixed with clean speech into clips whose near end is known.

The echoes come from stretches in which only the far end is heard (`python -m echofree.adapt` finds them), with all that
the device, its room and its clock do to them; speech and rooms of the near end are those of `data=synthetic`.

Legend: T samples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from echofree import audio
from echofree.contracts import Clip, Scenario
from echofree.data import device
from echofree.data.level import ratio_gain
from echofree.data.rir import BankConfig, load_bank
from echofree.data.room import RoomPool
from echofree.data.speech import SpeechPool
from echofree.errors import ConfigError, DataError

SPLITS = ("train", "valid", "test")
KINDS = (Scenario.DOUBLE_TALK, Scenario.FAR_END, Scenario.NEAR_END)
STREAM = 0x4E3
LEAD_S = 0.010  # of the far end before its echo, as far as the delay is known
PEAK = 0.99


@dataclass(frozen=True)
class Stretch:
    """Echo alone in a recording.

    Attributes:
        mic, far: files.
        start_s, stop_s: in the microphone's file.
        delay_s: of the echo behind the far end, 0 when unknown.
        split: train or valid.
    """

    mic: str
    far: str
    start_s: float
    stop_s: float
    delay_s: float = 0.0
    split: str = "train"


def write_stretches(path: Path, found: Sequence[Stretch]) -> None:
    """The file that `data.stretches` names."""
    path.write_text(json.dumps([asdict(s) for s in found], indent=1) + "\n", encoding="utf-8")


def read_stretches(path: str | None) -> list[Stretch]:
    """
    Raises:
        DataError: no such file, or another one.
    """
    if not path:
        raise DataError("data.stretches isn't given. Type: data.stretches=<the stretches.json of echofree.adapt>")
    try:
        return [Stretch(**row) for row in json.loads(Path(path).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"data.stretches={path}: can't be read as a list of stretches ({error})") from error


class Remix:
    """A source of remixed clips (a `DataSource`).

    Args:
        stretches: the JSON file with the echoes, see `Stretch`.
        sample_rate: Hz.
        segment_s: of a clip.
        num_train, num_valid: clips of an epoch; those for validation never change and hear other stretches.
        share: of double talk, far end alone, near end alone.
        ser_db: near end to echo.
        speech_root: clean speech; None: the embedded readings.
        num_rooms: of the bank from which the near end's rooms come.
        channel: of files with several: mean, first, or an index from 0.
        seed: of the clips.

    Raises:
        ConfigError: numbers that can't be.
        DataError: no stretches.
    """

    def __init__(
        self,
        stretches: str | None = None,
        sample_rate: int = 16000,
        segment_s: float = 4.0,
        num_train: int = 400,
        num_valid: int = 32,
        share: Sequence[float] = (0.6, 0.3, 0.1),
        ser_db: Sequence[float] = (-15.0, 10.0),
        speech_root: str | None = None,
        num_rooms: int = 96,
        channel: str | int = "first",
        seed: int = 0,
    ):
        if len(share) != 3 or min(share) < 0 or sum(share) <= 0:
            raise ConfigError(f"data.share={list(share)}: give three shares: double talk, far end, near end")
        if len(ser_db) != 2 or ser_db[0] > ser_db[1]:
            raise ConfigError(f"data.ser_db={list(ser_db)}: give [lowest, highest]")
        if segment_s < 0.5 or min(num_train, num_valid) < 0:
            raise ConfigError(f"data.segment_s={segment_s}, data.num_train={num_train}: give 0.5 or more, 0 or more")
        self.stretches, self.sample_rate, self.segment_s = read_stretches(stretches), sample_rate, segment_s
        self.counts = {"train": num_train, "valid": num_valid, "test": 0}
        self.share = np.asarray(share, np.float64) / sum(share)
        self.ser_db = (float(ser_db[0]), float(ser_db[1]))
        self.speech_root, self.num_rooms, self.channel, self.seed = speech_root, num_rooms, channel, seed
        if not self.stretches:
            raise DataError(f"data.stretches={stretches}: holds no stretch")

    def split(self, name: str) -> RemixClips | None:
        """train or valid; None where there are no stretches or no clips."""
        chosen = [s for s in self.stretches if s.split == name]
        return RemixClips(self, name, chosen) if chosen and self.counts[name] else None

    def fingerprint(self) -> str:
        """A hash over the settings and the stretches, with the sizes of their files."""
        sizes = [Path(p).stat().st_size for s in self.stretches for p in (s.mic, s.far)]
        more = (self.sample_rate, self.segment_s, self.counts, self.share.tolist(), self.ser_db, self.speech_root)
        body = repr((self.stretches, sizes, more, self.num_rooms, self.channel, self.seed))
        return hashlib.sha256(body.encode()).hexdigest()[:16]

    def survey(self) -> list[tuple[str, str]]:
        rows = []
        for name in SPLITS[:2]:
            chosen = [s for s in self.stretches if s.split == name]
            seconds = sum(s.stop_s - s.start_s for s in chosen)
            files = len({s.mic for s in chosen})
            rows.append((f"{name} echoes", f"{len(chosen)} stretches of {files} recordings, {seconds:.0f} s"))
            rows.append((f"{name} clips", f"{self.counts[name]} x {self.segment_s:g} s"))
        return [*rows, ("speech", self.speech_root or "embedded readings")]


class RemixClips:
    """One split of `Remix`: an item depends on (seed, split, epoch, index) alone."""

    def __init__(self, source: Remix, name: str, chosen: Sequence[Stretch]):
        self.source, self.name, self.chosen, self.sample_rate = source, name, list(chosen), source.sample_rate
        self.longest_samples = round(source.segment_s * source.sample_rate)
        self.speech = SpeechPool(name, self.sample_rate, source.speech_root)
        bank = load_bank(BankConfig(num_rooms=source.num_rooms, sample_rate=self.sample_rate))
        self.rooms = RoomPool(name, bank, self.sample_rate)
        self._waves: list[tuple[np.ndarray, np.ndarray]] | None = None

    def __len__(self) -> int:
        return self.source.counts[self.name]

    def item(self, index: int, epoch: int) -> Clip:
        if not 0 <= index < len(self):
            raise IndexError(f"clip {index} of {len(self)}")
        epoch = epoch if self.name == "train" else 0
        rng = np.random.default_rng([self.source.seed, STREAM, SPLITS.index(self.name), epoch, index])
        kind = KINDS[int(rng.choice(3, p=self.source.share))]
        echo, far = self._echo(rng)
        near = np.zeros_like(echo)
        if kind != Scenario.FAR_END:
            near = self._near(rng, len(echo))
            near = near / ratio_gain(near, echo, float(rng.uniform(*self.source.ser_db)), self.sample_rate)
        if kind == Scenario.NEAR_END:
            echo, far = np.zeros_like(echo), np.zeros_like(far)
        mic = near + echo
        scale = np.float32(min(1.0, PEAK / max(float(np.abs(mic).max()), 1e-9)))
        near, echo = near * scale, echo * scale
        name = f"{self.name}/epoch {epoch}/remix {index}"
        return Clip(near + echo, far, near, echo, np.zeros_like(echo), kind, -1, name, index)

    def _near(self, rng: np.random.Generator, num_samples: int) -> np.ndarray:
        talker = self.speech.talkers[int(rng.choice(len(self.speech.talkers), p=self.speech.share))]
        dry = self.speech.talk(rng, talker, num_samples, (0.15, 1.0))
        return device.convolve(dry, self.rooms.draw(rng).near)[0]

    def _echo(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Stretches one behind the other from a random place on -> (mic, far) [T]."""
        waves = self._loaded()
        lengths = np.array([len(mic) for mic, _ in waves])
        at = int(rng.integers(lengths.sum()))
        number = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
        start = at - int(lengths[:number].sum())
        parts, left = [], self.longest_samples
        while left > 0:
            mic, far = waves[number % len(waves)]
            parts.append((mic[start : start + left], far[start : start + left]))
            left, start, number = left - len(parts[-1][0]), 0, number + 1
        return np.concatenate([m for m, _ in parts]), np.concatenate([f for _, f in parts])

    def _loaded(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """All stretches, read once; the far end is moved towards its echo, so that seams fit."""
        if self._waves is None:
            self._waves = [self._read(s) for s in self.chosen]
        return self._waves

    def _read(self, s: Stretch) -> tuple[np.ndarray, np.ndarray]:
        rate, count = self.sample_rate, round((s.stop_s - s.start_s) * self.sample_rate)
        mic = audio.read(Path(s.mic), rate, self.source.channel, s.start_s, s.stop_s)[0]
        lead = round(max(0.0, s.delay_s - LEAD_S) * rate)
        first = round(s.start_s * rate) - lead
        far = audio.read(Path(s.far), rate, self.source.channel, max(first, 0) / rate, s.stop_s)[0]
        far = np.concatenate([np.zeros(max(0, -first), np.float32), far])
        return audio.fit(mic, count), audio.fit(far, count)
