"""What can't be shared out is refused with the reason and what would work."""

from __future__ import annotations

import pytest

from echofree.config import layout
from echofree.config.compose import Composer, compose
from echofree.errors import ConfigError


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["dist=tensor", "dist.num_procs=2"], ["tensor_plan()", "BarkNet", "recurrent", "dist=fsdp", "model=base"]),
        (["dist=pipeline", "dist.num_procs=2"], ["blocks()", "BarkNet", "dist=fsdp", "model=base"]),
        (["dist=fsdp", "dist.num_procs=4", "dist.mesh={data:2,tensor:2}"], ["tensor axis", "BarkNet"]),
        (["model=base", "dist=tensor", "dist.num_procs=5"], ["model.num_heads=12", "5 tensor ranks", "num_procs=4"]),
        (["model=base", "dist=tensor", "dist.num_procs=4", "dist.mesh={data:3}"], ["takes 3 ranks", "there are 4"]),
        (["dist=ddp", "dist.num_procs=2", "dist.mesh={tensor:2}"], ["no axis 'tensor'", "Type dist=fsdp"]),
        (["dist=ddp", "dist.num_procs=2", "dist.mesh.replicate=2"], ["no axis 'replicate'", "Type dist=fsdp"]),
        (["dist=fsdp", "dist.num_procs=2", "dist.mesh.data=-1"], ["dist.mesh.data=-1", "at least 0"]),
        (["dist.mesh={data:2}"], ["dist.mesh", "dist=single"]),
        (["dist=ddp", "dist.schedule=gpipe"], ["dist.schedule=gpipe", "dist=pipeline only"]),
        (["dist=ddp", "dist.reshard_after_forward=false"], ["dist=fsdp only"]),
        (["dist=fsdp", "dist.num_procs=2", "dist.cpu_offload=true"], ["no GPU", "dist.cpu_offload=false"]),
        (["model=base", "dist=pipeline", "dist.schedule=backwards"], ["gpipe | 1f1b | interleaved"]),
        (["model=base", "dist=pipeline", "dist.num_procs=8"], ["dist.microbatches=4", "dist.microbatches=16"]),
        (
            ["model=base", "dist=pipeline", "dist.num_procs=4", "dist.schedule=interleaved", "dist.microbatches=6"],
            ["multiple of the 4", "dist.microbatches=8"],
        ),
        (
            ["model=base", "dist=pipeline", "dist.num_procs=2", "train.batch_size=2"],
            ["train.batch_size=2", "train.batch_size=4"],
        ),
        (["model=base", "dist=pipeline", "dist.num_procs=2", "train.compile=true"], ["train.compile=false"]),
        (["train.activation_checkpointing=true"], ["blocks()", "BarkNet", "Leave it out"]),
    ],
)
def test_refusals(words: list[str], parts: list[str], composer: Composer) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(words, composer)
    (problem,) = caught.value.problems
    for part in parts:
        assert part in problem


@pytest.mark.parametrize(
    "words",
    [
        ["dist=fsdp", "dist.num_procs=2"],
        ["model=small", "dist=fsdp", "dist.num_procs=4", "dist.mesh.replicate=2"],
        ["model=base", "dist=fsdp", "dist.num_procs=4", "dist.mesh={data:2,tensor:2}"],
        ["model=base", "dist=tensor", "dist.num_procs=auto"],
        ["model=base", "dist=tensor", "dist.num_procs=6", "dist.mesh={tensor:3}"],
        ["model=base", "dist=pipeline", "dist.num_procs=4", "dist.mesh={data:2,pipeline:2}", "dist.schedule=gpipe"],
        ["model=base", "dist=pipeline", "dist.num_procs=2", "dist.stages=[layers.6]"],
        ["model=base", "train.activation_checkpointing=true"],
    ],
)
def test_combinations_that_work(words: list[str], composer: Composer) -> None:
    compose(words, composer)


@pytest.mark.parametrize(
    ("name", "mesh", "size", "expected"),
    [
        ("ddp", {}, 4, {"data": 4}),
        ("fsdp", {}, 2, {"data": 2}),
        ("fsdp", {"replicate": 2}, 8, {"replicate": 2, "data": 4}),
        ("fsdp", {"tensor": 2, "data": 2}, 4, {"data": 2, "tensor": 2}),
        ("tensor", {}, 4, {"tensor": 4}),
        ("tensor", {"tensor": 2}, 6, {"data": 3, "tensor": 2}),
        ("tensor", {"data": 2}, 6, {"data": 2, "tensor": 3}),
        ("tensor", {"data": 1, "tensor": 4}, 4, {"tensor": 4}),
        ("pipeline", {"pipeline": 4, "data": 2}, 8, {"data": 2, "pipeline": 4}),
    ],
)
def test_axes(name: str, mesh: dict[str, int], size: int, expected: dict[str, int]) -> None:
    found = layout.axes(name, mesh, size)
    assert list(found.items()) == list(expected.items()), "outermost first"


@pytest.mark.parametrize(
    ("name", "mesh", "size", "text"),
    [
        ("tensor", {"tensor": 3}, 4, "num_procs=3"),
        ("tensor", {"tensor": 1, "data": 4}, 4, "dist=ddp"),
        ("fsdp", {"replicate": 2, "data": 2, "tensor": 2}, 8, "three axes"),
        ("pipeline", {"pipeline": 2, "tensor": 2}, 4, "no axis 'tensor'"),
    ],
)
def test_axes_that_cannot_be(name: str, mesh: dict[str, int], size: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        layout.axes(name, mesh, size)


def test_ranks_along_data() -> None:
    assert layout.data_size({"replicate": 2, "data": 3, "tensor": 5}) == 6
    assert layout.data_size({"pipeline": 4}) == 1
