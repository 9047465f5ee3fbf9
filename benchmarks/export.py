"""Side by side: one model as eager torch and as every artifact that can be made here, a hop at a time on one core.

    python benchmarks/export.py [--checkpoint RUN_DIR] [--model tiny] [--seconds 20] [--rounds 5] [--chunkings 1000]
                                [--peers FOLDER]

Without a checkpoint the model's weights are random, which changes no time. Every artifact goes through its gate first
(a short one); targets whose packages are missing are left out, and that is said. ONNX files also run in the C program
of examples/c, the whole chain: `onnx_in_c`; beside it SpeexDSP and WebRTC's canceller where they are (peer.py). All
take turns, so that a busy machine slows all of them. Prints a row per target (file, import and load in a process of its
own, microseconds a hop as median and 99.9 %, processor seconds per second of audio, SNR against torch), then whether so
many random chunkings and resets give the samples of the model's `forward`, and one JSON line. The targets for `tiny`: a
real-time factor of at most 0.015 in float32 ONNX and less in int8; at most 1.3 MB and 0.4 MB; import and load under 0.3
s; chunkings to 1e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

import cancellers
import peer
from echofree.errors import EchoFreeError
from echofree.export.golden import Scenes, forward
from echofree.export.run import export
from echofree.live import TorchLive
from echofree.runtime import Canceller
from echofree.verb import composed

TARGETS = ("onnx", "onnx_int8", "litert", "executorch", "tensorrt")
VARIANTS = {
    "onnx int8 static": ("onnx_int8", "onnx_int8", {"mode": "static"}),
    "litert float16": ("litert", "litert", {"precision": "float16"}),
    "litert int8": ("litert", "litert", {"precision": "int8"}),
    "executorch int8": ("executorch", "executorch", {"precision": "int8"}),
}
LOAD = (
    "import time; t = time.perf_counter(); from echofree.runtime import Canceller; "
    "Canceller.load({!r}, ('checked', 'rejected')); "
    "print(time.perf_counter() - t)"
)


def exporters() -> dict[str, Any]:
    """Name -> exporter, those whose packages are here."""
    from echofree.config.build import instantiate
    from echofree.config.frozen import freeze

    found: dict[str, Any] = {}
    wanted = {name: (name, name, {}) for name in TARGETS} | VARIANTS
    for name, (group, key, changes) in wanted.items():
        node = freeze(composed([f"export={group}"]))["export"]["targets"][key]
        exporter = instantiate({**node, **changes}, f"export.targets.{key}")
        try:
            exporter.require()
        except EchoFreeError as error:
            print(f"left out: {name}: {error}")
            continue
        found[name.replace(" ", "_")] = exporter
    return found


def hops(live: Any, mic: np.ndarray, far: np.ndarray, hop: int) -> tuple[np.ndarray, float, np.ndarray]:
    """-> (seconds of every hop, processor seconds, output)"""
    count = len(mic) // hop
    times, parts = np.empty(count), []
    begin = time.process_time()
    for i in range(count):
        here = slice(i * hop, (i + 1) * hop)
        start = time.perf_counter()
        parts.append(live.process(mic[here], far[here]))
        times[i] = time.perf_counter() - start
    return times, time.process_time() - begin, np.concatenate(parts)


def chunkings(live: Canceller, model: Any, waves: dict[str, np.ndarray], count: int) -> float:
    """Largest difference of `count` streams in random chunks, a reset before each, from `forward` on their samples."""
    rng, size, worst = np.random.default_rng(0), round(0.5 * live.sample_rate), 0.0
    mic, far = waves["mic"][:size], waves["far"][:size]
    reference = forward(model, mic, far)
    for _ in range(count):
        live.reset()
        stop, at, parts = int(rng.integers(1, size)), 0, []
        while at < stop:
            chunk = int(np.exp(rng.uniform(0, np.log(4096))))
            parts.append(live.process(mic[at : min(at + chunk, stop)], far[at : min(at + chunk, stop)]))
            at += chunk
        error = np.abs(np.concatenate(parts) - reference[:stop])[live.latency_samples :]
        worst = max(worst, float(error.max(initial=0.0)))
    return worst


class Rival:
    """Another canceller as its program: its processor time, its own start not counted."""

    def __init__(self, command: list[str], folder: Path):
        self.command, self.folder = command, folder

    def __call__(self, waves: dict[str, np.ndarray], rate_hz: int) -> tuple[float, np.ndarray | None]:
        """-> (processor seconds per second of audio, None: what it makes of the sound is not compared)"""
        paths = [self.folder / f"rival_{name}.wav" for name in ("mic", "far", "out")]
        for path, name in zip(paths, ("mic", "far")):
            soundfile.write(path, waves[name], rate_hz, "PCM_16")
        listed = self.folder / "list"
        listed.write_text("\t".join(map(str, paths)) + "\n")
        words = [str(listed) if word == "{list}" else word for word in self.command]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])["cpu_s"] * rate_hz / len(waves["mic"]), None


class InC:
    """An exported folder in the C program, a wav at a time."""

    def __init__(self, artifact: Path, build: Path, engine: Path):
        self.artifact, self.folder, self.program = artifact, build, build / "echofree"
        self.env = {**os.environ, "ONNXRUNTIME_LIB": str(engine)}

    def __call__(self, waves: dict[str, np.ndarray], rate_hz: int) -> tuple[float, np.ndarray]:
        """-> (processor seconds per second of audio, output)"""
        paths = [self.folder / f"{name}.wav" for name in ("mic", "far", "out")]
        for path in paths[:2]:
            soundfile.write(path, waves[path.stem], rate_hz, "FLOAT")
        words = [self.program, self.artifact, *paths]
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, check=True)
        spent = float(re.findall(r"real-time factor (\S+);", done.stdout)[0])
        return spent, soundfile.read(paths[2], dtype="float32")[0]


def c_engine() -> Path | None:
    """onnxruntime's library for C, as its Python package brings it on most systems."""
    spec = find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted((Path(spec.origin).parent / "capi").glob("libonnxruntime.so*"))), None)


