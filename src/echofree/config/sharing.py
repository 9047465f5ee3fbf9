"""Rules about sharing a model out over ranks: what a strategy reads, and what a model's class must offer for it.

What only the built model knows (sizes of its layers, number of its blocks) is judged by `echofree.dist.fit`, before any
directory is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig

from echofree.config import layout
from echofree.config.schema import DistConfig, StrategyKind
from echofree.errors import ConfigError

SCHEDULES = ("gpipe", "1f1b", "interleaved")
# key -> the strategies that read it
READ_BY = {
    "reshard_after_forward": ("fsdp",),
    "cpu_offload": ("fsdp",),
    "schedule": ("pipeline",),
    "microbatches": ("pipeline",),
    "stages": ("pipeline",),
    "mesh": ("ddp", "fsdp", "tensor", "pipeline"),
}


def rules(config: DictConfig, choices: Mapping[str, str]) -> Iterator[str]:
    """Texts of what is wrong, as `check.RULES` gives them."""
    dist = config.dist
    name = dist.name.value
    yield from _unread(dist, name)
    if config.train.activation_checkpointing:
        yield from _offers(config, ("blocks",), "train.activation_checkpointing=true", "Leave it out")
    if dist.name is StrategyKind.single:
        return
    mesh = layout.asked(dist.mesh)
    found = layout.problems(name, mesh)
    yield from found
    if found or min(mesh.values(), default=1) < 1 or not re.fullmatch(r"auto|[1-9]\d*", dist.num_procs):
        return
    axes = {}
    if dist.num_procs != "auto" and (size := int(dist.num_procs) * dist.num_nodes) > 1:
        try:
            axes = layout.axes(name, mesh, size)
        except ConfigError as error:
            yield from error.problems
            return
    if dist.cpu_offload and not _has_cuda():
        yield (
            "dist.cpu_offload=true moves shards between a GPU and main memory, and torch finds no GPU here. "
            "Type: dist.cpu_offload=false"
        )
    tensor = "tensor" in mesh or dist.name is StrategyKind.tensor
    if tensor:
        yield from _offers(config, ("tensor_plan",), "a tensor axis", "Type: dist=ddp, or dist=fsdp")
        yield from _heads(config, axes.get("tensor", 1))
    if dist.name is StrategyKind.pipeline:
        yield from _offers(config, ("blocks", "enter", "leave"), "dist=pipeline", "Type: dist=ddp, or dist=fsdp")
        yield from _schedule(config, axes.get("pipeline", 1))


def _unread(dist: DictConfig, name: str) -> Iterator[str]:
    defaults = DistConfig()
    for key, readers in READ_BY.items():
        value, default = dist[key], getattr(defaults, key)
        if key == "mesh":
            value, default = layout.asked(value), {}
        if name not in readers and value != default:
            yield (
                f"dist.{key}={value} is read by dist={' | '.join(readers)} only, and this is dist={name}. Leave it out"
            )


def _offers(config: DictConfig, methods: tuple[str, ...], what: str, remedy: str) -> Iterator[str]:
    """Whether the class of the model has `methods`. Only a config that asks for them pays for importing it."""
    from echofree.config.build import locate

    node = config._get_node("model")
    target = node.get("_target_") if isinstance(node, DictConfig) else None
    if not isinstance(target, str):
        return  # told elsewhere
    try:
        kind: Any = locate(target, "model")
    except ConfigError:
        return  # told elsewhere
    missing = [method for method in methods if isinstance(kind, type) and not hasattr(kind, method)]
    if missing:
        reason = (
            "its recurrent and convolutional layers can't be split" if "tensor_plan" in missing else "it is one piece"
        )
        yield (
            f"{what} needs a model that offers {', '.join(f'{m}()' for m in missing)}; {kind.__name__} "
            f"doesn't: {reason}. {remedy}, or model=base"
        )


def _heads(config: DictConfig, count: int) -> Iterator[str]:
    heads = config.model.get("num_heads")
    if isinstance(heads, int) and heads % count:
        fitting = [n for n in range(2, heads + 1) if heads % n == 0]
        nearest = min(fitting, key=lambda n: abs(n - count))
        yield (
            f"model.num_heads={heads} can't be shared out evenly over {count} tensor ranks. "
            f"Type: dist.num_procs={nearest}, or model.num_heads={heads // count * count or count}"
        )


def _schedule(config: DictConfig, count: int) -> Iterator[str]:
    dist = config.dist
    if config.train.compile:
        yield "train.compile=true compiles a whole model, and dist=pipeline cuts it up. Type: train.compile=false"
    if dist.schedule not in SCHEDULES:
        return  # told elsewhere
    fitting = -(-dist.microbatches // count) * count
    if dist.schedule == "1f1b" and dist.microbatches < count:
        yield (
            f"dist.microbatches={dist.microbatches} leaves ranks of a pipeline of {count} idle; dist.schedule=1f1b "
            f"needs one each. Type: dist.microbatches={2 * count}"
        )
    if dist.schedule == "interleaved" and dist.microbatches % count:
        yield (
            f"dist.microbatches={dist.microbatches}: dist.schedule=interleaved needs a multiple of the {count} ranks. "
            f"Type: dist.microbatches={fitting}"
        )
    clips = config.train.batch_size  # or auto
    if isinstance(clips, int) and clips < dist.microbatches:
        yield (
            f"train.batch_size={clips} can't be cut into dist.microbatches={dist.microbatches} "
            f"parts of a clip or more. Type: train.batch_size={dist.microbatches}"
        )


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
