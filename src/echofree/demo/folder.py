"""The folder: pages and scripts, the artifact, the engine, and a pair of sounds to try."""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from echofree.demo import package
from echofree.errors import CheckpointError, ConfigError
from echofree.runtime.contract import NAME, Contract, read

ENGINES = ("onnxruntime", "none")
MARK = "demo.json"  # a folder that holds it was made by this verb, and may be replaced
SAMPLE_SEED, SAMPLE_S = 9, 10.0
SAMPLE_SCENE = {  # two talkers in one room, nothing out of the ordinary
    "scenario_probability": [1.0, 0.0, 0.0, 0.0],
    "far_probability": [1.0, 0.0, 0.0],
    "far_snr_db": [35, 40],
    "far_peak_db": [-8, -3],
    "far_level_jump_probability": 0.0,
    "drift_probability": 0.0,
    "delay_jump_probability": 0.0,
    "glitch_probability": 0.0,
    "path_change_probability": 0.0,
    "delay_ms": [40, 80],
    "ser_db": [-2, 2],
    "snr_db": [30, 35],
}


@dataclass(frozen=True)
class Exported:
    """An artifact that the page can run."""

    contract: Contract
    folder: Path


def exported(path: Path) -> Exported:
    """Reads an artifact.

    Raises:
        CheckpointError: none, a rejected one, or one of an engine that browsers don't have.
    """
    contract, folder = read(path)
    if contract.engine not in ENGINES:
        raise CheckpointError(
            f"{path} is for {contract.engine}, a browser runs ONNX. Type: python -m echofree.export "
            f"checkpoint={contract.source} export=onnx"
        )
    return Exported(contract, folder)


def usable(out: Path) -> None:
    """Raises ConfigError unless the folder can be made, or was made by an earlier call."""
    if out.exists() and not (out / MARK).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"out={out} exists and holds something else. Give another folder, such as out={out}/demo")


def build(source: Exported, engine: Path, out: Path) -> int:
    """Writes the folder, whole or not at all. -> its size in bytes

    Args:
        source: the artifact.
        engine: the file of `package.find`.
        out: see `usable`.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.parent / f".{out.name}-{uuid.uuid4().hex[:8]}"
    try:
        part.mkdir()
        with resources.as_file(resources.files("echofree.demo") / "web") as web:
            for file in sorted(web.iterdir()):
                if file.suffix in (".html", ".css", ".js"):
                    shutil.copyfile(file, part / file.name)
        package.unpack(engine, part / "ort")
        _artifact(source, part / "artifact")
        _sample(part / "sample", source.contract.sample_rate)
        about = {"version": source.contract.version, "engine": package.NAME, "source": source.contract.source}
        (part / MARK).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(out, ignore_errors=True)
        part.replace(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return sum(file.stat().st_size for file in out.rglob("*") if file.is_file())


def _artifact(source: Exported, folder: Path) -> None:
    """Contract, graph, and the states' first values as float32 in the contract's order: a browser reads no npz."""
    folder.mkdir()
    contract = source.contract
    content = json.loads((source.folder / NAME).read_text(encoding="utf-8"))
    if contract.initial:
        with np.load(source.folder / contract.initial) as stored:
            values = [np.ascontiguousarray(stored[state.name], "<f4").reshape(-1) for state in contract.states]
        content["initial"] = "initial.f32"
        (folder / content["initial"]).write_bytes(np.concatenate(values).tobytes())
    (folder / NAME).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if contract.file:
        shutil.copyfile(source.folder / contract.file, folder / contract.file)


def _sample(folder: Path, rate_hz: int) -> None:
    """mic.wav and far.wav: a scene of the test split, both sides talk, made from the embedded speech."""
    from echofree import audio
    from echofree.data.synthetic import Synthetic

    folder.mkdir()
    source = Synthetic(
        seed=SAMPLE_SEED, sample_rate=rate_hz, test_segment_s=SAMPLE_S, num_train=1, num_valid=1, num_test=1,
        num_rooms=1, scene=SAMPLE_SCENE,
    )  # fmt: skip
    scenes = source.split("test")
    assert scenes is not None  # num_test says so
    clip = scenes.item(0, epoch=0)
    for name in ("mic", "far"):
        audio.write(folder / f"{name}.wav", getattr(clip, name), rate_hz, "PCM_16")
