"""LiteRT, ExecuTorch and TensorRT: gated where their packages are, and what they refuse wherever they aren't."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from small_models import make

from echofree.errors import ConfigError, MissingExtra, UserError
from echofree.export import executorch as executorch_target
from echofree.export import litert as litert_target
from echofree.export import tensorrt as tensorrt_target
from echofree.export.base import ExportError
from echofree.export.executorch import Executorch
from echofree.export.litert import LiteRt
from echofree.export.run import export
from echofree.export.tensorrt import TensorRt
from echofree.model.graph import StreamGraph, stream_graph
from echofree.runtime import Canceller

NEEDED = {"litert": ("litert_torch", "ai_edge_litert", "ai_edge_quantizer"), "executorch": ("executorch", "torchao")}
TARGETS = {
    "litert float32": ("litert", lambda: LiteRt()),
    "litert float16": ("litert", lambda: LiteRt("float16")),
    "litert int8": ("litert", lambda: LiteRt("int8")),
    "executorch float32": ("executorch", lambda: Executorch()),
    "executorch int8 dynamic": ("executorch", lambda: Executorch("int8")),
    "executorch int8 static": ("executorch", lambda: Executorch("int8", "static")),
}


def here(engine: str) -> bool:
    return all(importlib.util.find_spec(package) for package in NEEDED[engine])


@pytest.mark.parametrize("engine", ["litert", "executorch"])
@pytest.mark.parametrize("model", ["tiny", pytest.param("small", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")  # their packages and their converters' are full of them
def test_targets_agree(engine, model, tmp_path):
    if not here(engine):
        pytest.skip(f"needs echofree[{engine}]")
    exporters = {name.replace(" ", "_"): build() for name, (of, build) in TARGETS.items() if of == engine}
    said: list[str] = []
    outcomes = export(make(model, spread=0.02), exporters, tmp_path, "a checkpoint", 0.05, said.append)
    assert [outcome.problems for outcome in outcomes] == [[]] * 3, "\n".join(said)
    size = {outcome.name: outcome.alignment["bytes"] for outcome in outcomes}
    assert min(size.values()) < 0.7 * size[f"{engine}_float32"]
    assert Canceller.load(outcomes[0].folder).contract.engine == engine
    if engine == "litert":
        assert not any(outcome.alignment["torch_imported"] for outcome in outcomes)


def transposed(kernel: int, stride: int, padding: int) -> StreamGraph:
    layer = torch.nn.ConvTranspose1d(1, 1, kernel, stride, padding)
    shape = (1, 1, 8)
    return StreamGraph("wave", {"mic": shape}, ("est", shape), {}, lambda x, s: (layer(x[0]), {}), layer)


def test_a_transposed_convolution_that_litert_gets_wrong_is_refused():
    with pytest.raises(ExportError, match="gets wrong without an error"):
        litert_target.refuse(transposed(3, 2, 1))
    for right in ((3, 2, 0), (4, 2, 1), (3, 1, 1)):
        litert_target.refuse(transposed(*right))
    for name in ("tiny", "small", "base"):
        litert_target.refuse(stream_graph(make(name)))


@pytest.mark.parametrize(
    ("module", "target", "said"),
    [
        (litert_target, LiteRt(), r"export=litert needs.*echofree\[litert\]"),
        (executorch_target, Executorch(), r"export=executorch needs.*echofree\[executorch\]"),
    ],
)
def test_missing_packages_name_their_extra(monkeypatch, module, target, said):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=said):
        target.require()


def test_tensorrt_says_what_to_install(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(tensorrt_target, "find_spec", lambda name: None if name == "tensorrt" else found("json"))
    with pytest.raises(UserError, match=r"needs the package 'tensorrt'\. Install TensorRT as its vendor says"):
        TensorRt().require()


def test_tensorrt_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(tensorrt_target, "find_spec", lambda name: importlib.util.find_spec("json"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="there is none that torch can use"):
        TensorRt().require()


def test_16_bit_activations_are_refused_with_what_there_is():
    with pytest.raises(
        ConfigError, match=r"precision=int16x8: give float32, float16, int8\. .*activations stay float32"
    ):
        LiteRt("int16x8")


@pytest.mark.parametrize("build", [lambda: LiteRt("int4"), lambda: Executorch("bf16", "qat"), lambda: TensorRt("int8")])
def test_precisions_that_are_not_there_are_refused(build):
    with pytest.raises(ConfigError, match="precision="):
        build()
