"""Recordings on disk as a dataset: whole, or cut into segments.

Legend: T samples.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from echofree import audio
from echofree.contracts import Clip, Scenario
from echofree.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recording:
    """Files that belong together, or a stretch of them.

    Attributes:
        name: unique in its source, such as "kitchen/0017".
        mic: the microphone.
        far: the far end; None: nothing was played (zeros).
        near: the clean near end at the microphone, aligned with it; None: unknown.
        echo: the echo at the microphone; None: unknown.
        scenario: who talks in the stretch.
        split: train, valid or test; "" before it's decided.
        start_s, end_s: the labelled stretch in seconds of the microphone file; end_s None: to its end.
        near_scale: factor from the near file to the level at the microphone.
        only: FAR_END or NEAR_END: what a double-talk recording with known parts is reduced to.
        silent_near: the near end is known to be silent: the target is zeros.
        duration_s: of the microphone file, once scanned.
        num_samples: of [0, end_s] at the dataset's rate, once scanned.
    """

    name: str
    mic: Path
    far: Path | None = None
    near: Path | None = None
    echo: Path | None = None
    scenario: Scenario = Scenario.UNKNOWN
    split: str = ""
    start_s: float = 0.0
    end_s: float | None = None
    near_scale: float = 1.0
    only: Scenario | None = None
    silent_near: bool = False
    duration_s: float = 0.0

    @property
    def stop_s(self) -> float:
        """The end of the stretch in seconds."""
        return self.duration_s if self.end_s is None else min(self.end_s, self.duration_s)

    @property
    def trainable(self) -> bool:
        """Whether there is a target to train on."""
        return self.near is not None or self.silent_near

    @property
    def paths(self) -> list[Path]:
        return [p for p in (self.mic, self.far, self.near, self.echo) if p is not None]


@dataclass(frozen=True)
class Reading:
    """How files become arrays.

    Attributes:
        sample_rate: Hz to resample to; a file at this rate is passed through unchanged.
        channel: for files with several channels: error, mean, first, or an index from 0; mono files are taken as they
            are.
    """

    sample_rate: int
    channel: str | int = "error"

    def read(self, path: Path, start_s: float = 0.0, stop_s: float | None = None) -> np.ndarray:
        """float32 [T] of one file; shorter than asked when the file ends before `stop_s`.

        Raises:
            DataError: unreadable, or several channels with channel=error.
        """
        header = audio.info(path)
        if self.channel == "error" and header.channels > 1:
            raise DataError(
                f"{path}: has {header.channels} channels. Say which: data.channel=mean, first, or a number from 0."
            )
        if start_s >= header.duration_s:
            return np.zeros(0, dtype=np.float32)
        channel = "first" if self.channel == "error" else self.channel
        if header.channels == 1:
            channel = "first"
        return audio.read(path, self.sample_rate, channel, start_s, stop_s)[0]


def load(recording: Recording, reading: Reading, start_s: float = 0.0, stop_s: float | None = None) -> Clip:
    """A stretch of a recording as a clip, as long as its microphone; other files are padded with zeros or cut to that.

    Raises:
        DataError: a file can't be read.
    """
    r = recording
    mic = reading.read(r.mic, start_s, stop_s)

    def part(path: Path | None) -> np.ndarray | None:
        return None if path is None else audio.fit(reading.read(path, start_s, stop_s), len(mic))

    far = part(r.far)
    far = np.zeros_like(mic) if far is None else far
    near, echo, noise = part(r.near), part(r.echo), None
    if near is not None and r.near_scale != 1.0:
        near = near * np.float32(r.near_scale)
    if near is None and r.silent_near:
        near = np.zeros_like(mic)
    if near is not None and echo is not None:
        if r.only == Scenario.FAR_END:
            mic, near = mic - near, np.zeros_like(mic)
        elif r.only == Scenario.NEAR_END:
            mic, far, echo = mic - echo, np.zeros_like(mic), np.zeros_like(mic)
        noise = mic - near - echo
    if noise is None:
        echo = None  # a batch knows both or neither
    scenario = r.scenario if r.only is None else r.only
    return Clip(mic, far, near, echo, noise, scenario, -1, r.name)


class Recordings:
    """A dataset of recordings. Items don't depend on the epoch.

    Args:
        recordings: scanned ones.
        reading: rate and channels.
        segment_s, hop_s: cut each recording into segments of this length at this distance, the last one ending with
            the recording; None: whole recordings, from their start to the end of the labelled stretch, since a
            canceller should have heard what came before.
    """

    def __init__(
        self,
        recordings: Sequence[Recording],
        reading: Reading,
        segment_s: float | None = None,
        hop_s: float | None = None,
    ):
        self.recordings, self.reading, self.sample_rate = list(recordings), reading, reading.sample_rate
        self.segment_s = segment_s
        self._items: list[tuple[int, float, float]] = []  # recording, start, stop
        for number, recording in enumerate(self.recordings):
            if segment_s is None:
                self._items.append((number, 0.0, recording.stop_s))
            else:
                starts = segment_starts(recording.start_s, recording.stop_s, segment_s, hop_s or segment_s)
                self._items += [(number, s, min(s + segment_s, recording.stop_s)) for s in starts]

    def __len__(self) -> int:
        return len(self._items)

    @property
    def longest_samples(self) -> int:
        """Samples of the longest item, rounded up."""
        return max(int(np.ceil((stop_s - start_s) * self.sample_rate)) for _, start_s, stop_s in self._items)

    def item(self, index: int, epoch: int) -> Clip:
        """Item `index`. A file that became unreadable since the scan gives silence of the same length and a warning:
        an epoch doesn't end because of one file."""
        number, start_s, stop_s = self._items[index]
        recording = self.recordings[number]
        try:
            clip = load(recording, self.reading, start_s, stop_s)
        except DataError as error:
            log.warning("%s: skipped, silence in its place: %s", recording.name, error)
            clip = self._silence(recording, stop_s - start_s)
        name = recording.name if self.segment_s is None else f"{recording.name} at {start_s:.2f} s"
        return replace(clip, name=name, index=index)

    def clip_name(self, index: int) -> str:
        """The name of the recording of item `index`."""
        return self.recordings[self._items[index][0]].name

    def domain(self, index: int) -> dict[str, str]:
        """What the labels say of item `index`; names say more, see `data.domain`."""
        recording = self.recordings[self._items[index][0]]
        return {"scenario": (recording.scenario if recording.only is None else recording.only).name.lower()}

    def seconds(self, index: int) -> float:
        """Length of item `index`."""
        return self._items[index][2] - self._items[index][1]

    def mic_path(self, index: int) -> Path:
        """The microphone file of item `index`: what outputs of other programs are named by."""
        return self.recordings[self._items[index][0]].mic

    def stretch(self, index: int) -> tuple[int, int]:
        """(first, stop) in samples of item `index`: what of the clip its scenario label describes and a score may
        count. The rest is there for a canceller to adapt."""
        number, start_s, stop_s = self._items[index]
        first_s = max(self.recordings[number].start_s - start_s, 0.0)
        return round(first_s * self.sample_rate), round((stop_s - start_s) * self.sample_rate)

    def _silence(self, recording: Recording, seconds: float) -> Clip:
        zeros = np.zeros(max(1, round(seconds * self.sample_rate)), dtype=np.float32)
        near = zeros if recording.trainable else None
        return Clip(zeros, zeros, near, None, None, Scenario.SILENCE, -1, recording.name)


def segment_starts(start_s: float, stop_s: float, segment_s: float, hop_s: float) -> list[float]:
    """Where segments begin so that they cover [start_s, stop_s]; one shorter segment when there isn't enough."""
    spare = stop_s - start_s - segment_s
    if spare <= 1e-6:
        return [start_s]
    count = int(np.floor(spare / hop_s + 1e-9)) + 1
    starts = [start_s + i * hop_s for i in range(count)]
    if stop_s - segment_s - starts[-1] > 1e-3:
        starts.append(stop_s - segment_s)
    return starts
