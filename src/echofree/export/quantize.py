"""`export=onnx_int8`: the ONNX file with 8-bit weights, dynamic or with calibrated activations.

What is quantised are the products of the layers (MatMul, Gemm). States, log features, sums and gains
stay float between them: an 8-bit gain can't go below -48 dB, and an 8-bit state adds up its errors. Band matrices stay
float as well, since powers span more than 8 bit hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from echofree.errors import ConfigError
from echofree.export.base import INT8, Bounds, Calibration
from echofree.export.onnx import Onnx, check, convert, quiet
from echofree.model.graph import StreamGraph

MODES = ("dynamic", "static")
PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose", "GRU", "LSTM")  # what holds the weights of a network
REPORT = "quantization.json"
SPLIT = "_MatMul"  # onnxruntime takes a Gemm apart before it looks which nodes to leave out
SMALL = 0.05  # static: layers with a smaller share of the weights stay float; they are the first, the last, and cheap
RECURRENT = "weight_hh"  # products of a hidden state: with a range that was calibrated its errors add up
CALIBRATIONS = ("minmax", "percentile", "entropy")


class OnnxInt8:
    """Writes model.onnx and quantization.json, which says layer by layer what became 8 bit and what stayed float.

    Args:
        mode: dynamic: weights 8 bit, activations measured at every step; static: what goes into the large layers has a
            range by calibration, except hidden states, which are still measured, and layers with less than 5 % of the
            weights stay float.
        opset: of the file, 18 to 20.
        per_channel: a scale per output of a layer rather than one for all.
        keep: further layers (parts of their names) that stay float.
        calibration: static only: minmax | percentile | entropy.
    """

    engine, file, precision = "onnxruntime", "model.onnx", "int8"

    def __init__(
        self,
        mode: str = "dynamic",
        opset: int = 20,
        per_channel: bool = True,
        keep: list[str] | None = None,
        calibration: str = "minmax",
    ):
        problems = []
        if mode not in MODES:
            problems.append(f"export mode={mode}: give {' or '.join(MODES)}")
        if calibration not in CALIBRATIONS:
            problems.append(f"export calibration={calibration}: give {', '.join(CALIBRATIONS)}")
        if problems:
            raise ConfigError(problems)
        self.inner = Onnx(opset)
        self.mode, self.per_channel, self.keep, self.calibration = mode, per_channel, list(keep or []), calibration
        self.bounds: Bounds = INT8

    def require(self) -> None:
        self.inner.require()

    def write(self, graph: StreamGraph, calibration: Calibration, folder: Path) -> list[str]:
        import onnx

        model = convert(graph, self.inner.opset)
        check(model, graph, self.inner.opset)
        layers = name_layers(model)
        kept = [name for name in layers if any(part in name for part in ("bands", *self.keep))]
        measured: list[str] = []
        if self.mode == "static":
            total = sum(count for _, count in layers.values())
            kept += [name for name, (_, count) in layers.items() if count < SMALL * total and name not in kept]
            measured = [name for name in layers if RECURRENT in name and name not in kept]
        source, prepared = folder / "float.onnx", folder / "prepared.onnx"
        onnx.save(model, source)
        try:
            with quiet():
                self._quantise(source, prepared, kept, measured, calibration, folder / self.file)
        finally:
            source.unlink(missing_ok=True)
            prepared.unlink(missing_ok=True)
        made = onnx.load(folder / self.file)
        onnx.checker.check_model(made, full_check=True)
        rows = report(layers, made)
        (folder / REPORT).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        total = sum(row["parameters"] for row in rows)
        share = sum(row["parameters"] for row in rows if row["precision"] == "int8") / max(total, 1)
        still = [row["layer"] for row in rows if row["precision"] != "int8"]
        return [
            f"opset {self.inner.opset}, {self.mode}",
            f"{100 * share:.1f} % of the weights are int8; float: {still}",
        ]

    def weights(self, folder: Path) -> dict[str, np.ndarray]:
        return {}

    def _quantise(
        self, source: Path, prepared: Path, kept: list[str], measured: list[str], calibration: Calibration, target: Path
    ) -> None:
        from onnxruntime import quantization as q
        from onnxruntime.quantization.shape_inference import quant_pre_process

        def dynamic(path: Path, to: Path, only: list[str] | None, excluded: list[str]) -> None:
            # unsigned: signed weights saturate on processors without VNNI
            q.quantize_dynamic(
                path, to, ["MatMul", "Gemm"], self.per_channel, weight_type=q.QuantType.QUInt8,
                nodes_to_quantize=only, nodes_to_exclude=excluded + [name + SPLIT for name in excluded],
            )  # fmt: skip

        if self.mode == "dynamic":
            dynamic(source, target, None, kept)
            return
        quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
        if measured:
            dynamic(prepared, prepared, [*measured, *(name + SPLIT for name in measured)], [])
        method = {
            "percentile": q.CalibrationMethod.Percentile,
            "minmax": q.CalibrationMethod.MinMax,
            "entropy": q.CalibrationMethod.Entropy,
        }[self.calibration]
        q.quantize_static(
            str(prepared), str(target), _Reader(calibration()), q.QuantFormat.QDQ, ["MatMul", "Gemm"],
            self.per_channel, activation_type=q.QuantType.QUInt8, weight_type=q.QuantType.QInt8,
            nodes_to_exclude=carriers(kept + measured, prepared), calibrate_method=method,
            extra_options={
                "OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"],  # what leaves a product stays float
                **({"CalibPercentile": 99.9} if self.calibration == "percentile" else {}),
            },
        )  # fmt: skip


def carriers(layers: list[str], path: Path) -> list[str]:
    """The nodes of a simplified file that carry these layers: a product that took in the sum behind it is called
    "LAYER/MatMulAddFusion", one that was taken apart "LAYER_MatMul"."""
    import onnx

    return [node.name for node in onnx.load(path).graph.node if layer_of(node) in layers]


def layer_of(node: Any) -> str:
    """The layer's name as `name_layers` gave it."""
    return str(node.name).split("/")[0].removesuffix(SPLIT)


