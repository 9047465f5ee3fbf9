"""Weights, gradients and optimizer states shared out over the data ranks (torch's fully_shard, FSDP2).

Each block's weights are collected from all ranks right before it runs and given back after; gradients are averaged
while they are shared out again. With `replicate` in the mesh, groups of ranks hold whole copies; with `tensor`, layers
are split as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from echofree.config.schema import DistConfig
from echofree.contracts import Batch, State, Task
from echofree.dist import shard
from echofree.dist.batchnorm import SyncBatchNorm
from echofree.dist.mesh import Grid
from echofree.dist.strategy import Amp, backward, saved_buffers
from echofree.dist.tensor import split_layers


class Fsdp:
    """Every rank holds a share of all weights and reads an own share of the batch."""

    whole = False  # no rank holds the whole model

    def __init__(self, model: nn.Module, amp: Amp, grid: Grid, config: DistConfig):
        self.data_rank, self.data_size, self.random_rank = grid.data_rank, grid.data_size, grid.data_rank
        self.amp, self.grid = amp, grid
        if "tensor" in grid.axes:
            split_layers(model, grid.along("tensor"))
        self.modules = shard_model(model, grid, config, amp.dtype)
        self.bare = self.model = model
        self.leaves = shard.Leaves(model)
        self.parameters = self.leaves.parameters
        self.buffers = saved_buffers(model)
        self._apart = saved_buffers(model, besides=SyncBatchNorm)

    def named(self) -> dict[str, Tensor]:
        return dict(self.leaves.named)

    def settle(self) -> None:
        """Rank 0's running statistics for all."""
        for buffer in self._apart:
            dist.broadcast(buffer, 0)

    @contextmanager
    def micro(self, last: bool) -> Iterator[None]:
        for module in self.modules:
            module.set_requires_gradient_sync(last, recurse=False)
        yield

    def run(self, task: Task, batches: Sequence[Batch], total_weight: float) -> tuple[Tensor, dict[str, Tensor]]:
        self.leaves.clear()
        if self._apart:
            self.settle()
        result = backward(self, self.amp, task, batches, self.data_size / total_weight)  # ranks' gradients are averaged
        self.leaves.take_gradients()
        return result

    def evaluate(self, task: Task, batch: Batch) -> list[dict[str, Any]]:
        try:
            return task.evaluate(self.model, batch)
        finally:
            for module in self.modules:  # the root keeps its weights for a backward pass that doesn't come
                module.reshard()

    def clip(self, max_norm: float | None) -> Tensor:
        norm = shard.total_norm(self.leaves.named, self.leaves.sources, self.grid.device)
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, max_norm, norm)
        return norm

    def model_state(self) -> State:
        return {name: shard.whole(tensor) for name, tensor in self.model.state_dict().items()}

    def load_model_state(self, state: State) -> None:
        shard.load_into(self.model, state)

    def gather(self, named: State) -> State:
        return shard.gather(named, self.leaves.sources)

    def part(self, named: State) -> State:
        return shard.part(named, self.leaves.sources)

    def pieces(self, named: State) -> State:
        return shard.pieces(named, self.leaves.sources)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"state": shard.each_tensor(shard.named_state(optimizer, self.leaves.named), self.gather)}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        shard.load_named_state(optimizer, shard.each_tensor(state["state"], self.part), self.leaves.named)


def shard_model(model: nn.Module, grid: Grid, config: DistConfig, dtype: torch.dtype | None) -> list[FSDPModule]:
    """Shares the weights out, block by block and then the rest; -> the modules that collect and give back."""
    # a Linear block returns a view; torch warns since a change of it in place would be fatal, and no block does that
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = grid.along("replicate", "data")
    offload: OffloadPolicy = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()
    for block in blocks(model):
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=config.reshard_after_forward,
            mp_policy=_precision(block, dtype),
            offload_policy=offload,
        )
    # what is left belongs to the whole model, whose backward pass begins where its forward pass ended: keep it
    rest = MixedPrecisionPolicy(cast_forward_inputs=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=rest, offload_policy=offload)
    modules: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:  # brings the shards to their final place in memory, which the optimizer then shares
        module.unshard()
        module.reshard()
    return modules


def blocks(model: nn.Module) -> list[nn.Module]:
    """The model's blocks, where it has any."""
    offered = getattr(model, "blocks", None)
    return list(offered()) if callable(offered) else []


def _precision(block: nn.Module, dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """A block's weights travel in the precision in which autocast uses them; gradients are averaged in float32.
    Recurrent layers and batch norms keep float32, as autocast does. Inputs are left alone."""
    keeps = (nn.RNNBase, nn.BatchNorm1d, nn.BatchNorm2d, SyncBatchNorm)
    if dtype is None or any(isinstance(module, keeps) for module in block.modules()):
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
