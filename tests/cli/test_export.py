"""python -m echofree.export, the end of a training with export=, and cancel with what they wrote."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cli.command import run_verb
from echofree import audio, checkpoint, rundir
from echofree.cancel import main as cancel_main
from echofree.config import frozen
from echofree.config.build import build_model
from echofree.config.compose import compose
from echofree.dist.world import World
from echofree.export import onnx as onnx_target
from echofree.export.__main__ import main

RATE_HZ = 16000
SHORT = "export.minutes=0.05"


def needs(*packages: str) -> None:
    for package in packages:
        pytest.importorskip(package, reason="needs echofree[export]")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint, as a training leaves it; its weights are random."""
    words = ["model=tiny", "model.hidden_size=16", "model.front_end.num_partitions=4"]
    config = compose(words).config
    folder = rundir.create(tmp_path_factory.mktemp("runs"), frozen.dump(config), ["train"], 0)
    torch.manual_seed(1)
    model = build_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    shared = {"model": model.state_dict()}
    checkpoint.save(folder / "checkpoints", 1, shared, checkpoint.random_state(), {"run_id": "a", "step": 1}, World())
    return folder


@pytest.fixture(scope="module")
def exported(run_dir: Path) -> Path:
    needs("onnx", "onnxscript", "onnxruntime")
    done = run_verb("export", f"checkpoint={run_dir}", SHORT, cwd=run_dir.parent, timeout=240).check(0)
    assert "onnx: agrees: differs by at most" in done.stdout
    return run_dir / "export" / "onnx"


@pytest.fixture
def waves(tmp_path, rng):
    """mic.wav and far.wav in tmp_path, 2 s of 16 bit."""
    far = rng.normal(0, 0.1, 2 * RATE_HZ).astype(np.float32)
    echo = np.convolve(far, rng.normal(0, 0.3, 400) * np.exp(-np.arange(400) / 80))[: len(far)]
    mic = (0.5 * echo + 0.02 * np.sin(np.arange(len(far)) / 7)).astype(np.float32)
    for name, wave in (("mic", mic), ("far", far)):
        audio.write(tmp_path / f"{name}.wav", wave, RATE_HZ, "PCM_16")
    return [audio.read(tmp_path / f"{name}.wav")[0] for name in ("mic", "far")]


def test_cancel_with_the_artifact_equals_cancel_with_the_checkpoint(run_dir, exported, waves, tmp_path):
    for model, out in ((run_dir, "a.wav"), (exported, "b.wav"), (exported / "model.onnx", "c.wav")):
        words = [f"model={model}", f"mic={tmp_path / 'mic.wav'}", f"far={tmp_path / 'far.wav'}"]
        assert cancel_main([*words, f"out={tmp_path / out}"]) == 0
    a, b, c = (audio.read(tmp_path / name)[0] for name in ("a.wav", "b.wav", "c.wav"))
    assert np.abs(a - b).max() <= 1.01 / 32768  # 16 bit: one step of rounding
    np.testing.assert_array_equal(b, c)
    assert np.abs(a - waves[0]).max() > 1e-3


def stream(model: str, data: bytes, *words: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "echofree.cancel", f"model={model}", *words]
    return subprocess.run(command, input=data, capture_output=True, timeout=120, check=False)


def test_stream_of_16_bit_equals_the_file(exported, waves, tmp_path):
    mic, far = (np.rint(wave * 32768).astype("<i2") for wave in waves)
    done = stream(str(exported), np.stack([mic, far], axis=1).tobytes(), "--stream", "rate=16000")
    assert done.returncode == 0, done.stderr
    assert b"late by 512 samples (32 ms)" in done.stderr
    out = np.frombuffer(done.stdout, "<i2")
    assert len(out) == len(mic) + 512
    words = [f"model={exported}", f"mic={tmp_path / 'mic.wav'}", f"far={tmp_path / 'far.wav'}"]
    assert cancel_main([*words, f"out={tmp_path / 'out.wav'}"]) == 0
    file = np.rint(audio.read(tmp_path / "out.wav")[0] * 32768)
    assert np.abs(out[512:] - file).max() <= 1


def test_stream_says_what_is_wrong(exported):
    assert b"rate=48000: this model runs at 16000 Hz" in stream(str(exported), b"", "--stream", "rate=48000").stderr
    assert b"give s16 or f32" in stream(str(exported), b"", "--stream", "format=mp3").stderr
    half = stream(str(exported), b"12345", "--stream")
    assert (half.returncode, b"in the middle of a sample" in half.stderr) == (2, True)
    nan = stream(str(exported), np.full((600, 2), np.nan, "<f4").tobytes(), "--stream", "format=f32")
    assert (nan.returncode, b"sample 0 of the input is NaN" in nan.stderr) == (2, True)


