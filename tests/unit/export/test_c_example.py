"""The C example, built here: it agrees with the golden vectors and with the Python runtime."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from small_models import make

from echofree.export.onnx import Onnx
from echofree.export.quantize import OnnxInt8
from echofree.export.run import export
from echofree.runtime import Canceller

SOURCE = Path(__file__).resolve().parents[3] / "examples" / "c"
RATE = 16000


@pytest.fixture(scope="module")
def library() -> Path:
    spec = find_spec("onnxruntime")
    if spec is None or spec.origin is None or find_spec("onnx") is None or find_spec("onnxscript") is None:
        pytest.skip("needs echofree[export]")
    found = sorted((Path(spec.origin).parent / "capi").glob("libonnxruntime.so*"))
    if not found:
        pytest.skip("this onnxruntime brings no C library")
    return found[0]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None or shutil.which("make") is None:
        pytest.skip("needs a C compiler and make")
    folder = tmp_path_factory.mktemp("c")
    for name in ("echofree.c", "Makefile"):
        shutil.copy(SOURCE / name, folder)
    flags = "-O2 -Werror -fsanitize=undefined -fno-sanitize-recover"
    subprocess.run(
        ["make", f"CFLAGS={flags} -std=c11 -D_GNU_SOURCE -Wall -Wextra"], cwd=folder, check=True, timeout=120
    )
    return folder / "echofree"


def run(program: Path, library: Path, *words: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "ONNXRUNTIME_LIB": str(library)}
    return subprocess.run([program, *words], env=env, capture_output=True, text=True, timeout=60, check=False)


def scene(rng: np.random.Generator, delay: int) -> tuple[np.ndarray, np.ndarray]:
    """6 s with a bulk delay that has to be found, and clipping at the end."""
    num = 6 * RATE
    far = (0.1 * np.convolve(rng.standard_normal(num), [1, 0.8], "same")).astype(np.float32)
    path = 0.4 * rng.standard_normal(700) * np.exp(-np.arange(700) / 150)
    mic = np.convolve(np.pad(far, (delay, 0)), path)[:num] + 1e-3 * rng.standard_normal(num)
    mic[4 * RATE :] = np.clip(4 * mic[4 * RATE :], -0.2, 0.2)
    return mic.astype(np.float32), far


def test_agrees_with_the_golden_vectors_and_the_runtime(program, library, tmp_path, rng):
    cases = [("linear", Onnx()), ("tiny", Onnx()), ("tiny", OnnxInt8()), ("small", Onnx())]
    mic, far = scene(rng, 1500)
    for name, wave in (("mic", mic), ("far", far)):
        sf.write(tmp_path / f"{name}.wav", wave, RATE, subtype="FLOAT")
    for number, (name, exporter) in enumerate(cases):
        model = make(name, spread=0.02)
        (outcome,) = export(model, {"target": exporter}, tmp_path / str(number), "x", 0.05, lambda text: None)
        assert outcome.problems == []
        assert outcome.folder is not None
        golden, late, out = outcome.folder / "golden", model.latency_samples, tmp_path / "out.wav"
        done = run(program, library, outcome.folder, golden / "mic.wav", golden / "far.wav", out)
        assert done.returncode == 0, done.stderr
        assert f"late by {late} samples" in done.stdout
        made, wanted = (sf.read(path, dtype="float32")[0] for path in (out, golden / "out.wav"))
        whole = len(made) // model.hop_samples * model.hop_samples
        bound = 1e-4 if exporter.precision == "float32" else 1e-2
        assert np.abs(made - wanted)[late:whole].max() < bound, name
        assert run(program, library, outcome.folder, tmp_path / "mic.wav", tmp_path / "far.wav", out).returncode == 0
        made, canceller = sf.read(out, dtype="float32")[0], Canceller.load(outcome.folder)
        assert np.abs(made - canceller.process(mic, far)).max() < bound, name
        assert canceller.flags()["delay_samples"] == pytest.approx(1600, abs=300)  # it was found


def test_says_what_is_wrong(program, library, tmp_path):
    assert "usage: echofree" in run(program, library).stderr
    (tmp_path / "contract.json").write_text('{"status": "rejected"}')
    wav = tmp_path / "a.wav"
    done = run(program, library, tmp_path, wav, wav, wav)
    assert (done.returncode, "doesn't agree with its model" in done.stderr) == (1, True)
    assert "can't read" in run(program, library, tmp_path / "none", wav, wav, wav).stderr
