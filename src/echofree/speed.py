"""Latency and speed as a device would see them: hop by hop on one thread."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from echofree.live import TorchLive

MAX_S = 3.0


def stream_speed(models: Mapping[str, Any], mic: np.ndarray, far: np.ndarray) -> dict[str, dict[str, float | None]]:
    """What the models of this process need as a stream.

    Args:
        models: by name; None for what does nothing.
        mic, far: float32 [T]; the first seconds are used.

    Returns:
        {name: {"latency_ms", "rtf_stream"}}: algorithmic latency, and processor seconds over audio seconds; None where
        a model has no `step`.
    """
    found: dict[str, dict[str, float | None]] = {}
    for name, model in models.items():
        if model is None:
            found[name] = {"latency_ms": 0.0, "rtf_stream": None}
            continue
        rate_hz, rtf = int(model.sample_rate), None
        if hasattr(model, "step") and hasattr(model, "init_state"):
            live, count = TorchLive(model), min(len(mic), round(MAX_S * rate_hz))
            live.process(mic[: count // 10], far[: count // 10])  # the first calls plan and allocate
            start = time.process_time()
            live.process(mic[:count], far[:count])
            rtf = (time.process_time() - start) / (count / rate_hz)
        found[name] = {"latency_ms": 1000 * int(model.latency_samples) / rate_hz, "rtf_stream": rtf}
    return found