def test_a_reader_that_leaves_is_no_failure(exported):
    command = [sys.executable, "-m", "echofree.cancel", f"model={exported}", "--stream"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(bytes(400_000))
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert b"Traceback" not in said


def test_artifact_needs_no_torch(exported, waves, tmp_path):
    code = (
        "import sys; from echofree.cancel import main; "
        f"main(['model={exported}', 'mic={tmp_path / 'mic.wav'}', 'far={tmp_path / 'far.wav'}', "
        f"'out={tmp_path / 'o.wav'}']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_rejected_artifact_is_refused_by_cancel(exported, waves, tmp_path, capsys):
    bad = tmp_path / "onnx.rejected"
    bad.mkdir()
    for path in exported.iterdir():
        if path.is_file():
            (bad / path.name).write_bytes(path.read_bytes())
    content = json.loads((bad / "contract.json").read_text()) | {"status": "rejected"}
    (bad / "contract.json").write_text(json.dumps(content))
    words = [f"model={bad}", f"mic={tmp_path / 'mic.wav'}", f"far={tmp_path / 'far.wav'}", f"out={tmp_path / 'o.wav'}"]
    assert cancel_main(words) == 2
    assert "was rejected" in capsys.readouterr().err
    assert not (tmp_path / "o.wav").exists()


def test_linear_is_an_artifact_without_an_engine(tmp_path):
    needs("onnx", "onnxscript", "onnxruntime")
    assert main(["checkpoint=linear", f"out={tmp_path}", SHORT]) == 0
    contract = json.loads((tmp_path / "onnx" / "contract.json").read_text())
    assert (contract["engine"], contract["file"], contract["kind"]) == ("none", "", "linear")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export=onnx"], "checkpoint is missing"),
        (["checkpoint=nowhere"], "nowhere doesn't exist"),
        (["checkpoint=x", "export=onx"], "the group export has no option 'onx'"),
        (["checkpoint=x", "export=none"], "export=none writes nothing"),
        (["checkpoint=x", "export=onnx", "export.targets.onnx.opset=17"], "give 18 to 20"),
        (["checkpoint=x", "target=onnx"], "there is no key 'target'"),
    ],
)
def test_wrong_words_are_answered_before_the_work(words, said, capsys):
    pytest.importorskip("onnx")  # without it, that is the first thing to be said
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_missing_package_is_told_before_the_work(monkeypatch, capsys):
    monkeypatch.setattr(onnx_target, "find_spec", lambda name: None)
    assert main(["checkpoint=nowhere", "export=onnx"]) == 2
    said = capsys.readouterr().err
    assert "export=onnx needs the package 'onnx'" in said
    assert "pip install 'echofree[export]'" in said


WRONG = '''
from echofree.export.onnx import Onnx


class Wrong(Onnx):
    """Rounds a weight."""

    def write(self, graph, calibration, folder):
        import onnx
        import numpy as np
        from onnx import numpy_helper

        notes = super().write(graph, calibration, folder)
        model = onnx.load(folder / self.file)
        item = next(item for item in model.graph.initializer if item.name == "parts.network.unfold.weight")
        item.CopyFrom(numpy_helper.from_array(np.round(numpy_helper.to_array(item), 2), item.name))
        onnx.save(model, folder / self.file)
        return notes
'''
QUICK = ["debug=quick", "data.num_train=8", "data.num_valid=4", "train.batch_size=4", "data.num_workers=0", SHORT]


@pytest.mark.slow
def test_a_training_ends_with_a_checked_export(cli, tmp_path):
    needs("onnx", "onnxscript", "onnxruntime")
    done = cli("train", *QUICK, "export=onnx", "train.final_test=false", f"output_root={tmp_path}", timeout=280).check(
        0
    )
    assert "onnx: agrees" in done.text
    (run,) = tmp_path.glob("debug/*")
    facts = json.loads((run / "run.json").read_text())
    assert (facts["status"], facts["exports"]) == ("done", {"onnx": "agrees"})
    assert (run / "export" / "onnx" / "model.onnx").is_file()


@pytest.mark.slow
def test_a_failed_gate_fails_the_run_and_not_the_checkpoint(cli, tmp_path):
    needs("onnx", "onnxscript", "onnxruntime")
    home = tmp_path / "empty"
    (home / "experiments" / "export").mkdir(parents=True)
    (home / "experiments" / "wrong.py").write_text(WRONG)
    (home / "experiments" / "export" / "wrong.yaml").write_text(
        "targets:\n  wrong:\n    _target_: experiments.wrong.Wrong\n"
    )
    words = [*QUICK, "export=wrong", "train.final_test=false", f"output_root={tmp_path}"]
    done = cli("train", *words, cwd=home, timeout=280).check(1)
    assert "weights of network.unfold.weight" in done.text
    (run,) = tmp_path.glob("debug/*")
    facts = json.loads((run / "run.json").read_text())
    assert (facts["status"], facts["exports"]) == ("failed", {"wrong": "rejected"})
    assert (run / "export" / "wrong.rejected" / "alignment.json").is_file()
    assert checkpoint.damage(checkpoint.find(run)) == ""
