"""Models of which a rank holds a part: whole tensors out of shards, shards out of whole tensors, one norm for all.

A sharded weight is a DTensor: each rank's part is a plain tensor inside it. Optimizers, the moving average and the loop
see the plain parts only (`Leaves`), so that fused kernels work although some weights of a model are sharded and others
not, and no operation on them can turn into an exchange.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echofree.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_sharded(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether it is a DTensor. Importing them takes most of a second, and before that there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it, sharing its memory."""
    if not is_sharded(tensor):
        return tensor.detach()
    part: Any = tensor.to_local().detach()
    return part.wait() if hasattr(part, "wait") else part


class Leaves:
    """The trainable weights as an optimizer sees them: plain parameters that share memory with the model's.

    Attributes:
        sources: name -> the model's parameter, sharded or not.
        named: name -> the plain one. A weight that isn't sharded is itself.
    """

    def __init__(self, model: nn.Module):
        self.sources = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.named = {
            n: nn.Parameter(local(p)) if is_sharded(p) else p for n, p in self.sources.items()
        }  # fmt: skip

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.named.values())

    def clear(self) -> None:
        """Forgets the gradients of the model's own parameters: an optimizer only clears what it sees."""
        for source in self.sources.values():
            source.grad = None

    def take_gradients(self) -> None:
        """After a backward pass: the optimizer sees its part of each gradient."""
        for name, leaf in self.named.items():
            source = self.sources[name]
            if leaf is not source:
                leaf.grad = None if source.grad is None else _gradient(source)


def _gradient(source: nn.Parameter) -> Tensor:
    grad: Any = source.grad
    if is_sharded(source) and grad.placements != source.placements:
        grad = grad.redistribute(placements=source.placements)  # torch may leave a sum for later
    return local(grad)


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank, on the CPU if it was sharded; every rank of its mesh calls it."""
    return _assembled(tensor, tensor) if is_sharded(tensor) else tensor


def _assembled(part: Tensor, like: DTensor) -> Tensor:
    """The whole of which every rank holds `part`, cut as `like` is."""
    from torch.distributed.tensor import DTensor

    shard = local(part).to(like.device_mesh.device_type)  # offloaded shards come back for the exchange
    full = DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    ).full_tensor()
    return full.cpu()


def cut(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, cut as `like` is; no exchange."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    piece = tensor[tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))]
    return piece.contiguous()  # fused optimizers take the moments' strides to be those of the weight


def gather(named: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Local tensors, each cut like the weight of its name -> whole ones. Tensors of another size (a step count) are
    the same everywhere and stay as they are."""
    result = {}
    for name, tensor in named.items():
        like = sources[name]
        result[name] = _assembled(tensor, like) if is_sharded(like) and tensor.dim() == like.dim() else tensor
    return result


