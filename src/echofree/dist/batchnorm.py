"""Batch normalisation over all data ranks, on any back end.

torch's SyncBatchNorm refuses CPU tensors, so that parity between one process and many could not be shown on a laptop.
This one uses a differentiable all-reduce of (sum, sum of squares) about the common mean and equals one process with the
whole batch. The mean takes a first exchange of its own: sums of squares about anything else lose digits when the mean
is far larger than the deviation, as it is in the first steps on unscaled features.
Legend: B batch, C channel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echofree.errors import ConfigError


class _Sum(torch.autograd.Function):
    """Sum over ranks whose gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SyncBatchNorm(nn.Module):
    """Drop-in for nn.BatchNorm1d/2d with the same parameter and buffer names. Input [B, C, ...]."""

    num_batches_tracked: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, source: nn.BatchNorm1d | nn.BatchNorm2d, group: Any = None):
        super().__init__()
        self.eps, self.momentum, self.group = source.eps, source.momentum, group
        self.weight, self.bias = source.weight, source.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(source, name))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        axes = [0, *range(2, x.dim())]
        shape = [1, -1] + [1] * (x.dim() - 2)
        wide = x if x.dtype == torch.float64 else x.float()
        with torch.no_grad():
            count = wide.new_full((1,), x.numel() / x.shape[1], dtype=torch.float64)
            first = torch.cat([wide.sum(axes, dtype=torch.float64), count])  # [C + 1]
            dist.all_reduce(first, group=self.group)
            total = first[-1].to(wide.dtype)
            centre = (first[:-1] / first[-1]).to(wide.dtype)  # [C]
        shifted = wide - centre.view(shape)
        sums = _Sum.apply(torch.cat([shifted.sum(axes), shifted.square().sum(axes)]), self.group)  # [2C]
        mean, square = (sums / total).chunk(2)  # [C], [C]; the mean is that of what `centre` rounded away
        var = (square - mean.square()).clamp_min(0)
        with torch.no_grad():
            unbiased = var * total / (total - 1).clamp_min(1)
            share = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked + 1)
            self.running_mean.lerp_((mean + centre).to(self.running_mean.dtype), share)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
            self.num_batches_tracked += 1
        y = (shifted - mean.view(shape)) * torch.rsqrt(var + self.eps).view(shape)
        if self.weight is not None:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(x.dtype)


def synchronise(model: nn.Module, group: Any = None) -> int:
    """Replaces every batch norm in `model` in place; -> how many.

    Raises:
        ConfigError: one keeps no running statistics; in evaluation ranks would wait for each other's batches.
    """
    count = 0
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
                if child.running_mean is None:
                    raise ConfigError(
                        f"{name} is a batch norm without running statistics, which can't be synchronised. Build it "
                        "with track_running_stats=True, or type dist.sync_batchnorm=off"
                    )
                setattr(module, name, SyncBatchNorm(child, group))
                count += 1
    return count


def has_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d | SyncBatchNorm) for m in model.modules())
