"""The demo's folder and what it refuses; its linear stage in JavaScript beside the one in numpy (needs node). The page
itself is tried in tests/browser."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
import soundfile

from echofree.demo import __main__ as verb
from echofree.demo import package
from echofree.demo.folder import build, exported
from echofree.errors import CheckpointError, ConfigError, UserError
from echofree.export.base import describe
from echofree.export.onnx import Onnx
from echofree.model.linear import Linear
from echofree.runtime.contract import CHECKED
from echofree.runtime.linear import LinearStage

WEB = Path(verb.__file__).parent / "web"


def linear_artifact(folder: Path, **options) -> Path:
    model = Linear(**options).eval()
    contract = describe(model, None, "onnx", Onnx(), "a checkpoint")
    contract.status = CHECKED
    folder.mkdir()
    contract.save(folder)
    return folder


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for onnxruntime-web, whose checksum counts as the right one."""
    path = tmp_path / package.FILE
    with tarfile.open(path, "w:gz") as archive:
        for name in package.PARTS:
            entry = tarfile.TarInfo(name)
            entry.size = len(name)
            archive.addfile(entry, io.BytesIO(name.encode()))
    monkeypatch.setattr(package, "SHA512", base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode())
    return path


def test_the_folder_is_complete(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = linear_artifact(tmp_path / "a"), tmp_path / "site" / "demo"
    assert verb.main([f"artifact={source}", f"out={out}", f"package={engine}"]) == 0
    assert f"python -m http.server --directory {out} 8000" in capsys.readouterr().out
    assert (out / "ort/ort.js").read_text() == "package/dist/ort.wasm.min.mjs"
    for name in WEB.iterdir():
        assert (out / name.name).read_bytes() == name.read_bytes()
    page = (out / "index.html").read_text() + "".join(path.read_text() for path in WEB.glob("*.js"))
    for named in re.findall(r'(?:src|href)="([^":]+)"|(?:from |new Worker\(|addModule\()"(?:\./)?([\w./-]+)"', page):
        assert (out / (named[0] or named[1])).is_file(), named
    waves = [soundfile.read(out / "sample" / f"{name}.wav") for name in ("mic", "far")]
    assert [len(wave) for wave, _ in waves] == [160_000] * 2
    assert all(np.std(wave) > 1e-3 for wave, _ in waves)
    assert json.loads((out / "artifact/contract.json").read_text())["kind"] == "linear"
    (out / "old.js").write_text("from an earlier version")
    build(exported(source), engine, out)  # again: replaced as a whole
    assert not (out / "old.js").exists()
    assert [path.name for path in out.parent.iterdir()] == ["demo"]


def test_first_states_become_floats(engine: Path, tmp_path: Path) -> None:
    source = linear_artifact(tmp_path / "a")
    content = json.loads((source / "contract.json").read_text())
    names = ["b", "a"]
    content["states"] = [{"name": n, "input": n, "output": f"next_{n}", "shape": [1, 2]} for n in names]
    content["initial"] = "initial.npz"
    (source / "contract.json").write_text(json.dumps(content))
    np.savez(source / "initial.npz", a=np.array([[3.0, 4.0]]), b=np.array([[1.0, 2.0]]))
    build(exported(source), engine, tmp_path / "out")
    assert np.fromfile(tmp_path / "out/artifact/initial.f32", "<f4").tolist() == [1, 2, 3, 4]


def test_what_cannot_work_is_refused(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = linear_artifact(tmp_path / "a")
    content = json.loads((source / "contract.json").read_text())
    (source / "contract.json").write_text(json.dumps(content | {"engine": "litert"}))
    with pytest.raises(CheckpointError, match="export=onnx"):
        exported(source)
    (source / "contract.json").write_text(json.dumps(content))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    for words, said in (
        ([], "checkpoint=linear"),
        (["checkpoint=x", "artifact=y"], "either"),
        ([f"artifact={source}", f"out={tmp_path}/mine"], "holds something else"),
        ([f"artifact={source}", "minutes=long"], "minutes=long"),
        ([f"artifact={source}", f"package={tmp_path}/none.tgz"], f"npm pack {package.NAME}"),
    ):
        assert verb.main([*words, *([] if "out=" in str(words) else [f"out={tmp_path}/new"])]) == 2
        assert said in capsys.readouterr().err
    assert (tmp_path / "mine/file").exists()
    assert not (tmp_path / "new").exists()


def test_without_npm_the_file_and_its_place_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(UserError, match=f"npm pack {package.NAME}.*{tmp_path}/echofree/{package.FILE}"):
        package.find()
    npm = tmp_path / "empty/npm"
    npm.parent.mkdir()
    npm.write_text("#!/bin/sh\necho 'network is unreachable' >&2\nexit 1\n")
    npm.chmod(0o755)
    with pytest.raises(UserError, match=r"network is unreachable.*package=/path/to/"):
        package.find()
    npm.write_text(f"#!/bin/sh\necho other > {package.FILE}\n")
    with pytest.raises(ConfigError, match=r"isn't .* as published"):
        package.find()
    assert not package.kept().exists()


def test_the_numbers_are_those_of_the_contract() -> None:
    """No tuning in the scripts: what a contract states is read by name, and all of it."""
    numbers = describe(Linear(), None, "onnx", Onnx(), "").front_end
    assert numbers is not None
    text = "".join((WEB / name).read_text() for name in ("linear.js", "shadow.js", "delay.js", "drift.js", "kalman.js"))
    names = [*numbers, *numbers["shadow"], *numbers["delay"], *numbers["delay"]["drift"]]
    assert [name for name in names if not re.search(rf"\bn\.{name}\b", text)] == []


SCRIPT = """
import fs from "node:fs";
import { LinearStage } from "./linear.js";
const { front_end, sample_rate, hop_samples } = JSON.parse(fs.readFileSync("contract.json"));
const read = (name) => new Float32Array(new Uint8Array(fs.readFileSync(name)).buffer);
const mic = read("mic.f32"), far = read("far.f32"), out = new Float32Array(4 * mic.length);
const stage = new LinearStage(front_end, sample_rate, hop_samples);
for (let at = 0; at < mic.length; at += hop_samples) {
  stage.step(mic.subarray(at, at + hop_samples), far.subarray(at, at + hop_samples));
  ["mic", "echo", "error", "far"].forEach((name, row) => out.set(stage[name], row * mic.length + at));
}
fs.writeFileSync("out.f32", out);
fs.writeFileSync("flags.json", JSON.stringify(stage.flags()));
"""


def scene(rng: np.random.Generator, rate: int, seconds: float, trouble: str) -> tuple[np.ndarray, np.ndarray]:
    """Coloured noise in syllables through a decaying path, a talker for a while; and something that goes wrong."""
    num, delay = int(seconds * rate), int(0.1 * rate)
    gate = np.repeat(rng.random(num // 3200 + 1) > 0.3, 3200)[:num]
    far = 0.1 * np.convolve(rng.standard_normal(num), [1, 0.9, 0.5], "same") * gate
    path = 0.4 * rng.standard_normal(1200) * np.exp(-np.arange(1200) / 250)
    echo = np.convolve(np.pad(far, (delay, 0)), path)[:num]
    near = 0.05 * rng.standard_normal(num) * (np.arange(num) % (2 * rate) > rate)
    if trouble == "the path changes":
        echo[num // 2 :] = -0.5 * np.roll(echo, 40)[num // 2 :]
    mic = echo + near + 1e-4 * rng.standard_normal(num)
    if trouble == "clipping":
        mic = np.clip(6 * mic, -0.3, 0.3)
    elif trouble == "mic ahead":
        far = np.pad(far, (rate // 3, 0))[:num]
    elif trouble == "no echo":
        mic = 0.1 * rng.standard_normal(num)
    elif trouble == "drift":
        mic = np.interp(np.arange(num) * (1 - 4e-4), np.arange(num), mic)
    return mic.astype(np.float32), far.astype(np.float32)


@pytest.mark.parametrize(
    ("options", "trouble"),
    [
        ({}, "the path changes"),
        ({}, "drift"),
        pytest.param({}, "clipping", marks=pytest.mark.slow),
        pytest.param({}, "mic ahead", marks=pytest.mark.slow),
        pytest.param({}, "no echo", marks=pytest.mark.slow),
        ({"output": "prior", "max_delay_ms": 0.0}, "none"),
        ({"hop_samples": 160, "num_partitions": 16}, "none"),
        ({"sample_rate": 8000, "hop_samples": 128, "num_partitions": 4}, "none"),
    ],
    ids=str,
)
def test_the_linear_stage_in_javascript_equals_numpy(tmp_path: Path, rng, options, trouble) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here: apt-get install nodejs")
    folder = linear_artifact(tmp_path / "a", **options)
    contract = json.loads((folder / "contract.json").read_text())
    rate, hop = contract["sample_rate"], contract["hop_samples"]
    mic, far = (wave[: len(wave) // hop * hop] for wave in scene(rng, rate, 4.0 if trouble == "none" else 8.0, trouble))
    stage, rows = LinearStage(contract["front_end"], rate, hop), []
    for at in range(0, len(mic), hop):
        stage.step(mic[at : at + hop], far[at : at + hop])
        rows.append(np.stack([stage.mic, stage.echo, stage.error, stage.far]))
    for path in WEB.glob("*.js"):
        shutil.copy(path, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "run.js").write_text(SCRIPT)
    mic.tofile(folder / "mic.f32")
    far.tofile(folder / "far.f32")
    done = subprocess.run([node, "run.js"], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    out = np.fromfile(folder / "out.f32", np.float32).reshape(4, -1)
    assert np.abs(out - np.concatenate(rows, axis=1)).max() < 2e-5
    flags, expected = json.loads((folder / "flags.json").read_text()), stage.flags()
    assert flags.keys() == expected.keys()
    for name, value in expected.items():
        assert flags[name] == pytest.approx(value, rel=1e-3, abs=1e-2), name
