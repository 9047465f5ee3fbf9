"""8-bit ONNX: what is quantised, what stays float, and that too coarse a file is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from small_models import make

from echofree.errors import ConfigError
from echofree.export.base import INT8
from echofree.export.onnx import Onnx
from echofree.export.quantize import OnnxInt8
from echofree.export.run import export
from echofree.model.graph import stream_graph

onnx = pytest.importorskip("onnx", reason="needs echofree[export]")
pytest.importorskip("onnxscript", reason="needs echofree[export]")
pytest.importorskip("onnxruntime", reason="needs echofree[export]")


@pytest.fixture(scope="module")
def tiny():
    return make("tiny", spread=0.02)


def test_dynamic_agrees_and_tells_what_stayed_float(tiny, tmp_path):
    said: list[str] = []
    exporters = {"onnx_int8": OnnxInt8(), "onnx": Onnx()}
    outcomes = {o.name: o for o in export(tiny, exporters, tmp_path, "a checkpoint", 0.05, said.append)}
    assert [o.problems for o in outcomes.values()] == [[], []], said
    folder = outcomes["onnx_int8"].folder
    assert not list(folder.glob("*float*"))
    found = outcomes["onnx_int8"].alignment
    assert found["takes"]["clipping"]["snr_db"] > 30
    assert found["takes"]["clipping"]["max"] > outcomes["onnx"].alignment["takes"]["clipping"]["max"]  # it is 8 bit
    rows = {row["layer"]: row for row in json.loads((folder / "quantization.json").read_text())}
    layers = ("network.gru.weight_ih_l0", "network.gru.weight_hh_l0", "network.unfold", "network.gain")
    assert all(rows[name]["precision"] == "int8" for name in layers)
    assert all(rows[name]["precision"] == "float32" for name in ("bands", "network.planes.0.depth"))
    wanted = stream_graph(tiny).parts.network.unfold.weight.numel()
    assert rows["network.unfold"]["parameters"] == wanted
    contract = json.loads((folder / "contract.json").read_text())
    assert contract["precision"] == "int8"
    assert any("of the weights are int8" in note for note in contract["notes"])


def test_layers_can_be_kept(tiny, tmp_path):
    OnnxInt8(keep=["gru", "gain"]).write(stream_graph(tiny), lambda: iter(()), tmp_path)
    rows = {row["layer"]: row["precision"] for row in json.loads((tmp_path / "quantization.json").read_text())}
    assert rows["network.gru.weight_ih_l0"] == rows["network.gain"] == "float32"
    assert rows["network.unfold"] == "int8"


@pytest.mark.parametrize("calibration", ["percentile", "minmax"])
def test_static_uses_its_calibration(tiny, tmp_path, calibration):
    graph = stream_graph(tiny)
    rng, shown = np.random.default_rng(0), []

    def steps():
        for _ in range(8):
            noise = {name: rng.normal(0, 1, shape).astype(np.float32) for name, shape in graph.inputs.items()}
            shown.append(0)
            yield {**noise, **{name: value.numpy() for name, value in graph.initial.items()}}

    OnnxInt8(mode="static", calibration=calibration).write(graph, steps, tmp_path)
    assert len(shown) == 8
    model = onnx.load(tmp_path / "model.onnx")
    assert "DequantizeLinear" in {node.op_type for node in model.graph.node}
    assert {value.name for value in model.graph.input} == {"spectra", *graph.initial}
    assert all(value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT for value in model.graph.output)


def test_static_keeps_what_it_is_told_and_what_is_small(tmp_path):
    """Simplifying the file renames its products; a layer that is to stay float must be found all the same."""
    graph = stream_graph(make("wide tiny", spread=0.02))

    def steps():
        rng = np.random.default_rng(0)
        noise = {name: rng.normal(0, 1, shape).astype(np.float32) for name, shape in graph.inputs.items()}
        yield {**noise, **{name: value.numpy() for name, value in graph.initial.items()}}

    found = {}
    for keep in ((), ("unfold",)):
        folder = tmp_path / ("-".join(keep) or "none")
        folder.mkdir()
        OnnxInt8(mode="static", keep=list(keep)).write(graph, steps, folder)
        model = onnx.load(folder / "model.onnx")
        weights = {item.name: item.data_type for item in model.graph.initializer if item.name.startswith("parts.")}
        floats = {name for name, kind in weights.items() if kind == onnx.TensorProto.FLOAT and name.endswith("weight")}
        rows = {row["layer"]: row["precision"] for row in json.loads((folder / "quantization.json").read_text())}
        found[keep] = ({name for name, precision in rows.items() if precision == "int8"}, floats, model)
    large = {"network.gru.weight_ih_l0", "network.gru.weight_hh_l0", "network.unfold"}
    assert found[()][0] == large
    assert "parts.network.unfold.weight" not in found[()][1]
    assert {"parts.network.gain.weight", "parts.network.planes.0.point.weight"} <= found[()][1]
    assert found[("unfold",)][0] == large - {"network.unfold"}
    assert "parts.network.unfold.weight" in found[("unfold",)][1]
    measured = [node for node in found[()][2].graph.node if node.op_type == "DynamicQuantizeLinear"]
    assert len(measured) == 1, "the hidden state's range is measured at every step"


@pytest.mark.slow
def test_static_passes_the_gate(tmp_path):
    model, said = make("wide tiny", spread=0.02), []
    (outcome,) = export(model, {"onnx_int8": OnnxInt8(mode="static")}, tmp_path, "a checkpoint", 0.1, said.append)
    assert outcome.problems == [], said


class Coarse(Onnx):
    """Claims to be 8 bit, but all weights of the network have 2."""

    precision = "int8"

    def __init__(self):
        super().__init__()
        self.bounds = INT8

    def write(self, graph, calibration, folder):
        notes = super().write(graph, calibration, folder)
        model = onnx.load(folder / self.file)
        for item in model.graph.initializer:
            if item.name.startswith("parts.network") and item.name.endswith("weight"):
                value = onnx.numpy_helper.to_array(item)
                step = np.abs(value).max()
                item.CopyFrom(
                    onnx.numpy_helper.from_array((np.round(value / step) * step).astype(np.float32), item.name)
                )
        onnx.save(model, folder / self.file)
        return notes


def test_too_coarse_a_file_is_refused(tiny, tmp_path):
    (outcome,) = export(tiny, {"coarse": Coarse()}, tmp_path, "a checkpoint", 0.05, lambda text: None)
    assert outcome.folder.name == "coarse.rejected"
    assert any("dB below the signal; 30 dB is the least" in problem for problem in outcome.problems)


def test_wrong_settings_are_refused_together():
    with pytest.raises(ConfigError, match=r"(?s)mode=weights.*calibration=guess"):
        OnnxInt8(mode="weights", calibration="guess")
