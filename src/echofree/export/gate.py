"""Whether an artifact may ship: measures it in a process of its own, judges, and says where it parts from its model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from echofree.contracts import Scenario
from echofree.errors import MissingExtra
from echofree.export.base import Bounds, Exporter, ExportError
from echofree.export.golden import Reference, Tick, rounding, scenario_name, steps
from echofree.metric.core import si_sdr
from echofree.model.graph import StreamGraph
from echofree.runtime.contract import Contract
from echofree.runtime.engine import open_engine

SELF = 1e-5  # between two ways of giving an artifact the same samples
# Quiet bins beside loud ones hold little but rounding, and a network that compresses spectra hears them. Where the
# model itself turns one unit of rounding in its input into more than the bound, that much is allowed, times a few.
ROUNDING = 4.0
MOST = 1e-2
QUIET_RMS = 1e-3  # of the difference where a quantised model should be silent: -60 dBFS
STATE = 1e-3  # of a state's largest value, for float targets
WEIGHT = 1e-6  # of a layer's largest weight, for float targets
AECMOS_SCENES = 3  # of each scenario
MAX_LOCATED_HOPS = 1500
NEAR = (Scenario.DOUBLE_TALK, Scenario.NEAR_END)


def check(
    model: Any,
    graph: StreamGraph | None,
    contract: Contract,
    exporter: Exporter,
    folder: Path,
    reference: Reference,
    tick: Tick = lambda: None,
) -> dict[str, Any]:
    """Measures and judges one artifact.

    Args:
        model: that it was made of, in evaluation mode, on the CPU.
        graph: of the model; None when there is nothing but the linear stage.
        contract, exporter, folder: of the artifact.
        reference: the prepared streams.
        tick: called at least once a second.

    Returns:
        What alignment.json holds; "passed" says whether nothing is in "problems".

    Raises:
        ExportError: the artifact couldn't be measured at all.
    """
    measured = measure(folder, reference.folder, tick)
    bounds = exporter.bounds
    weights = {} if graph is None else weight_differences(graph, exporter, folder)
    quality = {"si_sdr": si_sdr_loss(model, reference), "aecmos": aecmos_loss(model, reference)}
    problems = judge(measured, bounds, reference, lambda name: rounding(model, reference, name))
    problems += judge_weights(weights)
    problems += judge_quality(quality, bounds)
    if measured["torch_imported"] and contract.engine != "executorch":
        problems.append("the process that measured it had imported torch")
    result = {
        "passed": not problems,
        "problems": problems,
        "bounds": asdict(bounds),
        **measured,
        "bytes": sum(p.stat().st_size for p in folder.iterdir() if p.is_file() and p.name == contract.file),
        "quality": quality,
        "weights": weights,
    }
    if problems and graph is not None and bounds.wave is not None:
        tick()
        result["parts_at"] = locate(model, graph, contract, folder, reference, measured, tick)
    return result


def measure(folder: Path, work: Path, tick: Tick) -> dict[str, Any]:
    """`align.py` in another process, on one core."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "echofree.export.align", str(folder), str(work)]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            while process.poll() is None:
                tick()
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        said.seek(0)
        text = said.read()
    if process.returncode != 0:
        raise ExportError(f"the artifact can't be run: {text.strip()[-2000:] or f'exit code {process.returncode}'}")
    found: dict[str, Any] = json.loads((work / "measured.json").read_text(encoding="utf-8"))
    return found


