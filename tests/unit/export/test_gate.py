"""An artifact agrees with its model, or it's refused: right and deliberately wrong converters. ONNX as the format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
import torch
from small_models import make

from echofree.errors import CheckpointError, ConfigError
from echofree.export import __main__ as verb
from echofree.export import gate
from echofree.export.base import Bounds, Calibration, Exporter, ExportError
from echofree.export.onnx import Onnx
from echofree.export.run import export
from echofree.model.graph import StreamGraph, stream_graph
from echofree.runtime import Canceller

onnx = pytest.importorskip("onnx", reason="needs echofree[export]")
pytest.importorskip("onnxscript", reason="needs echofree[export]")
pytest.importorskip("onnxruntime", reason="needs echofree[export]")
MINUTES = 0.05


class Wrong:
    """An ONNX converter that spoils the file in one place.

    Args:
        spoil: changes the onnx model in place.
    """

    engine, file, precision = "onnxruntime", "model.onnx", "float32"

    def __init__(self, spoil):
        self.inner, self.spoil = Onnx(), spoil
        self.bounds = self.inner.bounds

    def require(self) -> None:
        self.inner.require()

    def write(self, graph: StreamGraph, calibration: Calibration, folder: Path) -> list[str]:
        notes = self.inner.write(graph, calibration, folder)
        model = onnx.load(folder / self.file)
        self.spoil(model)
        onnx.save(model, folder / self.file)
        return notes

    def weights(self, folder: Path) -> dict[str, np.ndarray]:
        return self.inner.weights(folder)


def export_one(model, folder: Path, exporter: Exporter):
    said: list[str] = []
    (outcome,) = export(model, {"onnx": exporter}, folder, "a checkpoint", MINUTES, said.append)
    return outcome, "\n".join(said)


@pytest.fixture(scope="module")
def tiny():
    return make("tiny")


@pytest.fixture(scope="module")
def shipped(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shipped")
    (folder / "onnx.rejected").mkdir()  # of an earlier try; both are replaced
    (folder / "onnx").mkdir()
    (folder / "onnx" / "old").touch()
    outcome, said = export_one(tiny, folder, Onnx())
    assert outcome.problems == [], said
    return outcome.folder


def test_a_right_artifact_ships_whole(shipped, tiny):
    assert [p.name for p in shipped.parent.iterdir()] == ["onnx"]
    assert sorted(p.name for p in shipped.iterdir()) == ["alignment.json", "contract.json", "golden", "model.onnx"]
    contract = json.loads((shipped / "contract.json").read_text())
    assert contract["status"] == "checked"
    assert contract["split"] == {"front_end": "runtime", "transform": "runtime", "network": "graph"}
    assert {s["name"]: s["shape"] for s in contract["states"]}["gru"] == [1, 1, 24]
    assert (contract["sample_rate"], contract["hop_samples"], contract["latency_samples"]) == (16000, 256, 512)
    alignment = json.loads((shipped / "alignment.json").read_text())
    assert alignment["passed"]
    assert not alignment["torch_imported"]
    assert set(alignment["takes"]) == {
        "long", "after reset", "odd chunks", "silence", "clipping", "16 bit extremes", "two at once", "its twin",
    }  # fmt: skip
    for take in alignment["takes"].values():
        assert take["finite"]
        assert take["max"] <= max(1e-4, 4 * take.get("model_rounding", 0.0))
    assert {"gru", "levels", "front_end.kalman.weight"} <= set(alignment["states"])
    assert len(alignment["weights"]) >= 30
    assert max(alignment["weights"].values()) < 1e-6
    assert {"hop_us_median", "hop_us_999", "load_s", "peak_memory_mb"} <= set(alignment["cost"])


def test_golden_waves_and_steps_agree(shipped):
    mic, far, out = (sf.read(shipped / "golden" / f"{name}.wav", dtype="float32")[0] for name in ("mic", "far", "out"))
    canceller = Canceller.load(shipped)
    made = canceller.process(mic, far)
    late = canceller.latency_samples
    assert np.abs(made - out)[late:].max() < 1e-4
    with np.load(shipped / "golden" / "steps.npz") as steps:
        numbers = sorted({int(key.split("/")[0]) for key in steps.files})
        runner, contract = canceller.runner, canceller.contract
        assert len(numbers) == 4
        for number in numbers:
            runner.inputs[0][...] = steps[f"{number}/spectra"]
            runner.load_states({s.name: steps[f"{number}/{s.input}"] for s in contract.states})
            np.testing.assert_allclose(runner.run(), steps[f"{number}/spectrum"], atol=1e-4)
            for state in contract.states:
                expected = steps[f"{number}/{state.output}"]
                np.testing.assert_allclose(runner.states()[state.name], expected, atol=1e-4, err_msg=state.name)


def hand_through(state: str):
    """The output of a state becomes its input: never updated."""

    def spoil(model) -> None:
        for node in model.graph.node:
            node.output[:] = [f"lost_{state}" if name == f"next_{state}" else name for name in node.output]
            node.input[:] = [f"lost_{state}" if name == f"next_{state}" else name for name in node.input]
        model.graph.node.append(onnx.helper.make_node("Identity", [state], [f"next_{state}"]))

    return spoil


def round_weight(name: str):
    """One layer's weights, rounded to a percent of the largest."""

    def spoil(model) -> None:
        from onnx import numpy_helper

        item = next(item for item in model.graph.initializer if item.name == name)
        value = numpy_helper.to_array(item)
        step = np.abs(value).max() / 100
        item.CopyFrom(numpy_helper.from_array((np.round(value / step) * step).astype(np.float32), name))

    return spoil


