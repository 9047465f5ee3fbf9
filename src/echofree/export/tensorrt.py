"""`export=tensorrt`: an engine of TensorRT, built from the ONNX file. It fits the GPU and the version that built it."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from echofree.errors import ConfigError, MissingExtra, UserError
from echofree.export.base import FLOAT, HALF, Bounds, Calibration, ExportError
from echofree.export.onnx import check, convert, quiet
from echofree.model.graph import StreamGraph
from echofree.runtime.engine import TENSORRT_REMEDY

PRECISIONS = {"float32": FLOAT, "float16": HALF}


class TensorRt:
    """Writes model.engine.

    Args:
        precision: float32 (TF32 off) | float16.
        opset: of the ONNX file in between, 18 to 20.
        workspace_mb: memory that the builder may try layers in.
    """

    engine, file = "tensorrt", "model.engine"

    def __init__(self, precision: str = "float32", opset: int = 20, workspace_mb: int = 1024):
        problems = []
        if precision not in PRECISIONS:
            problems.append(f"export.targets.tensorrt.precision={precision}: give {', '.join(PRECISIONS)}")
        if workspace_mb < 1:
            problems.append(f"export.targets.tensorrt.workspace_mb={workspace_mb}: give at least 1")
        if problems:
            raise ConfigError(problems)
        self.precision, self.opset, self.workspace_mb = precision, opset, workspace_mb
        self.bounds: Bounds = PRECISIONS[precision]

    def require(self) -> None:
        for package in ("onnx", "onnxscript"):
            if find_spec(package) is None:
                raise MissingExtra(package, "export", "export=tensorrt")
        for package in ("tensorrt", "cuda"):
            if find_spec(package) is None:
                raise UserError(f"export=tensorrt needs the package {package!r}. {TENSORRT_REMEDY}")
        if not torch.cuda.is_available():
            raise UserError("export=tensorrt builds for the GPU of this machine, and there is none that torch can use")

    def write(self, graph: StreamGraph, calibration: Calibration, folder: Path) -> list[str]:
        trt: Any = importlib.import_module("tensorrt")
        model = convert(graph, self.opset)
        check(model, graph, self.opset)
        logger = trt.Logger(trt.Logger.ERROR)
        builder = trt.Builder(logger)
        network = builder.create_network(0)
        parser = trt.OnnxParser(network, logger)
        with quiet():
            if not parser.parse(model.SerializeToString()):
                errors = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
                raise ExportError(f"TensorRT can't hold this model: {errors}")
            config = builder.create_builder_config()
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, self.workspace_mb << 20)
            config.clear_flag(trt.BuilderFlag.TF32)  # its 10 bits of mantissa are no float32
            if self.precision == "float16":
                config.set_flag(trt.BuilderFlag.FP16)
            engine = builder.build_serialized_network(network, config)
        if engine is None:
            raise ExportError("TensorRT could build no engine of this model")
        (folder / self.file).write_bytes(bytes(engine))
        return [f"TensorRT {trt.__version__} on {torch.cuda.get_device_name()}"]

    def weights(self, folder: Path) -> dict[str, np.ndarray]:
        return {}
