"""The streams on which an artifact is compared with its model, and what the model makes of them.

The reference is the model's own `forward`, the path it was trained with, late by its latency as a stream is. A shorter
stream runs through `step` as well, which shows the states at several moments. Everything lands in a folder that the
gate's process reads without torch; a few seconds of it are shipped beside the artifact as golden vectors.

Legend: T samples, M hop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echofree.audio import resample
from echofree.contracts import Scenario
from echofree.data.synthetic import Synthetic
from echofree.export.base import Calibration, input_name
from echofree.model.chain import FRONT_END
from echofree.model.graph import StreamGraph

SCENE_S = 8.0
SCENE_RATE_HZ = 16000
EXTRA_S = 12.0  # of the streams beside the long one
STATES_S = 20.0  # of the stream whose states are compared
STATES_EVERY_S = 5.0
GOLDEN_S = 4.0
CALIBRATION_S = 60.0
CALIBRATION_EVERY = 5  # hops between two calibration steps
LOUD_S = 10  # of calibration, clipped
Tick = Callable[[], None]  # says that the process is alive


@dataclass
class Take:
    """One stream of the gate; its waves are `<name>.npz` with mic, far, reference (and near).

    Attributes:
        name: what it is about.
        chunks: hop | odd (random sizes from 1 to 4096).
        after: name of a take before it that the same canceller has run; `reset` comes between them. "": a fresh one.
        beside: name of a take that runs at the same time, chunk by chunk, through a twin. "": none.
        scenes: (first sample, last sample, scenario) of the parts that have one.
        judged: "wave" by difference and ratio; "quiet" by difference alone, where next to nothing comes out.
    """

    name: str
    chunks: str = "hop"
    after: str = ""
    beside: str = ""
    scenes: list[tuple[int, int, int]] = field(default_factory=list)
    judged: str = "wave"


class Scenes:
    """Test scenes one behind the other, at the model's rate: other rooms, delays, levels and talkers every 8 s.

    Args:
        rate_hz: of the model.
        split: test, or valid for calibration.
    """

    def __init__(self, rate_hz: int, split: str):
        source = Synthetic(num_rooms=8, num_train=0, num_valid=200, num_test=200, segment_s=SCENE_S)
        self._dataset: Any = source.split(split)
        self.rate_hz = rate_hz

    def make(self, seconds: float) -> tuple[dict[str, np.ndarray], list[tuple[int, int, int]]]:
        """-> (mic, far, near float32 [T]; scenes as in `Take`)"""
        total, at, scenes = round(seconds * self.rate_hz), 0, []
        parts: dict[str, list[np.ndarray]] = {"mic": [], "far": [], "near": []}
        index = 0
        while at < total:
            clip = self._dataset.item(index % len(self._dataset), 0)
            index += 1
            for name, part in parts.items():
                part.append(resample(getattr(clip, name), SCENE_RATE_HZ, self.rate_hz)[: total - at])
            scenes.append((at, at + len(parts["mic"][-1]), int(clip.scenario)))
            at = scenes[-1][1]
        return {name: np.concatenate(part).astype(np.float32) for name, part in parts.items()}, scenes


@dataclass
class Reference:
    """The prepared folder.

    Attributes:
        folder: holds takes.json, a file per take, and states.npz.
        takes: in the order in which they run.
    """

    folder: Path
    takes: list[Take]


def prepare(
    model: Any, graph: StreamGraph | None, folder: Path, minutes: float, tick: Tick = lambda: None
) -> Reference:
    """Runs the model over all takes. Takes long: about the model's own time for `minutes` of audio, and more.

    Args:
        model: in evaluation mode, on the CPU.
        graph: of the model.
        folder: empty.
        minutes: of the long stream.
        tick: called between the parts.
    """
    scenes = Scenes(int(model.sample_rate), "test")
    tick()
    waves, spans = scenes.make(60 * minutes)
    extra = {name: wave[: round(EXTRA_S * model.sample_rate)] for name, wave in waves.items() if name != "near"}
    other = {name: wave[-len(extra["mic"]) :] for name, wave in waves.items() if name != "near"}
    takes = [
        (Take("long", scenes=spans), waves),
        (Take("after reset", after="long"), extra),
        (Take("odd chunks", chunks="odd"), extra),
        (Take("silence", judged="quiet"), _silence(extra, model.sample_rate)),
        (Take("clipping"), {"mic": np.clip(10 * extra["mic"], -1, 1), "far": np.clip(10 * extra["far"], -1, 1)}),
        (Take("16 bit extremes"), _extremes(model.sample_rate)),
        (Take("two at once", chunks="odd", beside="its twin"), extra),
        (Take("its twin", chunks="odd"), other),
    ]
    for take, wave in takes:
        reference = forward(model, wave["mic"], wave["far"])
        np.savez(folder / f"{take.name}.npz", reference=reference, **wave)
        tick()
    seconds = min(STATES_S, 60 * minutes)
    count = round(seconds * model.sample_rate) // model.hop_samples
    stream = {name: waves[name][: count * model.hop_samples] for name in ("mic", "far")}
    every = max(1, min(round(STATES_EVERY_S * model.sample_rate / model.hop_samples), count // 3))
    _write_states(model, graph, stream, every, folder, tick)
    (folder / "takes.json").write_text(json.dumps([asdict(take) for take, _ in takes], indent=1), encoding="utf-8")
    return Reference(folder, [take for take, _ in takes])


def rounding(model: Any, reference: Reference, name: str) -> float:
    """What the model itself makes of one unit of rounding (2^-24) in each sample of its inputs: the largest difference
    in a take; of the long one a piece stands for all."""
    with np.load(reference.folder / f"{name if name != 'long' else 'odd chunks'}.npz") as take:
        mic, far, out = take["mic"], take["far"], take["reference"]
    rng = np.random.default_rng(0)
    noisy = [(x * (1 + rng.choice([-1, 1], len(x)) * 2.0**-23)).astype(np.float32) for x in (mic, far)]
    return float(np.abs(forward(model, *noisy) - out)[int(model.latency_samples) :].max(initial=0.0))


def forward(model: Any, mic: np.ndarray, far: np.ndarray) -> np.ndarray:
    """`forward` on one clip, late as a stream is: float32 [T]."""
    with torch.no_grad():
        est = model(torch.from_numpy(mic)[None], torch.from_numpy(far)[None])[0].numpy()
    late = int(model.latency_samples)
    return np.pad(est, (late, 0))[: len(mic)].astype(np.float32)


def _silence(waves: dict[str, np.ndarray], rate_hz: int) -> dict[str, np.ndarray]:
    """Both silent, then the microphone alone, then the far end alone, then both silent again; 2 s each."""
    size, quiet = 2 * rate_hz, np.zeros(2 * rate_hz, np.float32)
    mic, far = waves["mic"][:size], waves["far"][:size]
    return {"mic": np.concatenate([quiet, mic, quiet, quiet]), "far": np.concatenate([quiet, quiet, far, quiet])}


def _extremes(rate_hz: int, seed: int = 0, half_wave_hz: int = 200) -> dict[str, np.ndarray]:
    """int16 full scale, both signs, in squares and noise: what 16 bit can hold."""
    rng = np.random.default_rng(seed)
    time = np.arange(4 * rate_hz)
    square = np.where(time // (rate_hz // half_wave_hz) % 2, 32767, -32768)
    noise = rng.choice([-32768, 32767], len(time))
    mic = np.concatenate([square, noise[: 2 * rate_hz]]).astype(np.int16)
    far = np.concatenate([noise, square[: 2 * rate_hz]]).astype(np.int16)
    return {"mic": (mic / 32768).astype(np.float32), "far": (far / 32768).astype(np.float32)}


def steps(
    model: Any, graph: StreamGraph, waves: dict[str, np.ndarray]
) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """The model's graph over a stream, in torch: (inputs, states before, (output, states after)) of every hop."""
    hop, states = int(model.hop_samples), tuple(graph.initial[name].clone() for name in graph.state_names)
    front = model.chain.init_state(1) if graph.kind == "spectra" else {}
    for at in range(0, len(waves["mic"]) - hop + 1, hop):
        mic, far = (torch.from_numpy(waves[name][at : at + hop])[None] for name in ("mic", "far"))
        with torch.no_grad():
            if graph.kind == "spectra":
                spectra, heard = model.chain.listen(mic, far, front)
                front = {**front, **heard}
                inputs: tuple[Tensor, ...] = (torch.view_as_real(spectra[:, :, 0].resolve_conj()),)
            else:
                inputs = (mic, far)
            after = graph(*inputs, *states)
        yield inputs, states, after
        states = after[1:]


