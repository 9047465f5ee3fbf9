"""The gate's measuring half: runs the file that ships over the prepared streams, in a process without torch.

    python -m echofree.export.align FOLDER WORK    # FOLDER: the artifact; WORK: what golden.prepare wrote

Writes WORK/measured.json and WORK/<take>.out.npy. Judging is the other process's (gate.py).

Legend: T samples, M hop.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from echofree import resident

WINDOW_S = 10.0  # over which differences are listed
MAX_CHUNK = 4096
MIN_RMS = 1e-4  # -80 dBFS: below it a ratio says nothing


def main(argv: list[str]) -> int:
    """-> the exit code: 0 when it could measure, whatever it found."""
    folder, work = Path(argv[0]), Path(argv[1])
    start = time.perf_counter()
    from echofree.runtime import Canceller
    from echofree.runtime.contract import CHECKED, REJECTED, UNCHECKED

    first = Canceller.load(folder, (UNCHECKED, CHECKED, REJECTED))
    load_s = time.perf_counter() - start
    measured = cost(first, work)
    measured["load_s"] = load_s
    measured["peak_memory_mb"] = resident.peak_mb()  # before the long streams
    first.reset()
    rng = np.random.default_rng(0)
    takes = json.loads((work / "takes.json").read_text(encoding="utf-8"))
    cancellers: dict[str, Any] = {}
    outputs: dict[str, np.ndarray] = {}
    results: dict[str, dict[str, Any]] = {}
    for take in takes:
        name = take["name"]
        if name in outputs:  # ran beside another
            pass_on = outputs[name]
        else:
            canceller = cancellers[take["after"]] if take["after"] else (first if not cancellers else first.twin())
            if take["after"]:
                canceller.reset()
            pass_on = run(canceller, take, work, outputs, first, rng)
            cancellers[name] = canceller
        outputs[name] = pass_on
        np.save(work / f"{name}.out.npy", pass_on)
        results[name] = compare(np.load(work / f"{name}.npz"), pass_on, first)
    straight = outputs[takes[0]["name"]]
    for name in ("after reset", "odd chunks", "two at once"):  # the same samples again, by the artifact alone
        size = len(outputs[name])
        results[name]["from_straight_run"] = float(np.abs(outputs[name] - straight[:size]).max())
    content = {
        "takes": results,
        "states": compare_states(first.twin(), work),
        "cost": measured,
        "torch_imported": "torch" in sys.modules,
        "engine": first.contract.engine,
    }
    (work / "measured.json").write_text(json.dumps(content), encoding="utf-8")
    return 0


def run(
    canceller: Any,
    take: dict[str, Any],
    work: Path,
    outputs: dict[str, np.ndarray],
    first: Any,
    rng: np.random.Generator,
) -> np.ndarray:
    """A take through a canceller, another beside it when it says so. -> float32 [T]"""
    streams = [(canceller, *_waves(work, take["name"]))]
    if take["beside"]:
        streams.append((first.twin(), *_waves(work, take["beside"])))
    size = len(streams[0][1])
    sizes = _chunks(size, canceller.hop_samples if take["chunks"] == "hop" else 0, rng)
    parts: list[list[np.ndarray]] = [[] for _ in streams]
    at = 0
    for chunk in sizes:
        for part, (stream, mic, far) in zip(parts, streams):
            part.append(stream.process(mic[at : at + chunk], far[at : at + chunk]))
        at += chunk
    if take["beside"]:
        outputs[take["beside"]] = np.concatenate(parts[1])
    return np.concatenate(parts[0])


def _waves(work: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(work / f"{name}.npz") as stored:
        return stored["mic"], stored["far"]


def _chunks(size: int, fixed: int, rng: np.random.Generator) -> list[int]:
    found: list[int] = []
    left = size
    while left:
        found.append(min(left, fixed or int(np.exp(rng.uniform(0, np.log(MAX_CHUNK))))))
        left -= found[-1]
    return found


def compare(take: Any, out: np.ndarray, canceller: Any) -> dict[str, Any]:
    """Differences of out [T] from the model's output, over all and over time. What comes before the first sample of the
    recording (`latency_samples`) belongs to no input, and doesn't count."""
    rate_hz, hop = canceller.sample_rate, canceller.hop_samples
    reference = take["reference"].astype(np.float64)
    error = out.astype(np.float64) - reference
    error[: canceller.latency_samples] = 0
    size = np.abs(error)
    worst = int(size.argmax())
    window = round(WINDOW_S * rate_hz)
    rms = float(np.sqrt(np.mean(reference**2)))
    found = {
        "seconds": len(out) / rate_hz,
        "finite": bool(np.isfinite(out).all()),
        "max": float(size[worst]),
        "rms": float(np.sqrt(np.mean(error**2))),
        "reference_rms": rms,
        "snr_db": float(20 * np.log10(rms / max(np.sqrt(np.mean(error**2)), 1e-12))) if rms > MIN_RMS else None,
        "worst_hop": worst // hop,
        "max_over_time": [float(size[i : i + window].max()) for i in range(0, len(out), window)],
        "rms_over_time": [float(np.sqrt(np.mean(error[i : i + window] ** 2))) for i in range(0, len(out), window)],
    }
    beyond = np.flatnonzero(size > 1e-4)
    found["first_hop_beyond_1e-4"] = int(beyond[0]) // hop if len(beyond) else None
    return found


def compare_states(canceller: Any, work: Path) -> dict[str, dict[str, Any]]:
    """Per state the largest and the RMS difference at every moment that states.npz holds, relative to its size."""
    with np.load(work / "states.npz") as stored:
        wanted: dict[int, dict[str, np.ndarray]] = {}
        for key in stored.files:
            hops, name = key.split("/", 1)
            wanted.setdefault(int(hops), {})[name] = stored[key]
    mic, far = _waves(work, "long")
    table: dict[str, dict[str, Any]] = {}
    done, hop = 0, canceller.hop_samples
    for hops in sorted(wanted):
        canceller.process(mic[done * hop : hops * hop], far[done * hop : hops * hop])
        done, states = hops, canceller.states()
        for name, reference in wanted[hops].items():
            error = np.abs(states[name].reshape(reference.shape).astype(np.float64) - reference)
            scale = float(np.sqrt(np.mean(reference.astype(np.float64) ** 2))) + 1e-9
            row = table.setdefault(name, {"hops": [], "max": [], "rms": [], "scale": []})
            row["hops"].append(hops)
            row["max"].append(float(error.max()))
            row["rms"].append(float(np.sqrt(np.mean(error**2))))
            row["scale"].append(scale)
    return table


def cost(canceller: Any, work: Path) -> dict[str, float]:
    """Time of a hop on one core, chunk by chunk as a device would."""
    mic, far = _waves(work, "odd chunks")
    hop, out = canceller.hop_samples, np.empty(canceller.hop_samples, np.float32)
    count = len(mic) // hop
    times = np.empty(count)
    begin = time.process_time()
    for i in range(count):
        here = slice(i * hop, (i + 1) * hop)
        start = time.perf_counter()
        canceller.process(mic[here], far[here], out)
        times[i] = time.perf_counter() - start
    spent = time.process_time() - begin
    return {
        "hop_us_median": float(np.median(times) * 1e6),
        "hop_us_999": float(np.quantile(times, 0.999) * 1e6),
        "real_time_factor": spent / (count * hop / canceller.sample_rate),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
