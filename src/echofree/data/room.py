"""The rooms that scenes of one split happen in: computed ones from the bank, or a user's measured responses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echofree.data.rir import NUM_ECHO, NUM_NEAR, RoomBank
from echofree.data.speech import WaveCache, choose_split

TRIM = 3e-4  # -70 dB: what follows the last tap above it costs time and can't be heard
ONSET = 0.3  # share of the peak that counts as the direct path of a measured response


@dataclass(frozen=True)
class RoomDraw:
    """Responses of one room, float32, the direct path's tap about 1.

    Attributes:
        echo, echo_moved: loudspeaker to microphone, before and after a small movement.
        near: talker to microphone.
        direct, near_direct: index of the direct path in `echo` and `near`.
        name: of the room.
    """

    echo: np.ndarray
    echo_moved: np.ndarray
    near: np.ndarray
    direct: int
    near_direct: int
    name: str = ""


class RoomPool:
    """Rooms of one split.

    Args:
        split: train, valid or test.
        bank: computed rooms.
        root: a user's folder of measured responses, wav or flac; None: computed rooms only.
        file_probability: how often measured responses are taken.

    Raises:
        DataError: the folder is missing, holds fewer than 3 files, or none that can be read.
    """

    def __init__(
        self, split: str, bank: RoomBank, sample_rate: int, root: str | None = None, file_probability: float = 0.5
    ):
        self.bank, self.rooms = bank, bank.rooms(split)
        self.paths, self.left_out = choose_split(root, split, "data.rir_root") if root else ([], [])
        self.file_probability = file_probability if root else 0.0
        self._cache = WaveCache(sample_rate)

    def draw(self, rng: np.random.Generator) -> RoomDraw:
        """One room for both paths: its reverberation is common to echo and near end."""
        if rng.random() < self.file_probability:
            return self._measured(rng)
        room = self.rooms[int(rng.integers(len(self.rooms)))]
        first = int(rng.integers(NUM_ECHO))
        near = NUM_ECHO + int(rng.integers(NUM_NEAR))
        taps, direct = self.bank.taps[room], self.bank.direct[room]
        return RoomDraw(
            trim(taps[first]), trim(taps[1 - first]), trim(taps[near]), int(direct[first]), int(direct[near]),
            f"room {room}",
        )  # fmt: skip

    def _measured(self, rng: np.random.Generator) -> RoomDraw:
        """Responses measured in one folder count as one room."""
        path = self.paths[int(rng.integers(len(self.paths)))]
        same = [p for p in self.paths if p.parent == path.parent]
        others = [same[int(rng.integers(len(same)))] for _ in range(2)]
        (echo, direct), (moved, _), (near, near_direct) = (onset(self._cache.wave(p)) for p in (path, *others))
        return RoomDraw(echo, moved, near, direct, near_direct, path.parent.name)


def trim(taps: np.ndarray) -> np.ndarray:
    """Drops the inaudible end: [T] of any float -> float32 [<= T]."""
    taps = taps.astype(np.float32)
    loud = np.flatnonzero(np.abs(taps) > TRIM * float(np.abs(taps).max(initial=0.0)))
    return taps[: loud[-1] + 1] if len(loud) else taps[:1]


def onset(wave: np.ndarray, lead: int = 8) -> tuple[np.ndarray, int]:
    """Cuts the travel time off a measured response: -> (float32 with peak 1, index of the direct path <= lead)."""
    peak = float(np.abs(wave).max(initial=0.0))
    if peak < 1e-9:
        return np.ones(1, dtype=np.float32), 0
    first = int(np.argmax(np.abs(wave) > ONSET * peak))
    start = max(0, first - lead)
    return trim(wave[start:] / np.float32(peak)), first - start