def judge(measured: dict[str, Any], bounds: Bounds, reference: Reference, own: Callable[[str], float]) -> list[str]:
    """What is beyond the bounds on waves and states.

    Args:
        measured: by `measure`; what `own` said is added to a take.
        bounds: of the target.
        reference: what was measured.
        own: take -> what rounding alone does to the model's output there; asked where a bound is exceeded.
    """
    problems = []
    for take in reference.takes:
        found = measured["takes"][take.name]
        name = f"stream {take.name!r}"
        if not found["finite"]:
            problems.append(f"{name}: NaN or infinite samples")
            continue
        least = bounds.wave
        if least is not None and found["max"] > least:
            found["model_rounding"] = own(take.name)
            least = max(least, min(ROUNDING * found["model_rounding"], MOST))
        if least is not None and found["max"] > least:
            problems.append(
                f"{name}: differs by up to {found['max']:.2g} from step {found['first_hop_beyond_1e-4']} on; "
                f"{least:.2g} is allowed"
            )
        low = bounds.snr_db is not None and found["snr_db"] is not None and found["snr_db"] < bounds.snr_db
        if low and take.judged == "wave":
            problems.append(f"{name}: {found['snr_db']:.1f} dB below the signal; {bounds.snr_db:g} dB is the least")
        if bounds.wave is None and take.judged == "quiet" and found["rms"] > QUIET_RMS:
            problems.append(f"{name}: the difference has an RMS of {found['rms']:.2g}; {QUIET_RMS:g} is allowed")
        if found.get("from_straight_run", 0.0) > SELF:
            problems.append(
                f"{name}: the artifact itself gives other samples than without a break (by "
                f"{found['from_straight_run']:.2g}): it keeps something between streams or steps"
            )
    if bounds.wave is None:
        return problems
    for name, row in measured["states"].items():
        size = max(row["scale"])
        for hops, most in zip(row["hops"], row["max"]):
            if most > STATE * max(size, 1e-3):
                problems.append(f"state {name}: differs by up to {most:.2g} after {hops} steps (its size: {size:.2g})")
                break
    return problems


def weight_differences(graph: StreamGraph, exporter: Exporter, folder: Path) -> dict[str, float]:
    """Layer -> largest difference of the weights in the file, as a share of the largest weight; float32 files only."""
    if exporter.precision != "float32":
        return {}
    found = exporter.weights(folder)
    wanted = {name: value.detach().cpu().numpy() for name, value in graph.state_dict().items()}
    table = {}
    for name, value in found.items():
        if name in wanted and wanted[name].shape == value.shape:
            scale = float(np.abs(wanted[name]).max()) or 1.0
            table[name] = float(np.abs(wanted[name] - value).max()) / scale
    return table


def judge_weights(weights: dict[str, float]) -> list[str]:
    return [
        f"weights of {name.removeprefix('parts.')}: the file's differ by {share:.2g} of the largest"
        for name, share in weights.items()
        if share > WEIGHT
    ]


def judge_quality(quality: dict[str, Any], bounds: Bounds) -> list[str]:
    problems = []
    loss = quality["si_sdr"]["loss_db"]
    if bounds.si_sdr_db is not None and loss is not None and loss > bounds.si_sdr_db:
        problems.append(f"SI-SDR is {loss:.2f} dB worse; {bounds.si_sdr_db:g} dB is allowed")
    for name in ("echo", "other"):
        loss = quality["aecmos"].get(f"{name}_loss")
        if bounds.aecmos is not None and loss is not None and loss > bounds.aecmos:
            problems.append(f"AECMOS ({name}) is {loss:.2f} worse; {bounds.aecmos:g} is allowed")
    return problems


def _scenes(model: Any, reference: Reference) -> list[tuple[int, dict[str, np.ndarray]]]:
    """(scenario, waves) of every scene of the long stream: mic, far, near, model's output, artifact's output."""
    take = next(take for take in reference.takes if take.name == "long")
    late, found = int(model.latency_samples), []
    with np.load(reference.folder / "long.npz") as stored:
        waves = {name: stored[name] for name in ("mic", "far", "near", "reference")}
    waves["out"] = np.load(reference.folder / "long.out.npy")
    for first, last, scenario in take.scenes:
        if last + late <= len(waves["mic"]):
            part = {name: waves[name][first:last] for name in ("mic", "far", "near")}
            part |= {name: waves[name][first + late : last + late] for name in ("reference", "out")}
            found.append((scenario, part))
    return found


