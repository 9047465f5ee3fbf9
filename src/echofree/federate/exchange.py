"""What of a model travels between clients and server, and in which form.

Trained weights and the running statistics of batch norms travel; what is frozen (`optim.freeze`) doesn't, for both
sides have it already, nor what stays on the client (`federated.keep_local`). On the wire each is an array in numpy's
own format, in the order of the model's names.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from echofree.errors import ConfigError
from echofree.inherit import last_match, unused

BATCHNORM = "batchnorm"  # a word of federated.keep_local for all batch norms
STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class Plan:
    """
    Attributes:
        shared: names of the tensors that travel, in their order.
        statistics: those of them that are running statistics, not weights.
        local: names that stay on each client.
        mark: 16 hex digits: equal ones name the same tensors and the same frozen rest.
    """

    shared: list[str]
    statistics: frozenset[str]
    local: list[str]
    mark: str


def plan(model: nn.Module, keep_local: Sequence[str]) -> Plan:
    """
    Raises:
        ConfigError: a pattern of `keep_local` that fits nothing, or nothing left to share.
    """
    state = model.state_dict()
    local = _local(model, keep_local, list(state))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    held = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        for name in STATISTICS
        if (own := list(module.parameters(recurse=False))) and not any(p.requires_grad for p in own)
    }
    moving = {name for name in state if name.rpartition(".")[2] in STATISTICS} - held
    shared = [name for name in state if name in trained | moving and name not in local]
    if not trained & set(shared):
        raise ConfigError(f"federated.keep_local={list(keep_local)} leaves nothing to share: no weight would travel")
    digest = hashlib.sha256()
    for name in shared:
        digest.update(f"{name} {list(state[name].shape)}\0".encode())
    for name in sorted(set(state) - set(shared) - set(local)):
        digest.update(name.encode() + state[name].detach().cpu().contiguous().numpy().tobytes())
    return Plan(shared, frozenset(moving & set(shared)), local, digest.hexdigest()[:16])


def _local(model: nn.Module, patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    norms = [prefix for prefix, module in model.named_modules() if isinstance(module, _BatchNorm)]
    rest = [pattern for pattern in patterns if pattern != BATCHNORM]
    if BATCHNORM in patterns and not norms:
        raise ConfigError(
            f"federated.keep_local={list(patterns)}: this model has no batch norms. Leave {BATCHNORM} out"
        )
    unused(rest, names, "federated.keep_local")
    found = []
    for name in names:
        hit = last_match(name, rest)
        by_word = BATCHNORM in patterns and name.rpartition(".")[0] in norms
        if by_word or (hit is not None and not hit.startswith("-")):
            found.append(name)
    return found


def pack(state: Mapping[str, Tensor], names: Sequence[str]) -> list[bytes]:
    """The tensors of these names, each in numpy's format."""
    return [to_bytes(state[name].detach().cpu().numpy()) for name in names]


def to_bytes(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def from_bytes(data: bytes) -> np.ndarray:
    """
    Raises:
        ValueError: no array in numpy's format.
    """
    found: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
    return found


def unpack(tensors: Sequence[bytes], names: Sequence[str]) -> dict[str, Tensor]:
    """
    Raises:
        ValueError: another number of tensors, or no tensors.
    """
    if len(tensors) != len(names):
        raise ValueError(f"{len(tensors)} tensors came, {len(names)} belong to this model")
    return {name: torch.from_numpy(from_bytes(data)) for name, data in zip(names, tensors, strict=True)}


def norm(update: Sequence[np.ndarray]) -> float:
    """Euclidean length of all of them together, in float64; NaN or inf where they aren't finite."""
    return float(np.sqrt(sum(float(np.vdot(a, a)) for a in (np.asarray(u, np.float64) for u in update))))