class _Reader:
    """Calibration steps as onnxruntime asks for them."""

    def __init__(self, steps: Iterator[dict[str, np.ndarray]]):
        self._steps = steps

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._steps, None)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self._steps

    def __next__(self) -> dict[str, np.ndarray]:
        return next(self._steps)

    def __len__(self) -> int:
        raise TypeError("a stream of steps has no length")

    def set_range(self, start_index: int, end_index: int) -> None:
        raise NotImplementedError("calibration by ranges isn't used")


def name_layers(model: Any) -> dict[str, tuple[str, int]]:
    """Names the nodes that hold weights after their layer, in place. -> node -> (operator, number of weights)"""
    sizes = {item.name: int(np.prod(item.dims)) for item in model.graph.initializer}
    found: dict[str, tuple[str, int]] = {}
    for node in model.graph.node:
        if node.op_type not in PRODUCTS:
            continue
        held = [name for name in node.input[1:] if name in sizes]
        if all(sizes[name] <= 1 for name in held):  # a factor, not a layer
            held = []
        # A folded weight has lost its name, its bias (of one number, perhaps) has not.
        held.sort(key=lambda name: not name.startswith("parts."))
        if not held and node.op_type == "MatMul":
            turned = next(
                (n for n in model.graph.node if n.op_type == "Transpose" and n.output[0] == node.input[1]), None
            )
            held = [name for name in turned.input if name in sizes] if turned is not None else []
        if not held:
            continue
        layer = held[0].removeprefix("parts.").removesuffix(".weight").removesuffix(".bias")
        while layer in found:
            layer += " again"
        node.name = layer
        found[layer] = (node.op_type, sum(sizes[name] for name in held))
    return found


def report(layers: dict[str, tuple[str, int]], made: Any) -> list[dict[str, Any]]:
    """A row per layer: name, operator, number of weights, int8 or float32."""
    still = {layer_of(node) for node in made.graph.node if node.op_type in PRODUCTS and not _dequantised(node, made)}
    return [
        {
            "layer": layer,
            "operator": operator,
            "parameters": count,
            "precision": "float32" if layer in still else "int8",
        }
        for layer, (operator, count) in layers.items()
    ]


def _dequantised(node: Any, model: Any) -> bool:
    """Whether a product takes its weights from a DequantizeLinear, which is how static files say int8."""
    makers = {name: other.op_type for other in model.graph.node for name in other.output}
    return any(makers.get(name) == "DequantizeLinear" for name in node.input[1:2])
