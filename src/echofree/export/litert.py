"""`export=litert`: a TFLite file for LiteRT, in float32, with 16-bit weights, or with 8-bit weights.

8 bit is dynamic: weights are stored in 8 bit and activations measured at every step. Fully static 8-bit files take
8-bit states with a scale of their own each; fed back, they end 15 dB worse. So inputs, outputs and states stay float32.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from echofree.errors import ConfigError, MissingExtra
from echofree.export.base import FLOAT, HALF, INT8, Bounds, Calibration, ExportError, reason
from echofree.export.onnx import quiet
from echofree.model.graph import StreamGraph

PRECISIONS = {"float32": FLOAT, "float16": HALF, "int8": INT8}


class LiteRt:
    """Writes model.tflite.

    Args:
        precision: of the weights: float32 | float16 | int8.
    """

    engine, file = "litert", "model.tflite"

    def __init__(self, precision: str = "float32"):
        if precision not in PRECISIONS:
            raise ConfigError(
                f"export.targets.litert.precision={precision}: give {', '.join(PRECISIONS)}. "
                "16-bit activations (16x8) can't be had for recurrent layers: activations stay float32"
            )
        self.precision = precision
        self.bounds: Bounds = PRECISIONS[precision]

    def require(self) -> None:
        packages = ["litert_torch", "ai_edge_litert", *(["ai_edge_quantizer"] if self.precision != "float32" else [])]
        for package in packages:
            if find_spec(package) is None:
                raise MissingExtra(package, "litert", "export=litert")

    def write(self, graph: StreamGraph, calibration: Calibration, folder: Path) -> list[str]:
        refuse(graph)
        path = folder / self.file
        try:
            with quiet(), torch.no_grad():
                importlib.import_module("litert_torch").convert(graph, graph.example()).export(str(path))
                if self.precision != "float32":
                    self._shrink(path)
        except Exception as error:  # converters raise whatever they like
            raise ExportError(f"LiteRT can't hold this model: {reason(error)}") from error
        return ["inputs, then states, by position: args_0, args_1 ...; output, then states: output_0, output_1 ..."]

    def weights(self, folder: Path) -> dict[str, np.ndarray]:
        return {}

    def _shrink(self, path: Path) -> None:
        quantizer = importlib.import_module("ai_edge_quantizer.quantizer").Quantizer(str(path))
        recipe: Any = importlib.import_module("ai_edge_quantizer.recipe")
        if self.precision == "int8":
            quantizer.load_quantization_recipe(recipe.dynamic_wi8_afp32())
        else:
            everything = recipe.TFLOperationName.ALL_SUPPORTED
            casting = recipe.AlgorithmName.FLOAT_CASTING
            quantizer.add_weight_only_config(regex=".*", operation_name=everything, num_bits=16, algorithm_key=casting)
        made = quantizer.quantize()
        path.unlink()
        made.export_model(str(path))


def refuse(graph: StreamGraph) -> None:
    """The operators that this converter is known to get wrong without a word: transposed convolutions with a stride, a
    padding and an odd kernel (off by 2 to 3 on inputs of 1).

    Raises:
        ExportError: with the module and what to write instead.
    """
    for name, module in graph.named_modules():
        if not isinstance(module, torch.nn.ConvTranspose1d | torch.nn.ConvTranspose2d):
            continue
        axes = zip(module.kernel_size, module.stride, module.padding, strict=True)
        if any(kernel % 2 and stride > 1 and padding for kernel, stride, padding in axes):
            raise ExportError(
                f"{name.removeprefix('parts.')} is a transposed convolution with kernel {module.kernel_size}, stride "
                f"{module.stride}, padding {module.padding}, which LiteRT's converter gets wrong without an error. Use "
                "padding 0 and cut the edges off, or a sub-pixel convolution"
            )
