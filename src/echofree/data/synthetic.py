"""`data=synthetic`: an endless training set and fixed validation and test sets, made on the fly."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from echofree.contracts import Clip
from echofree.data.rir import BankConfig, load_bank
from echofree.data.scene import SceneConfig, SceneMaker
from echofree.data.speech import SpeechPool
from echofree.errors import ConfigError

SPLITS = ("train", "valid", "test")


class Scenes:
    """One split of `Synthetic`: `item` depends on (seed, split, epoch, index) alone."""

    def __init__(self, maker: SceneMaker, seed: int, split: str, count: int, segment_s: float):
        self.maker, self.seed, self.split_name, self.count = maker, seed, split, count
        self.sample_rate = maker.sample_rate
        self.num_samples = round(segment_s * maker.sample_rate)

    def __len__(self) -> int:
        return self.count

    def item(self, index: int, epoch: int) -> Clip:
        """Scene `index` of an epoch; validation and test scenes are the same in every epoch."""
        if not 0 <= index < self.count:
            raise IndexError(f"scene {index} of {self.count}")
        epoch = epoch if self.split_name == "train" else 0
        sequence = np.random.SeedSequence((self.seed, SPLITS.index(self.split_name), epoch, index))
        seed = int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))
        name = (
            f"{self.split_name}/epoch {epoch}/clip {index}"
            if self.split_name == "train"
            else (f"{self.split_name}/clip {index}")
        )
        return self.maker.make(np.random.default_rng(sequence), self.num_samples, name, index, seed)


class Synthetic:
    """A source of synthetic scenes."""

    def __init__(
        self,
        seed: int = 0,
        sample_rate: int = 16000,
        segment_s: float = 4.0,
        test_segment_s: float = 8.0,
        num_train: int = 2000,
        num_valid: int = 64,
        num_test: int = 64,
        speech_root: str | None = None,
        scene: Mapping[str, Any] | None = None,
    ):
        known = {f.name for f in fields(SceneConfig)}
        problems = [f"data.scene.{key}: unknown" for key in (scene or {}) if key not in known]
        if problems:
            raise ConfigError(problems)
        self.config = SceneConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in (scene or {}).items()})
        self.seed, self.sample_rate = seed, sample_rate
        self.counts = {"train": num_train, "valid": num_valid, "test": num_test}
        self.seconds = {"train": segment_s, "valid": segment_s, "test": test_segment_s}
        self.speech_root = speech_root
        self.bank = load_bank(BankConfig(sample_rate=sample_rate))

    def split(self, name: str) -> Scenes | None:
        if not self.counts[name]:
            return None
        maker = SceneMaker(
            self.config, self.sample_rate, name, SpeechPool(name, self.sample_rate, self.speech_root), self.bank
        )
        return Scenes(maker, self.seed, name, self.counts[name], self.seconds[name])

    def fingerprint(self) -> str:
        text = repr((self.seed, self.sample_rate, self.counts, self.seconds, self.speech_root, self.config))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def survey(self) -> list[tuple[str, str]]:
        return [(name, f"{n} scenes of {self.seconds[name]:g} s") for name, n in self.counts.items() if n]
