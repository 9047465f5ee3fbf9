"""Where the work of one step runs: in this process alone, or in every rank with gradients averaged (DDP). Those that
share out the model itself stand beside: fsdp, tensor, pipeline.

The loop knows none by name. The factor by which a back end averages gradients sits in `run` of each, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from echofree.config.schema import DistConfig, StrategyKind, SyncBatchNorm
from echofree.contracts import Batch, State, Strategy, Task
from echofree.dist import fit, shard
from echofree.dist.batchnorm import SyncBatchNorm as Synchronised
from echofree.dist.batchnorm import has_batchnorm, synchronise
from echofree.dist.straggler import GradientClock
from echofree.dist.world import World
from echofree.errors import ConfigError

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Amp:
    """Mixed precision: autocast around the forward pass, and a loss scale for fp16.

    fp32 and bf16 need no scale; the scaler is then a no-op and every branch below falls away.
    """

    def __init__(self, precision: str, device: torch.device):
        self.dtype, self.device = DTYPES[precision], device
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def autocast(self) -> AbstractContextManager[Any]:
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(self, optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
        """One optimizer step, left out on the device when the norm isn't finite: nothing is read back to the host with
        a fused optimizer. Other optimizers cost one read per step."""
        if self.scaler.is_enabled():
            # the norm is that of all ranks: a rank that holds only part of the model must not decide alone
            for found in self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                found.copy_(~torch.isfinite(norm))
            self.scaler.step(optimizer)
            self.scaler.update()
        elif getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
            optimizer.step()
        elif bool(torch.isfinite(norm)):
            optimizer.step()


class Single:
    """One process, one device."""

    data_rank = random_rank = 0
    data_size = 1
    whole = True

    def __init__(self, model: nn.Module, amp: Amp):
        self.bare = self.model = model
        self.amp = amp
        self._named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(self._named.values())
        self.buffers = saved_buffers(model)

    def named(self) -> dict[str, Tensor]:
        return dict(self._named)

    def settle(self) -> None:
        """Nothing can differ from other ranks."""

    def micro(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def run(self, task: Task, batches: Sequence[Batch], total_weight: float) -> tuple[Tensor, dict[str, Tensor]]:
        return backward(self, self.amp, task, batches, 1.0 / total_weight)

    def evaluate(self, task: Task, batch: Batch) -> list[dict[str, Any]]:
        return task.evaluate(self.bare, batch)

    def clip(self, max_norm: float | None) -> Tensor:
        return _clip(self.parameters, max_norm)

    def model_state(self) -> State:
        return self.bare.state_dict()

    def load_model_state(self, state: State) -> None:
        self.bare.load_state_dict(state)

    def gather(self, named: State) -> State:
        return named

    def part(self, named: State) -> State:
        return named

    def pieces(self, named: State) -> State:
        return named

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"state": shard.named_state(optimizer, self._named)}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        shard.load_named_state(optimizer, state["state"], self._named)


class Ddp:
    """Every rank holds the whole model and an own share of the batch; gradients are averaged over ranks, which
    `run` turns back into the sum that the global weight asks for."""

    whole = True

    def __init__(self, model: nn.Module, amp: Amp, world: World, bucket_cap_mb: float, find_unused: bool):
        self.data_rank = self.random_rank = world.rank
        self.data_size = world.size
        self.bare, self.amp = model, amp
        self._named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(self._named.values())
        self.buffers = saved_buffers(model)
        # synchronised statistics are equal on all ranks by themselves, constants that aren't saved never change
        self._apart = saved_buffers(model, besides=Synchronised)
        device = self.parameters[0].device
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused,
            gradient_as_bucket_view=True,
            forward_sync_buffers=bool(self._apart),
        )
        self.model: nn.Module = self._ddp
        self.clock = GradientClock(self.parameters, device)

    def named(self) -> dict[str, Tensor]:
        return dict(self._named)

    def settle(self) -> None:
        """Before an evaluation, on every rank: rank 0's running statistics for all. DDP copies them at the start of a
        forward pass only, so that after a step each rank has its own."""
        for buffer in self._apart:
            dist.broadcast(buffer, 0)

    def micro(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._ddp.no_sync()

    def run(self, task: Task, batches: Sequence[Batch], total_weight: float) -> tuple[Tensor, dict[str, Tensor]]:
        result = backward(self, self.amp, task, batches, self.data_size / total_weight)
        self.clock.stop()
        return result

    def evaluate(self, task: Task, batch: Batch) -> list[dict[str, Any]]:
        return task.evaluate(self.bare, batch)

    def clip(self, max_norm: float | None) -> Tensor:
        return _clip(self.parameters, max_norm)

    def model_state(self) -> State:
        return self.bare.state_dict()

    def load_model_state(self, state: State) -> None:
        self.bare.load_state_dict(state)

    def gather(self, named: State) -> State:
        return named

    def part(self, named: State) -> State:
        return named

    def pieces(self, named: State) -> State:
        return named

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"state": shard.named_state(optimizer, self._named)}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        shard.load_named_state(optimizer, state["state"], self._named)


def saved_buffers(model: nn.Module, besides: tuple[type[nn.Module], ...] | type[nn.Module] = ()) -> list[Tensor]:
    """What a forward pass may change beside the weights: the buffers that a checkpoint holds."""
    modules = [m for m in model.modules() if not isinstance(m, besides)]
    return [b for m in modules for n, b in m.named_buffers(recurse=False) if n not in m._non_persistent_buffers_set]


def backward(
    strategy: Strategy, amp: Amp, task: Task, batches: Sequence[Batch], factor: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward and backward of `factor` times each micro-batch's loss; -> (sum of the losses, sums of their parts)."""
    total: Tensor | None = None
    totals: dict[str, Tensor] = {}
    for i, batch in enumerate(batches):
        with strategy.micro(last=i == len(batches) - 1):
            with amp.autocast():
                loss, _, parts = task.loss(strategy.model, batch)
            amp.backward(loss * factor)
        total = loss.detach() if total is None else total + loss.detach()
        totals = {k: v.detach() + totals[k] if totals else v.detach() for k, v in parts.items()}
    assert total is not None, "a step has at least one micro-batch"
    return total, totals


