"""The task of learning with the rounding that an 8-bit export will bring: quantisation-aware training.

Forward, the weights of linear and recurrent layers take 256 values per output and the inputs of these layers 256 values
per frame, as `export=onnx_int8` rounds them; backward, rounding counts as the identity (straight-through estimator,
Bengio et al. 2013, "Estimating or propagating gradients through stochastic neurons for conditional computation";
Jacob et al. 2018, "Quantization and training of neural networks for efficient integer-arithmetic-only inference").
The weights that are stored stay float, under their own names: the checkpoint is an ordinary one, and the export
quantises it. Validation hears the rounded model too, so `best` is the best one after the export.

Legend: B batch, T samples, L frames.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from echofree.contracts import Batch, Loss
from echofree.errors import ConfigError
from echofree.task.supervised import Supervised

LEVELS = 255  # steps between the 256 values
STATISTICS = nn.modules.batchnorm._BatchNorm


class QuantAware:
    """`Supervised` on a model that is rounded to 8 bit; see `contracts.Task`. Works with dist=single and dist=ddp.

    Args:
        loss, metrics, sample_rate, aecmos_cut: of `Supervised`.
        activations: rounds the layers' inputs too.
        keep: parts of the names of layers that stay float, as `export.onnx_int8.keep`.
        freeze_statistics: batch norms keep the means and variances that they come with, which the export folds into the
            weights.
    """

    passes_front = True

    def __init__(
        self,
        loss: Loss,
        metrics: Sequence[str],
        sample_rate: int,
        activations: bool = True,
        keep: Sequence[str] = (),
        freeze_statistics: bool = True,
        aecmos_cut: str = "whole",
    ):
        self.supervised = Supervised(loss, metrics, sample_rate, aecmos_cut)
        self.activations, self.keep, self.freeze_statistics = activations, tuple(keep), freeze_statistics

    def check_model(self, model: nn.Module) -> None:
        """Before the run.

        Raises:
            ConfigError: nothing of the model would be rounded, or a name in `keep` fits no layer.
        """
        layers = dict(quantised_weights(model, ()))
        problems = [
            f"task.keep={part}: no layer has that in its name. There are {', '.join(layers)}"
            for part in self.keep
            if not any(part in name for name in layers)
        ]
        if not problems and not quantised_weights(model, self.keep):
            problems.append(
                f"task=quantise: {type(model).__name__} has no linear or recurrent layer that would be 8 bit. "
                "Type: task=supervised"
            )
        if problems:
            raise ConfigError(problems)

    def weight(self, batch: Batch) -> float:
        """Seconds of valid audio."""
        return self.supervised.weight(batch)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        if self.freeze_statistics:
            for module in model.modules():
                if isinstance(module, STATISTICS):
                    module.eval()
        return self.supervised.loss(self._rounded(model), batch)

    def evaluate(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """See `Supervised.evaluate`, of the rounded model."""
        return self.supervised.evaluate(self._rounded(model), batch)

    def _rounded(self, model: nn.Module) -> Rounded:
        return Rounded(model, self.keep, self.activations)


class Rounded(nn.Module):
    """Calls a model with rounded weights and activations, and leaves it as it was.

    Args:
        model: wrapped or not; its parameters aren't this module's.
        keep: parts of names of layers that stay float.
        activations: whether the layers' inputs are rounded.
    """

    def __init__(self, model: nn.Module, keep: Sequence[str], activations: bool):
        super().__init__()
        self._model, self.keep, self.activations = [model], tuple(keep), activations
        if hasattr(model, "sample_rate"):  # a wrapped model doesn't show it
            self.sample_rate = model.sample_rate

    def forward(self, *args: Any, **keywords: Any) -> Any:
        (model,) = self._model
        weights = {name: round_weight(weight) for name, weight in quantised_weights(model, self.keep).items()}
        with rounded_inputs(model, self.keep) if self.activations else contextlib.nullcontext():
            return functional_call(model, weights, args, keywords)


def quantised_weights(model: nn.Module, keep: Sequence[str]) -> dict[str, Tensor]:
    """The weights that an 8-bit export rounds, by name: of linear and recurrent layers."""
    found = {}
    for layer, module in _layers(model, keep):
        names = ["weight"] if isinstance(module, nn.Linear) else [n for n in module._parameters if "weight" in n]
        found.update({f"{layer}.{name}" if layer else name: module._parameters[name] for name in names})
    return {name: weight for name, weight in found.items() if weight is not None}


def round_weight(weight: Tensor) -> Tensor:
    """[outputs, ...] with 256 values per output between its smallest and its largest one, 0 among them."""
    flat, shape = weight.detach().flatten(1), (-1, *[1] * (weight.ndim - 1))
    return _through(weight, flat.amin(1).view(shape), flat.amax(1).view(shape))


def round_frames(x: Tensor) -> Tensor:
    """[B, L, ...] with 256 values per frame."""
    flat = x.detach().flatten(2)
    shape = (*x.shape[:2], *[1] * (x.ndim - 2))
    return _through(x, flat.amin(2).view(shape), flat.amax(2).view(shape))


def _through(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Rounds forward; backward it's the identity."""
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = ((high - low) / LEVELS).clamp(min=torch.finfo(x.dtype).tiny * 1e4)
    zero = (-low / scale).round()
    value = ((x.detach() / scale).round() + zero).clamp(0, LEVELS)
    return x + ((value - zero) * scale - x.detach())


@contextlib.contextmanager
def rounded_inputs(model: nn.Module, keep: Sequence[str]) -> Iterator[None]:
    """While it lasts, the layers hear rounded inputs."""

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (round_frames(args[0]), *args[1:]) if args and args[0].ndim > 2 else args

    handles = [module.register_forward_pre_hook(hook) for _, module in _layers(model, keep)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layers(model: nn.Module, keep: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.RNNBase) and not any(part in name for part in keep):
            yield name, module