def calibration(model: Any, graph: StreamGraph) -> Calibration:
    """Inputs and states of steps over a stream of validation scenes, all scenarios and levels, and the loudest that can
    come (clipped scenes, full scale), by the graph's names. None of it is in the streams that judge."""

    def examples() -> Iterator[dict[str, np.ndarray]]:
        rate = int(model.sample_rate)
        scenes, _ = Scenes(rate, "valid").make(CALIBRATION_S)
        full = _extremes(rate, seed=1, half_wave_hz=320)
        clipped = {name: np.clip(20 * wave[: LOUD_S * rate], -1, 1) for name, wave in scenes.items()}
        waves = {name: np.concatenate([scenes[name], clipped[name], full[name]]) for name in ("mic", "far")}
        names = [*graph.inputs, *map(input_name, graph.state_names)]
        for number, (inputs, before, _) in enumerate(steps(model, graph, waves)):
            if number % CALIBRATION_EVERY == 0:
                yield {name: value.numpy().copy() for name, value in zip(names, (*inputs, *before), strict=True)}

    return examples


def _write_states(
    model: Any, graph: StreamGraph | None, waves: dict[str, np.ndarray], every: int, folder: Path, tick: Tick
) -> None:
    """states.npz: "<hops>/<name>" of the graph's and the filter's states, every so many hops."""
    hop, state = int(model.hop_samples), model.init_state(1)
    kept: dict[str, Any] = {}
    names = () if graph is None else graph.state_names
    prefix = FRONT_END if graph is not None else ""
    for number in range(len(waves["mic"]) // hop):
        mic, far = (torch.from_numpy(waves[name][number * hop : (number + 1) * hop])[None] for name in ("mic", "far"))
        with torch.no_grad():
            _, state = model.step(mic, far, state)
        if (number + 1) % every == 0:
            tick()
            found = {name: state[name] for name in names if name in state}
            for name in ("kalman.weight", "kalman.variance", "kalman.psd"):
                if prefix + name in state:
                    found[FRONT_END + name] = state[prefix + name][0]
            kept |= {f"{number + 1}/{name}": value.numpy().copy() for name, value in found.items()}
    np.savez(folder / "states.npz", **kept)


def ship(model: Any, graph: StreamGraph | None, reference: Reference, folder: Path) -> None:
    """Golden vectors beside an artifact: golden/mic.wav, far.wav, out.wav (float32, out as a stream gives it), and with
    a graph golden/steps.npz: inputs, states before and after, and output of a few steps, by the graph's names."""
    import soundfile as sf

    out = folder / "golden"
    out.mkdir()
    with np.load(reference.folder / "odd chunks.npz") as take:
        size = round(GOLDEN_S * model.sample_rate)
        waves = {name: take[name][:size] for name in ("mic", "far")}
        for name, wave in (*waves.items(), ("out", take["reference"][:size])):
            sf.write(str(out / f"{name}.wav"), wave, int(model.sample_rate), subtype="FLOAT")
    if graph is None:
        return
    kept: dict[str, Any] = {}
    last = len(waves["mic"]) // int(model.hop_samples)
    for number, (inputs, before, after) in enumerate(steps(model, graph, waves)):
        if number not in (0, 1, last // 2, last - 1):
            continue
        values = {**dict(zip(graph.inputs, inputs)), graph.output[0]: after[0]}
        for name, old, new in zip(graph.state_names, before, after[1:]):
            values |= {input_name(name): old, f"next_{input_name(name)}": new}
        kept |= {f"{number}/{name}": value.numpy() for name, value in values.items()}
    np.savez(out / "steps.npz", **kept)


def scenario_name(value: int) -> str:
    """For tables: double_talk, far_end ..."""
    return Scenario(value).name.lower()