def si_sdr_loss(model: Any, reference: Reference) -> dict[str, Any]:
    """Mean SI-SDR of model and artifact over the scenes with a talker, and what the artifact loses."""
    rows = [
        (si_sdr(part["reference"].astype(np.float64), near), si_sdr(part["out"].astype(np.float64), near))
        for scenario, part in _scenes(model, reference)
        if scenario in NEAR and np.any(near := part["near"].astype(np.float64)) and np.any(part["reference"])
    ]
    if not rows:
        return {"scenes": 0, "loss_db": None}
    model_db, out_db = np.mean(rows, axis=0)
    worst = max(a - b for a, b in rows)
    return {
        "scenes": len(rows),
        "model_db": float(model_db),
        "artifact_db": float(out_db),
        "loss_db": float(model_db - out_db),
        "worst_scene_loss_db": float(worst),
    }


def aecmos_loss(model: Any, reference: Reference) -> dict[str, Any]:
    """Mean AECMOS of both over a few scenes; without its package only the reason."""
    from echofree.audio import resample
    from echofree.metric.aecmos import RATE_HZ, AecmosModel

    try:
        scorer = AecmosModel(RATE_HZ)
        rows, counts = [], dict.fromkeys(Scenario, 0)
        for scenario, part in _scenes(model, reference):
            kind = Scenario(scenario)
            if kind is Scenario.SILENCE or counts[kind] >= AECMOS_SCENES:
                continue
            counts[kind] += 1
            wave = {name: resample(x, int(model.sample_rate), RATE_HZ) for name, x in part.items()}
            pair = [scorer.score(wave["far"], wave["mic"], wave[name], kind) for name in ("reference", "out")]
            rows.append([a - b for a, b in zip(*pair)])
    except MissingExtra as error:
        return {"skipped": str(error)}
    if not rows:
        return {"skipped": "the long stream holds no whole scene"}
    echo, other = np.mean(rows, axis=0)
    names = {scenario_name(kind): count for kind, count in counts.items() if count}
    return {"scenes": names, "echo_loss": float(echo), "other_loss": float(other)}


def locate(
    model: Any,
    graph: StreamGraph,
    contract: Contract,
    folder: Path,
    reference: Reference,
    measured: dict[str, Any],
    tick: Callable[[], None],
) -> dict[str, Any]:
    """The first step, and in it the first tensor, that differs when the artifact gets the model's own inputs and
    states.

    Returns:
        "stream", "step", "time_s", "tensor", "difference", and "all": name -> difference in that step, in the graph's
        order; or "tensor" None when every single step agrees, so that the linear stage or the transforms part.
    """
    bad = [take.name for take in reference.takes if measured["takes"][take.name]["first_hop_beyond_1e-4"] is not None]
    name = min(bad, key=lambda n: measured["takes"][n]["first_hop_beyond_1e-4"]) if bad else "odd chunks"
    with np.load(reference.folder / f"{name}.npz") as stored:
        waves = {key: stored[key] for key in ("mic", "far")}
    runner = open_engine(contract, folder)()
    worst: dict[str, Any] = {"stream": name, "step": None, "tensor": None, "difference": 0.0, "all": {}}
    for number, (inputs, before, after) in enumerate(steps(model, graph, waves)):
        if number >= MAX_LOCATED_HOPS:
            break
        tick()
        for array, value in zip(runner.inputs, inputs):
            array[...] = value.numpy()
        runner.load_states({key: value.numpy() for key, value in zip(graph.state_names, before)})
        out = runner.run()
        pairs = {key: (runner.states()[key], value.numpy()) for key, value in zip(graph.state_names, after[1:])}
        pairs[graph.output[0]] = (out, after[0].numpy())
        apart = {key: float(np.abs(a - b).max()) / max(float(np.abs(b).max()), 1e-3) for key, (a, b) in pairs.items()}
        found = next((key for key, share in apart.items() if share > STATE), None)
        if found is not None or max(apart.values()) > worst["difference"]:
            key = found or max(apart, key=lambda k: apart[k])
            seconds = number * contract.hop_samples / contract.sample_rate
            worst |= {"step": number, "time_s": seconds, "tensor": key, "difference": apart[key], "all": apart}
        if found is not None:
            break
    return worst
