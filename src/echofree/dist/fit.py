"""Whether a model can be shared out as `dist` asks: said before any rank starts, with what would work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from echofree.config import layout
from echofree.config.schema import DistConfig, StrategyKind
from echofree.errors import ConfigError


def problems(config: DistConfig, model: nn.Module, size: int) -> list[str]:
    """What is wrong, as texts; empty when it can run.

    Args:
        config: the group `dist`.
        model: built, not shared out yet.
        size: ranks.
    """
    if config.name is StrategyKind.single or size == 1:
        return []
    try:
        axes = layout.axes(config.name.value, layout.asked(config.mesh), size)
    except ConfigError as error:
        return list(error.problems)
    found = []
    if config.cpu_offload and not torch.cuda.is_available():
        found.append(
            "dist.cpu_offload=true moves shards between a GPU and main memory, and torch finds no GPU here. "
            "Type dist.cpu_offload=false"
        )
    if "tensor" in axes:
        found += _tensor(model, axes["tensor"])
    if "pipeline" in axes:
        found += _pipeline(config, model, axes["pipeline"])
    return found


def _tensor(model: nn.Module, count: int) -> list[str]:
    kind = type(model).__name__
    if not callable(getattr(model, "tensor_plan", None)):
        layers = sorted(
            {type(m).__name__ for m in model.modules() if isinstance(m, (nn.RNNBase, nn.Conv1d, nn.Conv2d))}
        )
        why = f"its {', '.join(layers)} layers can't be split by DTensor" if layers else "it offers no tensor_plan()"
        return [
            (
                f"a tensor axis needs a model whose Linear layers can be split, and {kind} isn't one: {why}. "
                "Type dist=ddp or dist=fsdp, or model=base"
            )
        ]
    plan: Mapping[str, str] = model.tensor_plan()  # type: ignore[operator]
    modules, found = dict(model.named_modules()), []
    for name, how in plan.items():
        layer: Any = modules.get(name)
        if not isinstance(layer, nn.Linear) or how not in ("colwise", "rowwise"):
            found.append(
                f"tensor_plan() of {kind} says {name}: {how}, but only Linear layers are split, colwise | rowwise"
            )
        elif (layer.out_features if how == "colwise" else layer.in_features) % count:
            length = layer.out_features if how == "colwise" else layer.in_features
            found.append(f"{name} has {length} values to split over {count} ranks. {_divisors(length, count)}")
    heads = {
        int(module.num_heads)
        for name, module in modules.items()
        if hasattr(module, "num_heads") and any(planned.startswith(f"{name}.") for planned in plan)
    }
    found += [
        f"{number} attention heads can't be shared out evenly over {count} ranks. {_divisors(number, count)}"
        for number in sorted(heads)
        if number % count
    ]
    return found[:4]


def _divisors(length: int, count: int) -> str:
    fitting = [n for n in range(2, length + 1) if length % n == 0]
    nearest = min(fitting, key=lambda n: abs(n - count))
    return f"Type dist.num_procs={nearest}, or dist.mesh={{data:...,tensor:{nearest}}}"


def _pipeline(config: DistConfig, model: nn.Module, count: int) -> list[str]:
    kind = type(model).__name__
    missing = [name for name in ("blocks", "enter", "leave") if not callable(getattr(model, name, None))]
    if missing:
        return [
            (
                f"dist=pipeline needs a model that can be cut into blocks, and {kind} lacks {', '.join(missing)}. "
                "Type dist=ddp or dist=fsdp, or model=base"
            )
        ]
    found = []
    blocks: list[nn.Module] = list(model.blocks())  # type: ignore[operator]
    stages = num_stages(config, count)
    if stages > len(blocks):
        found.append(
            f"{kind} has {len(blocks)} blocks, dist.schedule={config.schedule} on {count} ranks needs {stages} stages. "
            f"Type dist.num_procs={max(2, len(blocks) * count // stages)}, or a model of more layers"
        )
    inside = {id(p) for block in blocks for p in block.parameters()}
    outside = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in inside]
    if outside:
        found.append(
            f"dist=pipeline trains what blocks() holds, and {', '.join(outside[:3])} is outside. Type dist=fsdp"
        )
    counting = [n for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if counting:
        found.append(
            f"dist=pipeline cuts a batch into parts, and {counting[0]} (a batch norm) would see each part alone. "
            "Type dist=ddp or dist=fsdp, or use another norm"
        )
    return found + _named(config, model, blocks, stages)


def _named(config: DistConfig, model: nn.Module, blocks: list[nn.Module], stages: int) -> list[str]:
    if not config.stages:
        return []
    names = block_names(model, blocks)
    unknown = [name for name in config.stages if name not in names[1:]]
    if unknown:
        return [f"dist.stages={list(config.stages)}: {unknown[0]} begins no stage. Blocks: {', '.join(names[1:])}"]
    if len(config.stages) != stages - 1 or sorted(config.stages, key=names.index) != list(config.stages):
        return [
            (
                f"dist.stages={list(config.stages)} must name, in order, the {stages - 1} block(s) that begin stage "
                f"2 to {stages}. Blocks: {', '.join(names[1:])}"
            )
        ]
    return []


def num_stages(config: DistConfig, count: int) -> int:
    """Stages of a pipeline of `count` ranks."""
    return 2 * count if config.schedule == "interleaved" else count


def block_names(model: nn.Module, blocks: list[nn.Module]) -> list[str]:
    """The blocks' names in the model."""
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(block)] for block in blocks]
