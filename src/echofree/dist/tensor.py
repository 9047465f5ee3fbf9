"""Layers split over ranks that work on the same clips (DTensor), by the plan that the model gives.

A plan names Linear layers: "colwise" splits the outputs, "rowwise" the inputs of the layer that takes them up, so that
one exchange per pair is enough. All other weights are on every rank, where equal inputs give them equal gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from echofree.config.schema import DistConfig
from echofree.contracts import Batch, State, Task
from echofree.dist import shard
from echofree.dist.batchnorm import SyncBatchNorm
from echofree.dist.mesh import Grid
from echofree.dist.strategy import Amp, backward, saved_buffers


class TensorParallel:
    """Every rank of a `tensor` group holds a part of the planned layers; with `data` in the mesh, the groups read
    different clips and add their gradients up."""

    whole = False  # no rank holds the whole model

    def __init__(self, model: nn.Module, amp: Amp, grid: Grid, config: DistConfig):
        # ranks of one group must drop the same activations, or they'd no longer agree on what isn't split
        self.data_rank, self.data_size, self.random_rank = grid.data_rank, grid.data_size, grid.data_rank
        self.amp, self.grid, self._bucket_cap_mb = amp, grid, config.bucket_cap_mb
        split_layers(model, grid.along("tensor"))
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

    def micro(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()  # nothing is exchanged between data ranks before `run` ends

    def run(self, task: Task, batches: Sequence[Batch], total_weight: float) -> tuple[Tensor, dict[str, Tensor]]:
        self.leaves.clear()
        result = backward(self, self.amp, task, batches, 1.0 / total_weight)  # gradients are added up, not averaged
        self.leaves.take_gradients()
        if "data" in self.grid.axes:
            shard.sum_gradients(self.parameters, self.grid.group("data"), self._bucket_cap_mb)
        return result

    def evaluate(self, task: Task, batch: Batch) -> list[dict[str, Any]]:
        return task.evaluate(self.model, batch)

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


def split_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Splits the planned Linear layers in place. Layers that don't divide evenly were refused before."""
    plan: Mapping[str, str] = model.tensor_plan()  # type: ignore[operator]
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    parallelize_module(model, mesh, {name: styles[how]() for name, how in plan.items()})
