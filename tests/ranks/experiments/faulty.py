"""A model and a corpus that fail on demand, for runs of a few seconds through the real command line."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from echofree.contracts import Clip

SAMPLE_RATE = 16000
NUM_SAMPLES = 1600


def die_early() -> None:
    """Before the ranks have met: what FAULTY_IMPORT says happens to the second task of a job."""
    how = os.environ.get("FAULTY_IMPORT", "")
    if how and os.environ.get("SLURM_PROCID") == "1":
        Path(os.environ["FAULTY_FILE"]).touch()
        if how == "raise":
            raise RuntimeError("no sky at all")
        os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os._exit(7)


die_early()


class FaultyModel(nn.Module):
    """Something happens in the forward pass of one rank and step.

    Args:
        fault: none, raise, exit, kill, oom, sleep, lock (native code that keeps the interpreter lock), stop (SIGSTOP)
            or slow (every step from `step` on).
        rank: where; it holds for the first life of a run only.
        step: from 1.
        pace_s: every forward pass of every rank takes this long.
        mark: a folder; a file there says that the fault has happened already.
    """

    sample_rate, hop_samples, latency_samples = SAMPLE_RATE, 160, 160

    def __init__(self, fault: str = "none", rank: int = 1, step: int = 3, pace_s: float = 0.0, mark: str = ""):
        super().__init__()
        self.fault, self.rank, self.at, self.pace_s, self.mark = fault, rank, step, pace_s, mark
        self.count = 0
        self.net = nn.Conv1d(2, 1, 1)

    def forward(self, mic: Tensor, far: Tensor, details: bool = False) -> Tensor | dict[str, Tensor]:
        if self.training:
            self.count += 1
            time.sleep(self.pace_s)
            if int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == self.rank:
                self.fail()
        est = self.net(torch.stack([mic, far], 1))[:, 0]  # [B, T]
        return {"est": est} if details else est

    def fail(self) -> None:
        if self.fault == "slow" and self.count >= self.at:
            time.sleep(0.08)
        elif self.count == self.at and not self.happened():
            getattr(self, f"do_{self.fault}")()

    def happened(self) -> bool:
        if not self.mark:
            return False
        path = Path(self.mark)
        there = path.exists()
        path.touch()  # its time is that of the failure
        return there

    def do_none(self) -> None:
        pass

    def do_raise(self) -> None:
        raise ValueError("the sky is falling")

    def do_exit(self) -> None:
        os._exit(3)

    def do_kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def do_oom(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def do_sleep(self) -> None:
        time.sleep(600)

    def do_lock(self) -> None:
        ctypes.PyDLL(None).sleep(600)

    def do_stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class Clips:
    sample_rate = SAMPLE_RATE

    def __init__(self, num: int, stuck: int):
        self.num, self.stuck = num, stuck

    def __len__(self) -> int:
        return self.num

    def item(self, index: int, epoch: int) -> Clip:
        if index == self.stuck:
            self.decode()
        rng = np.random.default_rng([epoch, index])
        near, far = (rng.standard_normal((2, NUM_SAMPLES)) * 0.1).astype(np.float32)
        return Clip(near + far, far, near, name=f"clip {index}", index=index)

    def decode(self) -> None:
        time.sleep(600)


class FaultyData:
    """Args:
    num_train: clips of an epoch.
    stuck: the index of a training clip that never comes; -1: none.
    """

    sample_rate = SAMPLE_RATE

    def __init__(self, num_train: int = 64, stuck: int = -1):
        self.num_train, self.stuck = num_train, stuck

    def split(self, name: str) -> Clips | None:
        return {"train": Clips(self.num_train, self.stuck), "valid": Clips(4, -1)}.get(name)

    def fingerprint(self) -> str:
        return "faulty"

    def survey(self) -> list[tuple[str, str]]:
        return [("training clips", str(self.num_train))]
