"""A trained canceller as a teacher: a checkpoint of any size, frame length and rate, or an exported file.

It is found and judged before the run, loaded at its first use, and called without a gradient, in evaluation mode and in
float32 whatever the student's precision: its output for a clip is the same in every run.

Legend: B batch, T samples at the student's rate, L teacher's frames, H teacher's width.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from echofree.errors import CheckpointError, ConfigError
from echofree.resample import resample

KEY = "task.teacher"


@dataclass(frozen=True)
class Facts:
    """What is known of a teacher before it is loaded.

    Attributes:
        path: the checkpoint or exported folder that was found.
        fingerprint: 16 hex digits over its weights and its config: equal ones give equal outputs.
        kind: checkpoint | export.
        sample_rate: Hz.
        hop_samples: of its frames, at its own rate; 0 when its frames can't be seen.
    """

    path: str
    fingerprint: str
    kind: str
    sample_rate: int
    hop_samples: int


class Teacher(Protocol):
    """
    Attributes:
        facts: see `Facts`.
    """

    facts: Facts

    def hear(self, mic: Tensor, far: Tensor, rate_hz: int, latent: bool) -> dict[str, Tensor]:
        """mic, far [B, T] at `rate_hz` -> "est" [B, T] at that rate, aligned with mic; with `latent` also "latent"
        [B, L, H], frame l about the time l hop_samples / sample_rate. On the device of mic, detached."""


def find_teacher(path: str | None) -> Teacher:
    """Looks for a teacher; its weights are left on the disk.

    Raises:
        ConfigError: none given, none there, or a damaged one.
    """
    if not path:
        raise ConfigError(f"{KEY} is not given. Type: {KEY}=<run directory, checkpoint or exported folder>")
    given = Path(path).expanduser()
    try:
        if given.is_file() or (given / "contract.json").is_file():
            return Exported(given)
        return Checkpoint(given)
    except CheckpointError as error:
        raise ConfigError(f"{KEY}={path}: {error}") from error


class Checkpoint:
    """A teacher from a run directory or a checkpoint.

    Args:
        path: what the user named.

    Raises:
        CheckpointError: nothing usable there.
    """

    def __init__(self, path: Path):
        from echofree import checkpoint
        from echofree.config import frozen
        from echofree.inherit import weights_mark

        self.folder = checkpoint.find(path)
        config = frozen.freeze(frozen.load(checkpoint.run_of(self.folder)))["model"]
        weights = weights_mark(checkpoint.manifest(self.folder))
        self._model: Any = None
        self.facts = Facts(
            str(self.folder),
            hashlib.sha256(json.dumps([config, weights], sort_keys=True).encode()).hexdigest()[:16],
            "checkpoint",
            int(config.get("sample_rate", 0)),
            int(config.get("hop_samples", 0)),
        )

    def load(self, device: torch.device) -> Any:
        """The model, frozen, once in this process, on the device that asks."""
        if self._model is None:
            from echofree import checkpoint

            state = torch.get_rng_state()  # building draws weights: the student's random stream must not notice
            self._model = checkpoint.load_model(self.folder)[0].requires_grad_(False)
            torch.set_rng_state(state)
        self._model.to(device)
        return self._model

    def hear(self, mic: Tensor, far: Tensor, rate_hz: int, latent: bool) -> dict[str, Tensor]:
        """See `Teacher`."""
        model = self.load(mic.device)
        own_hz = int(model.sample_rate)
        with torch.no_grad(), torch.autocast(mic.device.type, enabled=False):
            pair = [resample(wave.float(), rate_hz, own_hz) for wave in (mic, far)]
            out: Any = model(*pair, details=True) if latent else {"est": model(*pair)}
            est = resample(out["est"].float(), own_hz, rate_hz)[:, : mic.shape[1]]  # [B, T]
            if not latent:
                return {"est": est}
            if "latent" not in out:
                raise ConfigError(
                    f"{KEY}={self.folder}: this model returns no latent ({', '.join(out)}). Type: task.weights.latent=0"
                )
            return {"est": est, "latent": out["latent"].float()}


class Exported:
    """A teacher from a folder that `python -m echofree.export` wrote. It runs on the CPU, clip by clip, as on a device.

    Args:
        path: the folder or the file in it.

    Raises:
        CheckpointError: no artifact, or one that doesn't agree with its model.
    """

    def __init__(self, path: Path):
        from echofree.runtime.contract import CHECKED, read

        contract, self.folder = read(path, (CHECKED,))
        body = json.dumps([contract.sha256, contract.front_end, contract.kind, contract.signals], sort_keys=True)
        self._canceller: Any = None
        self.facts = Facts(
            str(self.folder), hashlib.sha256(body.encode()).hexdigest()[:16], "export", contract.sample_rate, 0
        )

    def hear(self, mic: Tensor, far: Tensor, rate_hz: int, latent: bool) -> dict[str, Tensor]:
        """See `Teacher`; an exported file shows no latent."""
        if latent:
            raise ConfigError(
                f"{KEY}={self.folder}: an exported file shows its output alone. Name its checkpoint, or type: "
                "task.weights.latent=0"
            )
        if self._canceller is None:
            from echofree.runtime.canceller import Canceller

            self._canceller = Canceller.load(self.folder)
        own_hz = self.facts.sample_rate
        pair = [resample(wave.detach().float(), rate_hz, own_hz).cpu().numpy() for wave in (mic, far)]
        est = torch.from_numpy(np.stack([self._clip(*clip) for clip in zip(*pair, strict=True)])).to(mic.device)
        return {"est": resample(est, own_hz, rate_hz)[:, : mic.shape[1]]}  # [B, T]

    def _clip(self, mic: np.ndarray, far: np.ndarray) -> np.ndarray:
        canceller = self._canceller.twin()  # a clip is a call of its own
        out = np.concatenate([canceller.process(mic, far), canceller.flush()])
        late: int = canceller.latency_samples
        return np.asarray(out[late : late + len(mic)], np.float32)
