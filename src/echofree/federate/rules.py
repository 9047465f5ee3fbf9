"""What a federated training asks of its config beside what every training does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from echofree.config.schema import FederatedRole, FederatedWeights, ScheduleKind, StrategyKind
from echofree.errors import ConfigError

FAULTS = ("late", "drop", "nan", "shape", "poison")


def settle(config: Any) -> list[str]:
    """Completes `data.partition` where the command line leaves it open. -> notes for the log

    Raises:
        ConfigError: all that doesn't go together.
    """
    from omegaconf import OmegaConf, open_dict

    found = list(problems(config))
    if found:
        raise ConfigError(found)
    if config.federated.role is not FederatedRole.simulation:
        return []
    notes, count = [], int(config.federated.num_clients)
    parts = OmegaConf.select(config, "data.partition") or {}
    with open_dict(config):
        if not parts.get("by"):
            OmegaConf.update(config, "data.partition.by", "dirichlet", force_add=True)
            notes.append(
                "clients get unlike shares of the scenarios: data.partition.by=dirichlet, since none was asked"
            )
        OmegaConf.update(config, "data.partition.num", count, force_add=True)
        OmegaConf.update(config, "data.partition.client", None, force_add=True)
    return notes


def problems(config: Any) -> Iterator[str]:
    """Everything that can be told before anything is built."""
    federated, train = config.federated, config.train
    data: Any = config.data
    parts = data.get("partition") or {}
    if config.dist.name is not StrategyKind.single:
        yield f"dist={config.dist.name.value}: a client trains in one process. Leave dist= out"
    if not isinstance(train.batch_size, int):
        yield f"train.batch_size={train.batch_size}: all clients must take the same. Type: train.batch_size=16"
    if train.max_steps is not None:
        yield f"train.max_steps={train.max_steps}: federated.rounds x federated.local_steps says it. Leave it out"
    if train.ema_decay:
        yield f"train.ema_decay={train.ema_decay}: the server averages, clients keep no average. Leave it out"
    if train.early_stop_patience:
        yield "train.early_stop_patience: federated.rounds says how long. Leave it out"
    if train.max_time is not None:
        yield "train.max_time: federated.timeout_s is a client's, federated.rounds the server's limit. Leave it out"
    if config.optim.schedule is ScheduleKind.plateau:
        yield "optim.schedule=plateau follows evaluations, which a client has none of. Type: optim.schedule=cosine"
    if config.checkpoint.guard.max_drop is not None or (data.get("replay") or {}).get("share"):
        yield "checkpoint.guard and data.replay need the old data on every client. Leave them out"
    if parts.get("client") is not None:
        yield "data.partition.client: every client is trained; a client process names itself with federated.client=0"
    if config.federated.role is FederatedRole.simulation and parts.get("num") not in (None, federated.num_clients):
        yield (
            f"data.partition.num={parts['num']} and federated.num_clients={federated.num_clients} differ. Type only "
            "federated.num_clients"
        )
    yield from _own(federated)


def _own(federated: Any) -> Iterator[str]:
    role, count = federated.role, federated.num_clients
    if federated.min_clients > count:
        yield f"federated.min_clients={federated.min_clients}: there are {count} clients (federated.num_clients)"
    if federated.noise > 0:
        if federated.clip_norm is None:
            yield "federated.noise without federated.clip_norm hides no one. Type: federated.clip_norm=1.0"
        if federated.weights is not FederatedWeights.equal:
            yield "federated.noise: what one client adds must be bounded. Type: federated.weights=equal"
        if federated.max_norm_ratio is not None:
            yield (
                "federated.noise: what is left out must not hang on the others' updates; clipping bounds them. "
                "Type: federated.max_norm_ratio=null"
            )
    if role is FederatedRole.client and federated.client is None:
        yield "federated.role=client needs its number. Type: federated.client=0"
    if role is FederatedRole.client and federated.client is not None and federated.client >= count:
        yield f"federated.client={federated.client}: clients are numbered from 0 to {count - 1} (federated.num_clients)"
    if role is not FederatedRole.simulation and federated.certificates is None and not federated.insecure:
        yield (
            f"federated.role={role.value} talks over TLS and needs federated.certificates=<folder>; "
            "python -m echofree.federate federated.role=certificates federated.certificates=<folder> makes some to "
            "try. federated.insecure=true goes without"
        )
    if federated.insecure and federated.certificates is not None:
        yield "federated.insecure=true uses no certificates: leave one of the two out"
    for word in federated.faults:
        if re.fullmatch(rf"(\d+|\*):(\d+|\*):({'|'.join(FAULTS)})", word) is None:
            yield (
                f"federated.faults={word}: must be client:round:{'|'.join(FAULTS)}, * for all of them. "
                "Type: 'federated.faults=[3:2:nan]'"
            )
