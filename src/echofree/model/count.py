"""Parameters and multiply-accumulates of any model, by one counter.

Published counts of one and the same network differ by up to 7 times; these are comparable because they're all made
here. One multiply-accumulate (MAC) is one product that is added to a sum: weights of convolutions, Linear and recurrent
layers, scores and sums of attention. Norms, activations, gates, FFTs and biases are left out.

Legend: B batch, L frames, S attended frames, E embedding size, H hidden, I input size.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def count(model: nn.Module, seconds: float = 0.1) -> dict[str, Any]:
    """Counts a model (see `contracts.Model`) by running it on silence.

    The cost of a frame is the difference between a clip of 2 x `seconds` and one of `seconds`, so that what is paid
    once per clip doesn't enter. A module that computes beyond its Linear and convolution layers may say so:
    `macs(x) -> int` for one call with first argument x, or `macs_per_hop() -> int` for fixed signal processing, kept
    apart below.

    Returns:
        "parameters" and "trainable": numbers in the model; "macs_per_frame", "macs_per_s": of the network's layers;
        "fixed_macs_per_frame": of fixed signal processing that says what it costs; "by_layer": one row per counted
        module: name, type, parameters, macs_per_frame.
    """
    hops = max(1, round(seconds * int(model.sample_rate) / int(model.hop_samples)))  # type: ignore[arg-type]
    short, long = (_run(model, n * int(model.hop_samples)) for n in (hops, 2 * hops))  # type: ignore[arg-type]
    modules = dict(model.named_modules())
    rows = [
        {
            "name": name,
            "type": type(modules[name]).__name__,
            "parameters": sum(p.numel() for p in modules[name].parameters(recurse=_is_layer(modules[name]))),
            "macs_per_frame": (long[name] - short[name]) / hops,
        }
        for name in long
    ]
    per_frame = sum(row["macs_per_frame"] for row in rows)
    fixed = sum(m.macs_per_hop() for m in _saying(model, "macs_per_hop"))
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "macs_per_frame": per_frame,
        "macs_per_s": per_frame * int(model.sample_rate) / int(model.hop_samples),  # type: ignore[arg-type]
        "fixed_macs_per_frame": fixed,
        "by_layer": rows,
    }


def describe(model: nn.Module, by_layer: bool = False) -> str:
    """One line such as "BarkNet: 278,496 parameters, 390,464 MAC per 16 ms frame (24.4 MMAC/s), latency 32 ms", and
    with `by_layer` a table below it."""
    counted = count(model)
    rate = int(model.sample_rate)  # type: ignore[arg-type]
    hop_ms, latency_ms = (1e3 * int(getattr(model, name)) / rate for name in ("hop_samples", "latency_samples"))
    frozen = counted["parameters"] - counted["trainable"]
    line = (
        f"{type(model).__name__}: {counted['parameters']:,} parameters"
        + (f" ({frozen:,} frozen)" if frozen else "")
        + f", {counted['macs_per_frame']:,.0f} MAC per {hop_ms:g} ms frame ({counted['macs_per_s'] / 1e6:.1f} MMAC/s)"
        + f", latency {latency_ms:g} ms"
    )
    if not by_layer:
        return line
    width = max([len(row["name"]) for row in counted["by_layer"]], default=0)
    table = [
        f"  {row['name']:<{width}}  {row['type']:<16} {row['parameters']:>12,} {row['macs_per_frame']:>14,.0f}"
        for row in counted["by_layer"]
    ]
    head = f"  {'layer':<{width}}  {'type':<16} {'parameters':>12} {'MAC per frame':>14}"
    return "\n".join([line, head, *table])


def _run(model: nn.Module, num_samples: int) -> dict[str, int]:
    """MACs of one forward on a silent clip, by module name."""
    total: dict[str, int] = defaultdict(int)
    handles = []

    def hook(name: str) -> Callable[..., None]:
        def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
            total[name] += _macs(module, inputs, output)

        return add

    for name, module in model.named_modules():
        if _is_layer(module) or hasattr(module, "macs"):
            handles.append(module.register_forward_hook(hook(name)))
    training = [m for m in model.modules() if m.training]
    parameter = next(model.parameters(), torch.zeros(0))
    silence = torch.zeros(1, num_samples, device=parameter.device)
    model.eval()
    try:
        with torch.no_grad():
            model(silence, silence)
    finally:
        for module in training:
            module.training = True
        for handle in handles:
            handle.remove()
    return total


def _saying(model: nn.Module, method: str) -> list[Any]:
    """The modules of `model` that have `method`."""
    return [module for module in model.modules() if hasattr(module, method)]


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, (*CONVOLUTIONS, *TRANSPOSED, nn.Linear, nn.RNNBase, nn.MultiheadAttention))


def _macs(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> int:
    """Multiply-accumulates of one call."""
    x = inputs[0]
    if isinstance(module, CONVOLUTIONS):
        return output.numel() * (module.in_channels // module.groups) * math.prod(module.kernel_size)
    if isinstance(module, TRANSPOSED):
        return x.numel() * (module.out_channels // module.groups) * math.prod(module.kernel_size)
    if isinstance(module, nn.Linear):
        return output.numel() * module.in_features
    if isinstance(module, nn.RNNBase):
        # weight matrices of all layers and directions, each used once per frame
        return x.shape[:-1].numel() * sum(p.numel() for n, p in module.named_parameters() if n.startswith("weight"))
    if isinstance(module, nn.MultiheadAttention):
        size, queries, keys = module.embed_dim, x.shape[:-1].numel(), inputs[1].shape[:-1].numel()
        attended = inputs[1].shape[1 if module.batch_first and inputs[1].dim() == 3 else 0]
        return 2 * queries * size**2 + keys * size * (module.kdim + module.vdim) + 2 * queries * attended * size
    counter: Any = module
    return int(counter.macs(*inputs))
