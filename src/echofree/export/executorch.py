"""`export=executorch`: a .pte program for ExecuTorch with XNNPACK, in float32 or with 8-bit products.

Its Python binding hands out torch tensors, so this one target is measured in a process that has torch; the C++ runtime
on a device needs none.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from echofree.errors import ConfigError, MissingExtra
from echofree.export.base import FLOAT, INT8, Bounds, Calibration, ExportError, reason
from echofree.export.onnx import quiet
from echofree.model.graph import StreamGraph

PRECISIONS = {"float32": FLOAT, "int8": INT8}
MODES = ("dynamic", "static")
CALIBRATION_STEPS = 300


class Executorch:
    """Writes model.pte.

    Args:
        precision: float32 | int8.
        mode: of int8: dynamic: activations are measured at every step | static: calibrated.
    """

    engine, file = "executorch", "model.pte"

    def __init__(self, precision: str = "float32", mode: str = "dynamic"):
        problems = []
        if precision not in PRECISIONS:
            problems.append(f"export.targets.executorch.precision={precision}: give {', '.join(PRECISIONS)}")
        if mode not in MODES:
            problems.append(f"export.targets.executorch.mode={mode}: give {' or '.join(MODES)}")
        if problems:
            raise ConfigError(problems)
        self.precision, self.mode = precision, mode
        self.bounds: Bounds = PRECISIONS[precision]

    def require(self) -> None:
        for package in ["executorch", *(["torchao"] if self.precision == "int8" else [])]:
            if find_spec(package) is None:
                raise MissingExtra(package, "executorch", "export=executorch")

    def write(self, graph: StreamGraph, calibration: Calibration, folder: Path) -> list[str]:
        try:
            with quiet(), torch.no_grad():
                example = graph.example()
                program = torch.export.export(graph, example)
                if self.precision == "int8":
                    program = torch.export.export(self._quantised(program, calibration()), example)
                lower = importlib.import_module("executorch.exir").to_edge_transform_and_lower
                partition = importlib.import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")
                made = lower(program, partitioner=[partition.XnnpackPartitioner()]).to_executorch()
                (folder / self.file).write_bytes(made.buffer)
        except Exception as error:  # converters raise whatever they like
            raise ExportError(f"ExecuTorch can't hold this model: {reason(error)}") from error
        return ["inputs, then states, by position; output, then states"]

    def weights(self, folder: Path) -> dict[str, np.ndarray]:
        return {}

    def _quantised(self, program: Any, steps: Iterator[dict[str, np.ndarray]]) -> Any:
        pt2e = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
        xnnpack = importlib.import_module("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
        dynamic = self.mode == "dynamic"
        settings = xnnpack.get_symmetric_quantization_config(is_per_channel=True, is_dynamic=dynamic)
        quantizer = xnnpack.XNNPACKQuantizer()
        # products alone: powers, states and gains span more than 8 bit hold
        quantizer.set_operator_type(torch.ops.aten.linear.default, settings)
        prepared = pt2e.prepare_pt2e(program.module(), quantizer)
        for step in islice(steps, 1 if dynamic else CALIBRATION_STEPS):
            prepared(*(torch.from_numpy(value) for value in step.values()))
        return pt2e.convert_pt2e(prepared)