def c_program(folder: Path) -> str:
    """Builds it. -> "", or why it can't be."""
    source = Path(__file__).resolve().parents[1] / "examples" / "c"
    if shutil.which("cc") is None or shutil.which("make") is None:
        return "needs a C compiler and make"
    folder.mkdir()
    for name in ("echofree.c", "Makefile"):
        shutil.copy(source / name, folder)
    subprocess.run(["make", "-s"], cwd=folder, check=True)
    return ""


def snr_db(out: np.ndarray, wanted: np.ndarray, late: int) -> float:
    """[n], [n]; what both have beyond the latency counts."""
    size = min(len(out), len(wanted))
    right = wanted[late:size].astype(np.float64)
    error = out[late:size] - right
    return float(10 * np.log10(np.mean(right**2) / max(np.mean(error**2), 1e-20)))


def load_s(folder: Path) -> float:
    """Import and load, the best of five processes."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    runs = [
        subprocess.run([sys.executable, "-c", LOAD.format(str(folder))], env=env, capture_output=True, check=True)
        for _ in range(5)
    ]
    return min(float(run.stdout.split()[-1]) for run in runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunkings", type=int, default=1000)
    parser.add_argument("--peers", help="the folder into which livekit is installed")
    words = parser.parse_args()
    torch.set_num_threads(1)
    if words.checkpoint:
        from echofree.checkpoint import load_model

        model: Any = load_model(words.checkpoint)[0]
    else:
        from echofree.config.build import build_model

        torch.manual_seed(0)
        model = build_model(composed([f"model={words.model}"])).eval()
    hop, late = int(model.hop_samples), int(model.latency_samples)
    waves, _ = Scenes(int(model.sample_rate), "test").make(words.seconds)
    with tempfile.TemporaryDirectory() as root:
        outcomes = export(model, exporters(), Path(root), "benchmark", 0.1)
        lives: dict[str, Any] = {"torch": TorchLive(model)}
        rows: dict[str, dict[str, Any]] = {"torch": {}}
        for outcome in outcomes:
            if outcome.folder is not None:
                lives[outcome.name] = Canceller.load(outcome.folder, ("checked", "rejected"))
                size = outcome.alignment.get("bytes", 0)
                rows[outcome.name] = {"passed": not outcome.problems, "bytes": size, "load_s": load_s(outcome.folder)}
        programs: dict[str, InC | Rival] = {}
        engine = c_engine()
        if engine is None or (why := c_program(Path(root) / "c")):
            print(f"left out: examples/c: {'this onnxruntime brings no C library' if engine is None else why}")
        else:
            folders = {o.name: o.folder for o in outcomes if o.folder is not None and o.name in ("onnx", "onnx_int8")}
            programs |= {f"{name}_in_c": InC(folder, Path(root) / "c", engine) for name, folder in folders.items()}
        if int(model.sample_rate) == peer.RATE_HZ:
            rivals = cancellers.present(words.peers)
            programs |= {name: Rival(command, Path(root)) for name, command in rivals.items()}
        program_times: dict[str, list[float]] = {name: [] for name in programs}
        times: dict[str, list[Any]] = {name: [] for name in lives}
        outs: dict[str, np.ndarray] = {}
        for _ in range(words.rounds):
            for name, live in lives.items():
                if hasattr(live, "reset"):
                    live.reset()
                else:
                    lives[name] = live = TorchLive(model)
                spans, spent, outs[name] = hops(live, waves["mic"], waves["far"], hop)
                times[name].append((np.median(spans), np.quantile(spans, 0.999), spent / words.seconds))
            for name, program in programs.items():
                spent, out = program(waves, int(model.sample_rate))
                program_times[name].append(spent)
                if out is not None:
                    outs[name] = out
        for name, row in rows.items():
            row |= dict(zip(("hop_us", "hop_us_999", "rtf"), map(statistics.median, zip(*times[name]))))
            row["hop_us"], row["hop_us_999"] = row["hop_us"] * 1e6, row["hop_us_999"] * 1e6
            row["best_rtf"] = min(part[2] for part in times[name])
            row["snr_db"] = None if name == "torch" else snr_db(outs[name], outs["torch"], late)
            figures = (
                f"{row['hop_us']:6.0f} us ({row['hop_us_999']:6.0f})  RTF {row['rtf']:.4f} (best {row['best_rtf']:.4f})"
            )
            extra = "" if name == "torch" else (
                f"  {row['snr_db']:6.1f} dB  {row['bytes'] / 1e6:.3f} MB  load {row['load_s']:.2f} s"
                + ("" if row["passed"] else "  REJECTED")
            )  # fmt: skip
            print(f"{name:20} {figures}{extra}")
        for name, spent in program_times.items():
            rows[name] = row = {"rtf": statistics.median(spent), "best_rtf": min(spent)}
            row |= {"snr_db": snr_db(outs[name], outs["torch"], late)} if name in outs else {}
            extra = f"  {row['snr_db']:6.1f} dB" if name in outs else ""
            print(f"{name:20} {'':18}  RTF {row['rtf']:.4f} (best {row['best_rtf']:.4f}){extra}")
        worst = chunkings(lives["onnx"], model, waves, words.chunkings) if "onnx" in lives else None
    if worst is not None:
        print(f"{words.chunkings} random chunkings and resets: differ from forward by at most {worst:.1e}")
    print(json.dumps({"rows": rows, "chunkings": worst, "cores": os.cpu_count(), "load": os.getloadavg()[0]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