def part(named: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of `gather`, without an exchange."""
    return {
        name: cut(tensor, sources[name]) if tensor.dim() == sources[name].dim() else tensor
        for name, tensor in named.items()
    }


def pieces(named: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Local tensors, each cut like the weight of its name, as tensors that know their place in the whole, in the same
    memory. No exchange."""
    return {
        name: placed(tensor, like) if is_sharded(like := sources[name]) and tensor.dim() == like.dim() else tensor
        for name, tensor in named.items()
    }


def placed(part: Tensor, like: DTensor) -> Tensor:
    """`part` as the shard of a tensor that is cut as `like` is. Shards that were moved to main memory stay there, which
    torch's own from_local wouldn't let them."""
    from torch.distributed.tensor import DTensor

    return DTensor(part, like._spec, requires_grad=False)


def load_into(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies whole tensors into a model of which this rank holds a part.

    Raises:
        CheckpointError: names or shapes differ.
    """
    own = model.state_dict()
    check_names(own, state)
    with torch.no_grad():
        for name, tensor in own.items():
            (tensor.to_local() if is_sharded(tensor) else tensor).copy_(cut(state[name], tensor))


def check_names(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Raises a CheckpointError that lists what a checkpoint lacks, has too much, or has in another shape."""
    problems = [f"{name} is missing" for name in own if name not in state]
    problems += [f"{name} isn't part of the model" for name in state if name not in own]
    problems += [
        f"{name} is {list(state[name].shape)} in the checkpoint and {list(tensor.shape)} in the model"
        for name, tensor in own.items()
        if name in state and state[name].shape != tensor.shape
    ]
    if problems:
        raise CheckpointError("the checkpoint is of another model: " + "; ".join(problems[:10]))


# --- optimizer states -------------------------------------------------------------------------------------------------


def named_state(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """What an optimizer remembers, by the name of the weight: the same whatever holds the weights."""
    names = {id(p): name for name, p in named.items()}
    return {names[id(p)]: dict(values) for p, values in optimizer.state.items()}


def load_named_state(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Any]], named: Mapping[str, Tensor]
) -> None:
    """The reverse of `named_state`; weights that aren't in `named` are left to other ranks."""
    names = {id(p): name for name, p in named.items()}
    ordered = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    numbered = {number: dict(state[name]) for number, name in enumerate(ordered) if name in state}
    optimizer.load_state_dict({"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]})


def each_tensor(
    state: Mapping[str, Mapping[str, Any]], change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> dict[str, dict[str, Any]]:
    """`state` with `change` applied to the tensors of each key (exp_avg, ...) by name; other values as they are."""
    result = {name: dict(values) for name, values in state.items()}
    keys = list(dict.fromkeys(key for values in state.values() for key in values))
    for key in keys:
        tensors = {name: v[key] for name, v in state.items() if isinstance(v.get(key), Tensor)}
        for name, tensor in change(tensors).items():
            result.setdefault(name, {})[key] = tensor
    return result


# --- gradients --------------------------------------------------------------------------------------------------------


def total_norm(
    parameters: Mapping[str, nn.Parameter], sources: Mapping[str, Tensor], device: torch.device, apart: Any = None
) -> Tensor:
    """The 2-norm of the whole model's gradient, with the same bits on every rank.

    Args:
        parameters: plain ones that carry this rank's part of the gradient.
        sources: the model's, which say how they are sharded.
        device: where exchanges happen.
        apart: a group whose ranks hold different weights.
    """
    sums: dict[tuple[Any, ...], list[Tensor]] = {}
    for name, parameter in parameters.items():
        found = sums.setdefault(_groups(sources[name], apart), [])
        if parameter.grad is not None:
            found.append(parameter.grad)
    keys = list(sums)
    squares = torch.stack([_square_sum(grads, device) for grads in sums.values()] or [torch.zeros((), device=device)])
    for group in dict.fromkeys(group for key in keys for group in key):
        rows = [i for i, key in enumerate(keys) if group in key]
        shared = squares[rows]
        dist.all_reduce(shared, group=group)
        squares[rows] = shared
    return squares.sum().sqrt().float()


def _groups(source: Tensor, apart: Any) -> tuple[Any, ...]:
    groups = [] if apart is None else [apart]
    if is_sharded(source):
        mesh = source.device_mesh
        groups += [mesh.get_group(i) for i, placement in enumerate(source.placements) if not placement.is_replicate()]
    return tuple(groups)


def _square_sum(gradients: list[Tensor], device: torch.device) -> Tensor:
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm(gradients))
    return norms.to(device, torch.float64).square().sum()


def sum_gradients(parameters: Iterable[nn.Parameter], group: Any, bucket_cap_mb: float) -> None:
    """Adds gradients up over a group, in buckets whose exchanges run side by side. A weight that no gradient reached
    here counts as zero, since it may have one elsewhere."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    pending = []
    for bucket in _buckets(gradients, int(bucket_cap_mb * 2**20)):
        flat = torch.cat([g.reshape(-1) for g in bucket])
        pending.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in pending:
        assert work is not None
        work.wait()
        for gradient, values in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(values.view_as(gradient))


def _buckets(tensors: Sequence[Tensor], limit: int) -> list[list[Tensor]]:
    """Neighbours of one type, each bucket up to `limit` bytes or one tensor."""
    buckets: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        if not buckets or tensor.dtype != buckets[-1][0].dtype or size + tensor.nbytes > limit:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.nbytes
    return buckets
