"""`export=onnx`: an ONNX file for onnxruntime, float32, one step per call."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from echofree.errors import ConfigError, MissingExtra
from echofree.export.base import FLOAT, Bounds, Calibration, ExportError, input_name, output_name, reason
from echofree.model.graph import StreamGraph

LEAST_OPSET, MOST_OPSET = 18, 20  # asking the exporter for less goes through a converter that breaks Pad and Split
REFUSED = {
    "If": "control flow",
    "Loop": "control flow",
    "Scan": "control flow",
    "STFT": "a transform whose result depends on the runtime's version",
    "DFT": "a transform whose result depends on the runtime's version",
    "RandomNormalLike": "random numbers",
    "RandomUniformLike": "random numbers",
    "Dropout": "random numbers",
}


class Onnx:
    """Writes model.onnx.

    Args:
        opset: of the file, 18 to 20.
    """

    engine, file, precision = "onnxruntime", "model.onnx", "float32"

    def __init__(self, opset: int = 20):
        if not LEAST_OPSET <= opset <= MOST_OPSET:
            raise ConfigError(f"export opset={opset}: give {LEAST_OPSET} to {MOST_OPSET}")
        self.opset = opset
        self.bounds: Bounds = FLOAT

    def require(self) -> None:
        for package in ("onnx", "onnxscript", "onnxruntime"):
            if find_spec(package) is None:
                raise MissingExtra(package, "export", "export=onnx")

    def write(self, graph: StreamGraph, calibration: Calibration, folder: Path) -> list[str]:
        import onnx

        model = convert(graph, self.opset)
        check(model, graph, self.opset)

        onnx.save(model, folder / self.file)
        return [f"opset {self.opset}"]

    def weights(self, folder: Path) -> dict[str, np.ndarray]:
        import onnx

        return named_weights(onnx.load(folder / self.file))


def convert(graph: StreamGraph, opset: int) -> Any:
    """The graph as an onnx ModelProto, constants folded.

    Raises:
        ExportError: the exporter's complaint, in short.
    """
    inputs = [*graph.inputs, *map(input_name, graph.state_names)]
    outputs = [graph.output[0], *map(output_name, graph.state_names)]
    try:
        with quiet(), torch.no_grad():
            program = torch.onnx.export(
                graph,
                graph.example(),
                input_names=inputs,
                output_names=outputs,
                opset_version=opset,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except Exception as error:  # converters raise whatever they like
        raise ExportError(f"ONNX (opset {opset}) can't hold this model: {reason(error)}") from error
    assert program is not None
    model = program.model_proto
    tidy(model)
    return model


def tidy(model: Any) -> None:
    """Drops what tells of the Python source (a tenth of a small file), and gives weights that were turned around for a
    MatMul their layer's name back, in place."""
    graph = model.graph
    named = {item.name for item in graph.initializer}
    users = {name: node for node in graph.node if node.op_type == "Add" for name in node.input}
    for node in graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
        if node.op_type != "MatMul" or node.input[1] not in named or node.output[0] not in users:
            continue
        biases = [name for name in users[node.output[0]].input if name.endswith(".bias")]
        new = biases[0].removesuffix("bias") + "weight" if biases else ""
        if new and new not in named and not node.input[1].endswith(".weight"):
            old = node.input[1]
            for other in graph.node:
                other.input[:] = [new if name == old else name for name in other.input]
            next(item for item in graph.initializer if item.name == old).name = new
            named.add(new)
    del graph.value_info[:]
    for item in (*graph.initializer, *graph.input, *graph.output):
        del item.metadata_props[:]
        item.doc_string = ""


def named_weights(model: Any) -> dict[str, np.ndarray]:
    """Float weights by the graph's parameter names, in PyTorch's orientation."""
    from onnx import numpy_helper

    turned = {node.input[1] for node in model.graph.node if node.op_type == "MatMul"}
    found = {}
    for item in model.graph.initializer:
        if item.name.startswith("parts.") and item.data_type == item.FLOAT:
            value = numpy_helper.to_array(item)
            is_linear = item.name.endswith(".weight") and item.name in turned
            found[item.name] = value.T if is_linear else value
    return found


def check(model: Any, graph: StreamGraph, opset: int) -> None:
    """Refuses what the format allows and a device doesn't: control flow, complex or open shapes, another opset, names
    that went missing.

    Raises:
        ExportError: all of it.
    """
    import onnx

    problems = [
        f"operator {node.op_type} ({REFUSED[node.op_type]}) at {node.name}"
        for node in model.graph.node
        if node.op_type in REFUSED
    ]
    versions = {item.domain: item.version for item in model.opset_import}
    if versions.get("", 0) != opset:
        problems.append(f"opset {versions.get('')} came out where {opset} was asked for")
    problems += [f"operators of the domain {domain!r}" for domain in versions if domain not in ("", "ai.onnx")]
    states = {input_name(s): tuple(graph.initial[s].shape) for s in graph.state_names}
    wanted = [{**graph.inputs, **states}]
    wanted.append({graph.output[0]: graph.output[1], **{f"next_{key}": shape for key, shape in states.items()}})
    for what, values, shapes in zip(("input", "output"), (model.graph.input, model.graph.output), wanted):
        found = {value.name: value.type.tensor_type for value in values}
        problems += [f"{what} {name} went missing" for name in shapes if name not in found]
        problems += [f"{what} {name} wasn't asked for" for name in found if name not in shapes]
        for name, kind in found.items():
            shape = tuple(axis.dim_value for axis in kind.shape.dim)
            if kind.elem_type != onnx.TensorProto.FLOAT:
                problems.append(f"{what} {name} is no float32")
            if name in shapes and shape != tuple(shapes[name]):
                problems.append(f"{what} {name} has the shape {shape}, not {shapes[name]}")
    copies = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Identity"}
    problems += [
        f"output {output_name(state)} is input {input_name(state)} handed through: this state is never updated"
        for state in graph.state_names
        if copies.get(output_name(state)) == input_name(state)
    ]
    if problems:
        raise ExportError("the ONNX file isn't what a device needs: " + "; ".join(problems))
    onnx.checker.check_model(model, full_check=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Converters chat on stdout, stderr, the log and through warnings; what matters they raise."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