def test_a_state_that_is_not_updated_is_refused_and_named(tiny, tmp_path):
    outcome, said = export_one(tiny, tmp_path, Wrong(hand_through("gru")))
    assert outcome.folder == tmp_path / "onnx.rejected"
    assert [p.name for p in tmp_path.iterdir()] == ["onnx.rejected"]
    assert any(problem.startswith("stream ") and "differs by up to" in problem for problem in outcome.problems)
    assert any(problem.startswith("state gru: differs") for problem in outcome.problems)
    assert outcome.alignment["parts_at"]["tensor"] == "gru"
    assert outcome.alignment["parts_at"]["step"] == 0
    assert "REJECTED" in said
    assert "parts at tensor 'gru'" in said
    with pytest.raises(CheckpointError, match="was rejected"):
        Canceller.load(outcome.folder)


def test_a_rounded_weight_is_refused_and_named(tiny, tmp_path):
    outcome, said = export_one(tiny, tmp_path, Wrong(round_weight("parts.network.unfold.weight")))
    assert outcome.folder == tmp_path / "onnx.rejected"
    assert "weights of network.unfold.weight: the file's differ by" in said
    assert not any("weights of" in problem and "unfold" not in problem for problem in outcome.problems)


def test_a_file_that_no_engine_loads_is_refused(tiny, tmp_path):
    def spoil(model) -> None:
        del model.graph.node[5:]

    outcome, _ = export_one(tiny, tmp_path, Wrong(spoil))
    assert outcome.folder == tmp_path / "onnx.rejected"
    assert "onnxruntime can't load it" in outcome.problems[0]


@pytest.mark.parametrize("name", ["linear", "small", pytest.param("base", marks=pytest.mark.slow)])
def test_other_models_agree(name, tmp_path):
    outcome, said = export_one(make(name), tmp_path, Onnx())
    assert outcome.problems == [], said
    assert Canceller.load(outcome.folder).contract.kind == ("linear" if name == "linear" else "spectra")


class Gain(torch.nn.Module):
    """A model of somebody's own, without a graph(): its step is exported as it is. A state that doesn't start at 0."""

    sample_rate, hop_samples, latency_samples = 16000, 128, 256

    def __init__(self, through: float = 1.0):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor(through))

    def forward(self, mic, far, details: bool = False):
        delayed = torch.nn.functional.pad(mic - far, (1, 0))[:, :-1]
        start = torch.zeros_like(mic)
        start[:, 0] = 0.5
        return self.gain * (delayed + start)

    def init_state(self, batch: int):
        return {"late": torch.zeros(batch, 128), "last.sample": torch.full((batch, 1), 0.5)}

    def step(self, mic, far, state):
        line = torch.cat([state["last.sample"], mic - far], dim=-1)
        return state["late"], {"late": self.gain * line[:, :-1], "last.sample": line[:, -1:]}


def test_a_model_without_a_graph_is_exported_by_its_step(tmp_path, rng):
    outcome, said = export_one(Gain(), tmp_path, Onnx())
    assert outcome.problems == [], said
    canceller = Canceller.load(outcome.folder)
    assert canceller.contract.kind == "wave"
    assert canceller.contract.split["front_end"] == "graph"
    mic, far = (rng.normal(0, 0.1, 1000).astype(np.float32) for _ in range(2))
    expected = np.concatenate([np.zeros(256), [0.5], (mic - far)])[:1000]
    np.testing.assert_allclose(canceller.process(mic, far), expected, atol=1e-6)


class Complex(Gain):
    def step(self, mic, far, state):
        spectrum = torch.fft.rfft(mic)[..., 1:] * 2j
        return torch.fft.irfft(spectrum, n=128), state


def test_what_the_format_cannot_hold_is_named_leaves_nothing_and_fails_the_verb(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verb, "load", lambda name: (Complex(), "a checkpoint", tmp_path / "export"))
    assert verb.main(["checkpoint=any", f"export.minutes={MINUTES}"]) == 1
    said = capsys.readouterr().out
    assert "onnx: NOT WRITTEN: ONNX (opset 20) can't hold this model" in said
    assert "aten." in said  # the operator
    assert "complex" in said
    assert list((tmp_path / "export").iterdir()) == []


class Stale(Gain):
    def step(self, mic, far, state):
        return self.gain * mic, {**state, "late": mic}


def test_a_state_that_the_model_itself_never_updates_is_refused(tmp_path):
    with pytest.raises(ExportError, match="next_last_sample is input last_sample handed through"):
        Onnx().write(stream_graph(Stale()), lambda: iter(()), tmp_path)


@pytest.mark.parametrize(("loss_db", "mos", "problems"), [(0.0, 0.0, 0), (0.04, 0.0, 0), (9.0, 0.0, 1), (9.0, 1.0, 3)])
def test_a_loss_of_quality_is_a_problem_of_its_own(loss_db, mos, problems):
    quality = {"si_sdr": {"loss_db": loss_db}, "aecmos": {"echo_loss": mos, "other_loss": mos}}
    bounds = Bounds(wave=None, snr_db=None, si_sdr_db=0.05, aecmos=0.05)
    found = gate.judge_quality(quality, bounds)
    assert len(found) == problems
    assert all("worse" in text for text in found)
    assert gate.judge_quality({"si_sdr": {"loss_db": None}, "aecmos": {"skipped": "no package"}}, bounds) == []


def test_a_model_without_step_is_refused():
    class Offline(torch.nn.Module):
        sample_rate = 16000

    with pytest.raises(CheckpointError, match="Offline can't be exported: it has no step"):
        stream_graph(Offline())


def test_opsets_that_the_exporter_gets_wrong_are_refused():
    with pytest.raises(ConfigError, match="give 18 to 20"):
        Onnx(opset=17)
    assert Onnx(opset=18).opset == 18
