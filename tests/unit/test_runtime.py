"""The runtime: the numpy linear stage beside the torch one, streams of any chunking, and what it refuses. No engine."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.signal
import torch

from echofree import dsp
from echofree.errors import CheckpointError, DataError
from echofree.export.base import describe
from echofree.export.onnx import Onnx
from echofree.model.linear import Linear
from echofree.model.streaming import Stream
from echofree.runtime import Canceller, design
from echofree.runtime.contract import CHECKED, FORMAT, REJECTED

RATE = 16000


@pytest.fixture(autouse=True)
def one_thread():
    """The steps of one stream are too small to share: on a busy machine a second thread costs ten times."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def linear_artifact(folder: Path, status: str = CHECKED, **options) -> tuple[Linear, Path]:
    """A model without a network, as the exporter describes it."""
    model = Linear(**options).eval()
    contract = describe(model, None, "onnx", Onnx(), "a checkpoint")
    contract.status = status
    folder.mkdir(exist_ok=True)
    contract.save(folder)
    return model, folder


def scene(rng: np.random.Generator, seconds: float, delay_ms: float = 100.0) -> tuple[np.ndarray, np.ndarray]:
    """Coloured noise in syllables through a decaying echo path, a talker in the second half."""
    num, delay = int(seconds * RATE), int(delay_ms * RATE / 1000)
    gate = np.repeat(rng.random(num // 3200 + 1) > 0.3, 3200)[:num]
    far = 0.1 * np.convolve(rng.standard_normal(num), [1, 0.9, 0.5], "same") * gate
    path = 0.4 * rng.standard_normal(1200) * np.exp(-np.arange(1200) / 250)
    echo = np.convolve(np.pad(far, (delay, 0)), path)[:num]
    near = 0.05 * rng.standard_normal(num) * (np.arange(num) > num // 2)
    return (echo + near + 1e-4 * rng.standard_normal(num)).astype(np.float32), far.astype(np.float32)


def reference_of(model: Linear, mic: np.ndarray, far: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
    """What a stream of the model gives, by its faster offline path, and the flags."""
    out = model.front(torch.from_numpy(mic)[None], torch.from_numpy(far)[None], details=True)
    late = np.pad(out["error"][0].numpy(), (model.latency_samples, 0))[: len(mic)]
    return late, {name: value[0].item() for name, value in out["flags"].items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"output": "prior", "max_delay_ms": 0.0},
        {"hop_samples": 160, "num_partitions": 16},
        {"sample_rate": 8000, "hop_samples": 128, "num_partitions": 4, "transition": 0.9995},
    ],
)
def test_linear_stage_equals_torch(tmp_path, rng, options):
    model, folder = linear_artifact(tmp_path / "a", **options)
    mic, far = scene(rng, 8.0)
    canceller = Canceller.load(folder)
    out = canceller.process(mic, far)
    reference, _ = reference_of(model, mic, far)
    assert np.abs(out - reference).max() < 1e-5
    assert np.std(reference[RATE:]) < 0.9 * np.std(mic[RATE:])  # it did something
    assert canceller.latency_samples == model.latency_samples


@pytest.mark.parametrize(
    "trouble", ["clipping", "silent far", "no echo", "mic ahead", "int16 scale", "dc", "level jump"]
)
def test_linear_stage_equals_torch_in_trouble(tmp_path, rng, trouble):
    mic, far = scene(rng, 6.0)
    if trouble == "clipping":
        mic = np.clip(6 * mic, -0.3, 0.3)
    elif trouble == "silent far":
        far[RATE : 4 * RATE] = 0
    elif trouble == "no echo":
        mic = (0.1 * rng.standard_normal(len(far))).astype(np.float32)
    elif trouble == "mic ahead":
        far = np.pad(far, (4800, 0))[: len(mic)]
    elif trouble == "int16 scale":
        mic = (mic * 32768).astype(np.float32)
    elif trouble == "dc":
        mic = mic + np.float32(0.2)
    else:
        mic[len(mic) // 2 :] *= 8
    model, folder = linear_artifact(tmp_path / "a")
    canceller = Canceller.load(folder)
    out, scale = canceller.process(mic, far), max(1.0, float(np.abs(mic).max()))
    reference, expected = reference_of(model, mic, far)
    assert np.abs(out - reference).max() < 2e-5 * scale
    found = canceller.flags()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-2, rel=1e-3), name


def test_equals_the_stream_of_torch(tmp_path, rng):
    model, folder = linear_artifact(tmp_path / "a")
    mic, far = scene(rng, 1.5)
    assert np.abs(Canceller.load(folder).process(mic, far) - Stream(model).process(mic, far)).max() < 5e-6  # of 3


def test_any_chunking_gives_the_same_samples(tmp_path, rng):
    _, folder = linear_artifact(tmp_path / "a")
    mic, far = scene(rng, 2.0)
    canceller = Canceller.load(folder)
    whole = canceller.process(mic, far)
    for largest in (1, 3, 160, 441, 4096):
        canceller.reset()
        count = len(mic) if largest > 3 else 3000
        parts, at = [], 0
        while at < count:
            size = int(rng.integers(0, largest + 1))
            parts.append(canceller.process(mic[at : at + size][: count - at], far[at : at + size][: count - at]))
            at += size
        np.testing.assert_array_equal(np.concatenate(parts)[:count], whole[:count])


def test_two_streams_do_not_mix(tmp_path, rng):
    _, folder = linear_artifact(tmp_path / "a")
    scenes = [scene(rng, 1.5), scene(rng, 1.5, 20.0)]
    first = Canceller.load(folder)
    alone = []
    for mic, far in scenes:
        first.reset()
        alone.append(first.process(mic, far))
    first.reset()
    pair = [first, first.twin()]
    mixed: list[list[np.ndarray]] = [[], []]
    for at in range(0, len(scenes[0][0]), 300):
        for i, (mic, far) in enumerate(scenes):
            mixed[i].append(pair[i].process(mic[at : at + 300], far[at : at + 300]))
    for i in range(2):
        np.testing.assert_array_equal(np.concatenate(mixed[i]), alone[i])


def test_int16_in_int16_out(tmp_path, rng):
    _, folder = linear_artifact(tmp_path / "a")
    mic, far = (np.round(x * 32768).clip(-32768, 32767).astype(np.int16) for x in scene(rng, 1.0))
    mic[100:110], far[200:210] = -32768, 32767
    canceller = Canceller.load(folder)
    out = canceller.process(mic, far)
    assert out.dtype == np.int16
    canceller.reset()
    as_float = canceller.process(mic.astype(np.float32) / 32768, far / np.float32(32768))
    assert as_float.dtype == np.float32
    np.testing.assert_array_equal(out, np.clip(np.rint(as_float * 32768), -32768, 32767).astype(np.int16))


def test_without_a_far_end_nothing_is_playing(tmp_path, rng):
    _, folder = linear_artifact(tmp_path / "a")
    mic, _ = scene(rng, 0.5)
    canceller = Canceller.load(folder)
    out = canceller.process(mic, None)
    canceller.reset()
    np.testing.assert_array_equal(out, canceller.process(mic, np.zeros_like(mic)))
    with pytest.raises(DataError, match=r"mic is object|two arrays"):
        canceller.process(None, mic)


def test_a_stream_that_is_reset_at_every_chunk_warns(tmp_path):
    _, folder = linear_artifact(tmp_path / "a")
    canceller, x = Canceller.load(folder), np.zeros(512, np.float32)
    for _ in range(4):
        canceller.process(x, x)
        canceller.reset()
    canceller.process(x, x)
    with pytest.warns(UserWarning, match="reset 5 times in a row"):
        canceller.reset()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(9):  # calls of 0.2 s, and resets without anything between, are nobody's mistake
            canceller.process(np.zeros(3200), np.zeros(3200))
            canceller.reset()
            canceller.reset()
    assert told == []


def test_flush_gives_what_is_owed(tmp_path, rng):
    _, folder = linear_artifact(tmp_path / "a")
    mic, far = scene(rng, 1.0)
    canceller = Canceller.load(folder)
    head = canceller.process(mic[:9000], far[:9000])
    est = np.concatenate([head, canceller.flush()])[canceller.latency_samples :]
    assert len(est) == 9000
    canceller.reset()
    longer = canceller.process(np.pad(mic[:9000], (0, 256)), np.pad(far[:9000], (0, 256)))
    np.testing.assert_array_equal(est, longer[256:])


@pytest.mark.parametrize(
    ("mic", "far", "said"),
    [
        (np.zeros(4), np.zeros(5), r"one length"),
        (np.zeros((1, 4)), np.zeros((1, 4)), r"two arrays \[n\]"),
        (np.zeros(4, np.int32), np.zeros(4, np.int32), "mic is int32"),
        (np.zeros(4), [0, 1, 2, 3], "far is int64"),
        (bytes(8), np.zeros(8), r"two arrays \[n\]"),
        (bytearray(8), np.zeros(8), "mic is uint8"),
        (np.array([0, np.nan]), np.zeros(2), "mic holds 1 samples that are NaN"),
        (np.zeros(2), np.array([np.inf, np.nan]), "far holds 2 samples that are NaN or infinite"),
    ],
)
def test_bad_chunks_are_refused_and_leave_no_trace(tmp_path, rng, mic, far, said):
    _, folder = linear_artifact(tmp_path / "a")
    canceller = Canceller.load(folder)
    good = scene(rng, 0.5)
    whole = canceller.process(*good)
    canceller.reset()
    half = [canceller.process(good[0][:999], good[1][:999])]
    with pytest.raises(DataError, match=said):
        canceller.process(mic, far)
    half.append(canceller.process(good[0][999:], good[1][999:]))
    np.testing.assert_array_equal(np.concatenate(half), whole)


def test_long_streams_do_not_grow(tmp_path, rng):
    _, folder = linear_artifact(tmp_path / "a")
    canceller, out = Canceller.load(folder), np.empty(256, np.float32)
    mic, far = scene(rng, 1.0)
    for _ in range(300):
        canceller.process(mic[:256], far[:256], out)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for i in range(600):
        at = 256 * (i % 60)
        canceller.process(mic[at : at + 256], far[at : at + 256], out)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 20_000


def test_rejected_changed_and_foreign_artifacts_are_refused(tmp_path):
    _, folder = linear_artifact(tmp_path / "a", status=REJECTED)
    with pytest.raises(CheckpointError, match=r"was rejected.*alignment\.json"):
        Canceller.load(folder)
    with pytest.raises(CheckpointError, match="no exported model"):
        Canceller.load(tmp_path)
    path = folder / "contract.json"
    content = json.loads(path.read_text()) | {"status": CHECKED}
    (folder / "model.onnx").write_bytes(b"other")
    path.write_text(json.dumps(content | {"file": "model.onnx", "sha256": "0" * 64}))
    with pytest.raises(CheckpointError, match="isn't the file that was exported"):
        Canceller.load(folder)
    path.write_text(json.dumps(content | {"format": 1}))
    with pytest.raises(CheckpointError, match=f"another format than {FORMAT}"):
        Canceller.load(folder)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="can't be read"):
        Canceller.load(folder)


def test_neither_torch_nor_hydra_is_imported(tmp_path):
    _, folder = linear_artifact(tmp_path / "a")
    code = (
        "import sys, numpy as np; from echofree.runtime import Canceller; "
        f"Canceller.load({str(folder)!r}).process(np.zeros(999), np.zeros(999)); "
        "print([m for m in ('torch', 'scipy', 'hydra', 'omegaconf', 'soundfile', 'onnxruntime') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_design_is_that_of_the_model():
    np.testing.assert_allclose(design.vorbis_window(320), dsp.vorbis_window(320), atol=1e-7)
    for mine, theirs in ((design.dc_blocker, dsp.dc_blocker), (design.high_pass, dsp.high_pass)):
        for a, b in zip(mine(80.0, RATE), theirs(80.0, RATE)):
            np.testing.assert_array_equal(a, b)
    b, a = dsp.high_pass(80.0, RATE)
    np.testing.assert_allclose(design.frequency_response(b, a, 257), dsp.frequency_response(b, a, 257), atol=1e-12)
    np.testing.assert_allclose(design.decimation_matrix(4, 256, 32), dsp.decimation_matrix(4, 256, 32), atol=1e-7)


@pytest.mark.parametrize("hop", [256, 160, 120, 97])
def test_block_filter_is_the_recursion(rng, hop):
    for b, a in (design.dc_blocker(5.0, RATE), design.high_pass(80.0, RATE)):
        x = rng.standard_normal((2, 7 * hop)).astype(np.float32)
        block, parts = design.BlockIir(b, a, hop, 2), []
        for _ in range(2):  # the second time after a reset
            block.reset()
            parts = []
            for at in range(0, x.shape[1], hop):
                block.x[:] = x[:, at : at + hop]
                parts.append(block.run().copy())
        expected = scipy.signal.lfilter(b, a, x.astype(np.float64), axis=-1)
        assert np.abs(np.concatenate(parts, axis=1) - expected).max() < 2e-5  # float32 against float64
