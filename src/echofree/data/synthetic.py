"""`data=synthetic`: an endless training set, and fixed validation and test sets, made on the fly.

Speech files and rooms of the three splits are disjoint. Nothing is read before `split` is asked for.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from echofree.contracts import Clip
from echofree.data.noise import NoisePool
from echofree.data.recipe import SCENARIOS, Recipe, SceneConfig, draw
from echofree.data.rir import BankConfig, RoomBank, load_bank
from echofree.data.room import RoomPool
from echofree.data.scene import SceneMaker, Sources
from echofree.data.speech import EMBEDDED, SPEAKER_PATTERN, SpeechPool, list_audio
from echofree.errors import ConfigError

SPLITS = ("train", "valid", "test")
MAX_SHOWN = 10  # files left out that the survey names
VERSION = 1  # of the generator: raise it when equal settings make other scenes


class Scenes:
    """One split of `Synthetic`: `item` depends on (seed, split, epoch, index) alone.

    Args:
        maker: renders scenes from the split's own speech and rooms.
        seed: of the run.
        name: train, valid or test.
        count: scenes of an epoch.
        segment_s: seconds of a scene.
    """

    def __init__(self, maker: SceneMaker, seed: int, name: str, count: int, segment_s: float):
        self.maker, self.seed, self.name, self.count = maker, seed, name, count
        self.sample_rate = maker.sample_rate
        self.num_samples = self.longest_samples = round(segment_s * maker.sample_rate)

    def __len__(self) -> int:
        return self.count

    def item(self, index: int, epoch: int) -> Clip:
        """Scene `index` of an epoch; validation and test scenes are the same in every epoch."""
        rng, seed = self._rng(index, epoch)
        when = f"epoch {epoch}/" if self.name == "train" else ""
        return self.maker.make(rng, self.num_samples, f"{self.name}/{when}clip {index}", index, seed)

    def recipe(self, index: int, epoch: int) -> Recipe:
        """The numbers from which `item` makes the scene."""
        return draw(self.maker.config, self._rng(index, epoch)[0], self.maker.sources.speech.embedded)

    def domain(self, index: int) -> dict[str, Any]:
        """What sets scene `index` of epoch 0 apart, told without making it: speaker (of the near end, else of the far
        end), room, device (how the loudspeaker distorts), scenario, ser (dB, NaN without both)."""
        rng, _ = self._rng(index, 0)
        recipe = draw(self.maker.config, rng, self.maker.sources.speech.embedded)
        room, (far, near) = self.maker.sources.rooms.draw(rng), self.maker._two_talkers(rng)
        talkers = self.maker.sources.speech.talkers
        return {
            "speaker": talkers[near if recipe.near_active else far].name,
            "room": room.name,
            "device": recipe.distortion or "linear",
            "scenario": recipe.scenario.name.lower(),
            "ser": recipe.ser_db if recipe.near_active and recipe.has_echo else math.nan,
        }

    def seconds(self, index: int) -> float:
        return self.num_samples / self.sample_rate

    def _rng(self, index: int, epoch: int) -> tuple[np.random.Generator, int]:
        if not 0 <= index < self.count:
            raise IndexError(f"scene {index} of {self.count}")
        epoch = epoch if self.name == "train" else 0
        sequence = np.random.SeedSequence((self.seed, SPLITS.index(self.name), epoch, index))
        return np.random.default_rng(sequence), int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


class Synthetic:
    """A source of synthetic scenes (a `DataSource`).

    Args:
        seed: of the scenes; 0 is a seed like any other.
        sample_rate: Hz.
        segment_s: seconds of training and validation scenes.
        test_segment_s: seconds of test scenes, longer so that filters converge.
        num_train, num_valid, num_test: scenes of each split; 0: no such split.
        num_rooms: rooms in the bank for training; valid and test have an eighth of that each besides.
        speech_root: a folder of clean speech; None: the embedded readings.
        speaker_pattern: regular expression; what it matches at the start of a file's stem is the speaker.
        noise_root, noise_file_probability: a folder of noise, and how often it's used rather than built-in noise.
        rir_root, rir_file_probability: a folder of measured room responses, and how often one of them is used.
        scene: changes to `SceneConfig`.

    Raises:
        ConfigError: numbers that can't be, unknown keys in `scene`.
        DataError: a folder that is missing or too small (by `split`).
    """

    def __init__(
        self,
        seed: int = 0,
        sample_rate: int = 16000,
        segment_s: float = 4.0,
        test_segment_s: float = 8.0,
        num_train: int = 1600,
        num_valid: int = 64,
        num_test: int = 64,
        num_rooms: int = 96,
        speech_root: str | None = None,
        speaker_pattern: str = SPEAKER_PATTERN,
        noise_root: str | None = None,
        noise_file_probability: float = 0.7,
        rir_root: str | None = None,
        rir_file_probability: float = 0.5,
        scene: Mapping[str, Any] | None = None,
    ):
        self.seed, self.sample_rate = seed, sample_rate
        self.counts = {"train": num_train, "valid": num_valid, "test": num_test}
        self.seconds = {"train": segment_s, "valid": segment_s, "test": test_segment_s}
        self.num_rooms = num_rooms
        self.speech_root, self.speaker_pattern = speech_root, speaker_pattern
        self.noise_root, self.noise_file_probability = noise_root, noise_file_probability
        self.rir_root, self.rir_file_probability = rir_root, rir_file_probability
        self._check()
        self.config = SceneConfig.build(scene or {})
        self._bank: RoomBank | None = None
        self._sources: dict[str, Sources] = {}

    def split(self, name: str) -> Scenes | None:
        """Scenes of train, valid or test, or None when their number is 0."""
        if self.counts[name] == 0:
            return None
        maker = SceneMaker(self.config, self._find(name), self.sample_rate)
        return Scenes(maker, self.seed, name, self.counts[name], self.seconds[name])

    def _find(self, name: str) -> Sources:
        """Looks for a split's sources once."""
        if name not in self._sources:
            if self._bank is None:
                self._bank = load_bank(BankConfig(num_rooms=self.num_rooms, sample_rate=self.sample_rate))
            rate = self.sample_rate
            speech = SpeechPool(name, rate, self.speech_root, self.speaker_pattern)
            noise = NoisePool(name, rate, speech, self.noise_root, self.noise_file_probability)
            rooms = RoomPool(name, self._bank, rate, self.rir_root, self.rir_file_probability)
            self._sources[name] = Sources(speech, noise, rooms)
        return self._sources[name]

    def fingerprint(self) -> str:
        """A hash over all settings, and the names and sizes of all source files."""
        roots = [(key, root) for key, root in self._roots() if root]
        files = [(str(p.relative_to(root)), p.stat().st_size) for key, root in roots for p in list_audio(root, key)]
        settings = (VERSION, self.seed, self.sample_rate, self.counts, self.seconds, self.num_rooms, self.config)
        more = (self.speaker_pattern, self.noise_file_probability, self.rir_file_probability)
        return hashlib.sha256(repr((settings, more, files)).encode()).hexdigest()[:16]

    def survey(self) -> list[tuple[str, str]]:
        """Rows of (what, value) for the table before training."""
        rows = [
            (f"{name} scenes", f"{count} x {self.seconds[name]:g} s = {count * self.seconds[name] / 3600:.2f} h")
            for name, count in self.counts.items()
            if count
        ]
        share = np.asarray(self.config.scenario_probability) / sum(self.config.scenario_probability)
        rows.append(("scenarios", ", ".join(f"{n} {100 * s:.0f} %" for n, s in zip(SCENARIOS, share))))
        rows.append(("rate", f"{self.sample_rate} Hz"))
        speech = "embedded readings" if self.speech_root is None else self.speech_root
        counts = [
            f"{name} {sum(len(t.paths) for t in pool.talkers)} files of {len(pool.talkers)} speakers"
            for name in SPLITS
            if self.counts[name]
            for pool in [self._find(name).speech]
        ]
        rows.append(("speech", f"{speech}: {', '.join(counts)}"))
        for key, root in self._roots()[1:]:
            rows.append((key.removeprefix("data.").removesuffix("_root"), str(root or "built in")))
        bad = [item for s in self._sources.values() for p in (s.speech, s.noise, s.rooms) for item in p.left_out]
        return (
            rows
            + [("left out", f"{name}: {why}") for name, why in bad[:MAX_SHOWN]]
            + ([("left out", f"and {len(bad) - MAX_SHOWN} more files")] if len(bad) > MAX_SHOWN else [])
        )

    def _roots(self) -> list[tuple[str, str | Path | None]]:
        return [
            ("data.speech_root", self.speech_root or EMBEDDED),
            ("data.noise_root", self.noise_root),
            ("data.rir_root", self.rir_root),
        ]

    def _check(self) -> None:
        problems = [
            f"data.num_{name}={count}: give a number of scenes, 0 for none."
            for name, count in self.counts.items()
            if count < 0
        ]
        for key, value in (
            ("segment_s", self.seconds["train"]),
            ("test_segment_s", self.seconds["test"]),
            ("num_rooms", self.num_rooms),
            ("sample_rate", self.sample_rate),
        ):
            low, high = {"num_rooms": (1, 10000), "sample_rate": (8000, 48000)}.get(key, (0.5, 600.0))
            if not low <= value <= high:
                problems.append(f"data.{key}={value}: give a number from {low:g} to {high:g}.")
        if self.seed < 0:
            problems.append(f"data.seed={self.seed}: give a number of at least 0.")
        for key, value in (
            ("noise_file_probability", self.noise_file_probability),
            ("rir_file_probability", self.rir_file_probability),
        ):
            if not 0 <= value <= 1:
                problems.append(f"data.{key}={value}: give a probability from 0 to 1.")
        if problems:
            raise ConfigError(problems)