def _clip(parameters: list[nn.Parameter], max_norm: float | None) -> Tensor:
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def build_strategy(config: DistConfig, model: nn.Module, amp: Amp, world: World) -> Strategy:
    """`dist.name` -> strategy. `model` is on its device. Every rank calls it.

    Raises:
        ConfigError: dist=single in a world of several ranks, or a model that this strategy can't share out.
    """
    if config.name is StrategyKind.single:
        if world.size > 1:
            raise ConfigError(
                f"dist=single, but {world.size} ranks were started. Type dist=ddp to train one model together"
            )
        return Single(model, amp)
    if world.size == 1:
        return Single(model, amp)  # a world of one exchanges nothing: the same numbers without a process group
    found = fit.problems(config, model, world.size)
    if found:
        raise ConfigError(found)
    synchronised = config.sync_batchnorm is not SyncBatchNorm.off and has_batchnorm(model)
    if config.name is StrategyKind.ddp:
        if synchronised:
            synchronise(model)
        return Ddp(model, amp, world, config.bucket_cap_mb, config.find_unused_parameters)
    from echofree.dist.mesh import build_grid  # torch's sharding costs a second: only those who use it pay

    grid = build_grid(config, world, amp.device)
    if synchronised and grid.data_size > 1:
        synchronise(model, None if "replicate" in grid.axes else grid.group("data"))
    if config.name is StrategyKind.fsdp:
        from echofree.dist.fsdp import Fsdp

        return Fsdp(model, amp, grid, config)
    if config.name is StrategyKind.tensor:
        from echofree.dist.tensor import TensorParallel

        return TensorParallel(model, amp, grid, config)
    from echofree.dist.pipeline import Pipeline

    return Pipeline(model, amp, grid, config)
