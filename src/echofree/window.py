"""What happened between two logging steps, and its way through a checkpoint."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from echofree.contracts import Batch


class Window:
    """What happened since the last logging step. Device values stay on the device until the loop logs them."""

    def __init__(self) -> None:
        self.start, self.wait_s, self.clips, self.audio_s = time.perf_counter(), 0.0, 0, 0.0
        self.loss: list[Tensor] = []
        self.parts: list[dict[str, Tensor]] = []
        self.weight: list[float] = []
        self.finite: list[Tensor] = []
        self.names: list[tuple[int, list[str]]] = []
        self.paused_s = 0.0
        self.agree_s = 0.0  # waiting for the other ranks before a step

    def state_dict(self) -> dict[str, Any]:
        """What a run that is stopped between two records takes along, so that it writes the same ones."""
        kept = ("wait_s", "clips", "audio_s", "loss", "parts", "weight", "finite", "paused_s", "agree_s")
        names = [[step, names] for step, names in self.names]
        return {**{k: getattr(self, k) for k in kept}, "names": names, "age_s": time.perf_counter() - self.start}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        for key, value in state.items():
            if key in ("loss", "finite"):
                value = [v.to(device) for v in value]
            elif key == "parts":
                value = [{k: v.to(device) for k, v in parts.items()} for parts in value]
            elif key == "names":
                value = [(step, names) for step, names in value]
            if key != "age_s":
                setattr(self, key, value)
        self.start = time.perf_counter() - state["age_s"]

    def add(
        self, step: int, loss: Tensor, parts: dict[str, Tensor], weight: float, finite: Tensor, batches: list[Batch]
    ) -> None:
        self.loss.append(loss)
        self.parts.append(parts)
        self.weight.append(weight)
        self.finite.append(finite)
        self.names.append((step, [name for batch in batches for name in batch.name]))
        self.audio_s += weight
