"""What all targets share: the contract of a model's graph, and what a target has to offer.

A new target is a class that satisfies `Exporter` and a file conf/export/NAME.yaml that names it under `targets`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from echofree import __version__
from echofree.errors import CheckpointError, EchoFreeError
from echofree.model import delay as delays
from echofree.model import drift, shadow
from echofree.model import frontend as fronts
from echofree.model.adaptive import DOUBT
from echofree.model.frontend import FrontEnd
from echofree.model.graph import StreamGraph
from echofree.runtime.contract import Contract, State

SHADOW = ("hops", "transition", "psd_smoothing", "level_s", "better", "hold_s", "wait_s", "first_s", "floor")
DRIFT = (
    "window", "before", "edge", "spans", "forget", "max_ppm", "step_ppm", "min_agreement", "min_count", "max_move",
)  # fmt: skip

Calibration = Callable[[], Iterator[dict[str, np.ndarray]]]  # inputs and states of steps, by the graph's names


@dataclass(frozen=True)
class Bounds:
    """What an artifact may differ by from the model that was trained. None: not judged.

    Attributes:
        wave: largest difference of a sample, full scale 1.
        snr_db: least ratio of the model's output to the difference.
        si_sdr_db: largest loss.
        aecmos: largest loss of either score.
    """

    wave: float | None = 1e-4
    snr_db: float | None = None
    si_sdr_db: float | None = 0.3
    aecmos: float | None = 0.05


FLOAT = Bounds()
INT8 = Bounds(wave=None, snr_db=30.0)
HALF = Bounds(wave=None, snr_db=50.0)


class Exporter(Protocol):
    """One way to write a graph.

    Attributes:
        engine: what runs it, see `echofree.runtime.contract.Contract`.
        file: name of the graph's file.
        precision: of weights and arithmetic, for people.
        bounds: judged by the gate.
    """

    engine: str
    file: str
    precision: str
    bounds: Bounds

    def require(self) -> None:
        """Raises MissingExtra or UserError when something that it needs isn't there."""

    def write(self, graph: StreamGraph, calibration: Calibration, folder: Path) -> list[str]:
        """Writes `file` (and what else belongs to it) into folder. -> notes for the contract

        Raises:
            ExportError: an operator that the format lacks, or that its converter is known to get wrong.
        """

    def weights(self, folder: Path) -> dict[str, np.ndarray]:
        """Weights as they stand in the file, by the graph's parameter names, so that a wrong one can be named. Those
        that can't be read are left out."""


class ExportError(EchoFreeError):
    """A model that a format can't hold, or a file that isn't what it should be."""


def reason(error: BaseException) -> str:
    """The innermost cause of a converter's complaint, whose text names the operator, without the advice around it."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:500]}"


def input_name(state: str) -> str:
    """A state's input in a graph."""
    return state.replace(".", "_")


def output_name(state: str) -> str:
    """A state's output in a graph."""
    return f"next_{input_name(state)}"


def describe(model: Any, graph: StreamGraph | None, name: str, exporter: Exporter, source: str) -> Contract:
    """The contract of a model's graph, its file still to be written.

    Raises:
        CheckpointError: a linear stage that the runtime doesn't have.
    """
    chain = graph is not None and graph.kind == "spectra"
    front = model.front if graph is None else graph.front_end
    where = {
        "front_end": "runtime" if front is not None else "graph",
        "transform": "runtime" if chain else "nowhere" if graph is None else "graph",
        "network": "nowhere" if graph is None else "graph",
    }
    states = [] if graph is None else [
        State(state, input_name(state), output_name(state), list(graph.initial[state].shape))
        for state in graph.state_names
    ]  # fmt: skip
    if len({state.input for state in states}) != len(states):
        raise CheckpointError("two states of the model differ only in a dot: rename one")
    return Contract(
        target=name,
        engine="none" if graph is None else exporter.engine,
        file="" if graph is None else exporter.file,
        sha256="",
        sample_rate=int(model.sample_rate),
        hop_samples=int(model.hop_samples),
        window_samples=graph.window_samples if graph is not None else 0,
        latency_samples=int(model.latency_samples),
        kind="linear" if graph is None else graph.kind,
        split=where,
        signals=list(graph.signals) if graph is not None else [],
        front_end=None if front is None else linear_numbers(front),
        inputs={} if graph is None else {key: list(shape) for key, shape in graph.inputs.items()},
        output="" if graph is None else graph.output[0],
        output_shape=[] if graph is None else list(graph.output[1]),
        states=states,
        precision="float32" if graph is None else exporter.precision,
        version=__version__,
        source=source,
    )


def linear_numbers(front: Any) -> dict[str, Any]:
    """Everything that the linear stage's arithmetic depends on, for the contract.

    Raises:
        CheckpointError: not a `FrontEnd` in float32.
    """
    if not isinstance(front, FrontEnd) or front.dtype != torch.float32:
        raise CheckpointError(
            f"the model's linear stage is a {type(front).__name__}, which the runtime doesn't have: only "
            "echofree.model.frontend.FrontEnd runs beside a graph. Give the model no graph()"
        )
    kalman, names = front.filter, (
        "dc_cutoff_hz", "high_pass_hz", "far_active", "start_variance", "max_path_gain", "variance_floor", "int16",
        "level_s", "headroom_s", "latest_s", "start_s", "negative_updates", "clip_share", "clip_rate", "judge_s",
        "worse_db", "quick_s", "patience_s", "min_gain_db", "sure_confidence",
    )  # fmt: skip
    return {
        "num_partitions": front.num_partitions,
        "max_samples": front.max_samples,
        "transition": kalman.transition,
        "output": kalman.output,
        "psd_smoothing": kalman.psd_smoothing,
        **{name: getattr(fronts, name.upper()) for name in names},
        "start_profile": front.profile.tolist(),
        "doubt": DOUBT,
        "farrow": front.line.farrow.tolist(),
        "shadow": {
            "num_partitions": front.shadow.num_partitions,
            **{name: getattr(shadow, name.upper()) for name in SHADOW},
        },
        "delay": delay_numbers(front.delay),
    }


def delay_numbers(delay: delays.DelayEstimator) -> dict[str, Any]:
    """The same of the delay estimator."""
    names = (
        "low_rate_hz", "far_samples", "mic_samples", "lead_samples", "taps", "num_agree", "tolerance", "min_confidence",
        "forget_fast", "forget_slow", "max_drift_ppm", "early_samples", "early_share",
    )  # fmt: skip
    low_hz, high_hz = delays.BAND_HZ
    return {
        **{name: getattr(delays, name.upper()) for name in names},
        "low_hz": low_hz,
        "high_hz": high_hz,
        "period": delay.period,
        "drift": {name: getattr(drift, name.upper()) for name in DRIFT},
    }
