"""Rules about values and across fields, for a config whose types are right already. All problems come back together.

Adding a rule: one about a single key goes into `RANGES`, one about several into a function of `RULES`. Each text names
key and value, says what is valid, and ends with what to type.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from echofree.config import sharing
from echofree.config.override import flat
from echofree.config.schema import Backend, LoggerKind, Mode, ScheduleKind, StrategyKind
from echofree.errors import ConfigError
from echofree.slurm import env
from echofree.stop import seconds

Test = Callable[[Any], bool]

# Scores of which less is better; of all others more is.
SCORES_DOWN = ("loss", "delay_ms")
# Among the choices: where the run will be; under slurm not on this machine, which may well have no GPU.
LAUNCHER = "hydra/launcher"

_at_least_1: tuple[Test, str] = (lambda v: v >= 1, "at least 1")
_at_least_0: tuple[Test, str] = (lambda v: v >= 0, "at least 0")
_positive: tuple[Test, str] = (lambda v: v > 0 and math.isfinite(v), "greater than 0")
_below_1: tuple[Test, str] = (lambda v: 0 <= v < 1, "from 0 up to, but without, 1")
_share: tuple[Test, str] = (lambda v: 0 <= v <= 1, "from 0 to 1")


def _one_of(*names: str) -> tuple[Test, str]:
    return (lambda v: v in names, " | ".join(names))


# key -> (test, what is valid, what to type). null passes where the type allows it.
RANGES: dict[str, tuple[tuple[Test, str], str]] = {
    "train.batch_size": (
        (
            lambda v: v >= 1 if isinstance(v, int) else bool(re.fullmatch(r"auto(:[1-9]\d*)?", v)),
            "a whole number from 1 up, auto, or auto:N for at most N clips at once",
        ),
        "train.batch_size=16",
    ),
    "train.global_batch_size": (_at_least_1, "train.global_batch_size=64, or null"),
    "train.gradient_accumulation_steps": (_at_least_1, "train.gradient_accumulation_steps=1"),
    "train.epochs": (_at_least_1, "train.epochs=5"),
    "train.max_steps": (_at_least_1, "train.max_steps=1000, or null for no limit"),
    "train.log_every": (_at_least_1, "train.log_every=10"),
    "train.save_interval": (_at_least_0, "train.save_interval=1, or 0 for a save at the end only"),
    "train.save_every_steps": (_at_least_0, "train.save_every_steps=1000, or 0 to leave it off"),
    "train.eval_interval": (_at_least_0, "train.eval_interval=1, or 0 for an evaluation at the end only"),
    "train.eval_every_steps": (_at_least_0, "train.eval_every_steps=1000, or 0 to leave it off"),
    "train.clip_norm": (_positive, "train.clip_norm=5.0, or null for no clipping"),
    "train.ema_decay": (_below_1, "train.ema_decay=0.999, or 0 to leave it off"),
    "train.early_stop_patience": (_at_least_0, "train.early_stop_patience=5, or 0 to leave it off"),
    "train.device": (_one_of("auto", "cpu", "cuda"), "train.device=auto (which GPUs: CUDA_VISIBLE_DEVICES)"),
    "optim.lr": (_positive, "optim.lr=1e-3"),
    "optim.weight_decay": (_at_least_0, "optim.weight_decay=0.01"),
    "optim.beta1": (_below_1, "optim.beta1=0.9"),
    "optim.beta2": (_below_1, "optim.beta2=0.999"),
    "optim.eps": (_positive, "optim.eps=1e-8"),
    "optim.momentum": (_below_1, "optim.momentum=0.9"),
    "optim.warmup_steps": (_at_least_0, "optim.warmup_steps=100"),
    "optim.min_lr_ratio": (_share, "optim.min_lr_ratio=0.01"),
    "optim.plateau_factor": ((lambda v: 0 < v < 1, "between 0 and 1"), "optim.plateau_factor=0.5"),
    "optim.plateau_patience": (_at_least_0, "optim.plateau_patience=2"),
    "checkpoint.guard.max_drop": (_at_least_0, "checkpoint.guard.max_drop=0.2, or null for no guard"),
    "dist.num_nodes": (_at_least_1, "dist.num_nodes=1"),
    "dist.timeout_s": (_positive, "dist.timeout_s=300"),
    "dist.start_timeout_s": (_positive, "dist.start_timeout_s=600"),
    "dist.max_timeouts": (_at_least_0, "dist.max_timeouts=3, or null for no limit"),
    "dist.max_restarts": (_at_least_0, "dist.max_restarts=0"),
    "dist.bucket_cap_mb": (_positive, "dist.bucket_cap_mb=25"),
    "dist.schedule": (_one_of(*sharing.SCHEDULES), "dist.schedule=1f1b"),
    "dist.microbatches": (_at_least_1, "dist.microbatches=4"),
    "dist.mesh.replicate": (_at_least_0, "dist.mesh.replicate=2, or 0 for no such axis"),
    "dist.mesh.data": (_at_least_0, "dist.mesh.data=2, or 0 for what is left"),
    "dist.mesh.pipeline": (_at_least_0, "dist.mesh.pipeline=2, or 0 for what is left"),
    "dist.mesh.tensor": (_at_least_0, "dist.mesh.tensor=2, or 0 for what is left"),
    "dist.threads": (_at_least_0, "dist.threads=0 for the cores divided by the ranks"),
    "dist.init_method": (
        (
            lambda v: v in ("auto", "env://") or v.startswith(("tcp://", "file:///")),
            "auto | env:// | tcp://HOST:PORT | file:///PATH",
        ),
        "dist.init_method=auto",
    ),
    "checkpoint.keep_last": (_at_least_1, "checkpoint.keep_last=2"),
    "checkpoint.keep_best": (_at_least_0, "checkpoint.keep_best=1"),
    "checkpoint.keep_every_steps": (_at_least_0, "checkpoint.keep_every_steps=10000, or 0 to leave it off"),
    "checkpoint.window_steps": (_at_least_0, "checkpoint.window_steps=1000, or 0 to leave it off"),
    "logger.mode": (_one_of("offline", "online", "disabled"), "logger.mode=offline"),
    "logger.progress": (_one_of("auto", "on", "off"), "logger.progress=auto"),
    "federated.num_clients": (_at_least_1, "federated.num_clients=8"),
    "federated.rounds": (_at_least_1, "federated.rounds=3"),
    "federated.local_steps": (_at_least_1, "federated.local_steps=20"),
    "federated.fraction": ((lambda v: 0 < v <= 1, "above 0, at most 1"), "federated.fraction=1.0"),
    "federated.proximal_mu": (_at_least_0, "federated.proximal_mu=0.01"),
    "federated.held_out": (_below_1, "federated.held_out=0.1"),
    "federated.min_clients": (_at_least_1, "federated.min_clients=2"),
    "federated.max_norm_ratio": ((lambda v: v > 1, "greater than 1"), "federated.max_norm_ratio=10, or null"),
    "federated.timeout_s": (_positive, "federated.timeout_s=600"),
    "federated.clip_norm": (_positive, "federated.clip_norm=1.0, or null for no clipping"),
    "federated.noise": (_at_least_0, "federated.noise=1.0, or 0 to leave it off"),
    "federated.noise_seed": (_at_least_0, "federated.noise_seed=0, or null"),
    "federated.delta": ((lambda v: 0 < v < 1, "between 0 and 1"), "federated.delta=1e-5"),
    "federated.processes": (_at_least_1, "federated.processes=2, or null for one per core"),
    "federated.client": (_at_least_0, "federated.client=0"),
    "federated.address": (
        (lambda v: bool(re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}", v)), "HOST:PORT"),
        "federated.address=0.0.0.0:8443",
    ),
    "federated.wait_s": (_positive, "federated.wait_s=300"),
    "export.minutes": (_positive, "export.minutes=10"),
    "logger.level": (_one_of("debug", "info", "warning", "error"), "logger.level=info"),
    "seed": ((lambda v: 0 <= v < 2**63, "from 0 to 2^63 - 1"), "seed=0"),
    "name": (
        (
            lambda v: bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", v)),
            "letters, digits and . _ -, as it names a folder",
        ),
        "name=my_run",
    ),
}


def problems(config: DictConfig, choices: Mapping[str, str] | None = None) -> list[str]:
    """Every broken rule of `config`, as texts; empty when it can run.

    Args:
        config: a RunConfig, types checked.
        choices: group -> option chosen, for rules about a choice as such.
    """
    found = list(unresolved(config))
    for key, ((test, valid), remedy) in RANGES.items():
        value = OmegaConf.select(config, key)
        if value is not None and not test(value):
            found.append(f"{key}={value}: must be {valid}. Type: {remedy}")
    for rule in RULES:
        found += list(rule(config, choices or {}))
    return found


def unresolved(config: DictConfig) -> Iterator[str]:
    """Values that are not given, and interpolations that lead nowhere."""
    for key, value in sorted(flat(config).items()):
        for text in value if isinstance(value, list) else [value]:
            if text == "???":
                yield f"{key} is not given. Type: {key}=..."
            elif isinstance(text, str) and "${" in text:
                try:
                    OmegaConf.to_container(OmegaConf.create({key: OmegaConf.select(config, key)}), resolve=True)
                except OmegaConfBaseException as error:
                    yield f"{key}={text}: can't be resolved ({str(error).splitlines()[0]}). Type: {key}=<value>"


def _train(config: DictConfig, choices: Mapping[str, str]) -> Iterator[str]:
    train = config.train
    try:
        seconds(train.max_time)
    except ConfigError as error:
        yield from error.problems
    whole, each = train.global_batch_size, train.batch_size
    if whole is not None and train.gradient_accumulation_steps != 1:
        yield (
            f"train.global_batch_size={whole} sets the accumulation, and "
            f"train.gradient_accumulation_steps={train.gradient_accumulation_steps} does, too. Leave one of them out"
        )
    elif whole is not None and isinstance(each, int) and each >= 1 and whole % each:
        near = max(1, round(whole / each)) * each
        yield (
            f"train.global_batch_size={whole} isn't a multiple of train.batch_size={each}. Type: "
            f"train.global_batch_size={near}, or train.batch_size=auto"
        )
    if train.max_steps is not None and config.optim.warmup_steps >= train.max_steps >= 1:
        yield (
            f"optim.warmup_steps={config.optim.warmup_steps} leaves none of train.max_steps={train.max_steps} after "
            f"the warm-up. Type: optim.warmup_steps={train.max_steps // 10}"
        )
    if train.early_stop_patience > 0 and train.eval_interval == 0 and train.eval_every_steps == 0:
        yield (
            f"train.early_stop_patience={train.early_stop_patience} needs evaluations during training, but "
            "train.eval_interval=0 and train.eval_every_steps=0. Type: train.eval_interval=1"
        )
    if choices.get("model") == "linear":
        yield (
            "model=linear has nothing to train: it adapts while it runs. Score it with: "
            "python -m echofree.evaluate model=linear"
        )


def _optim(config: DictConfig, choices: Mapping[str, str]) -> Iterator[str]:
    optim, train = config.optim, config.train
    no_eval = train.eval_interval == 0 and train.eval_every_steps == 0
    if optim.schedule == ScheduleKind.plateau and no_eval:
        yield (
            "optim.schedule=plateau looks at evaluations, but train.eval_interval=0 and train.eval_every_steps=0. "
            "Type: train.eval_interval=1, or optim.schedule=cosine"
        )


def _parts(config: DictConfig, choices: Mapping[str, str]) -> Iterator[str]:
    """Rates of parts, and what only makes sense when a run begins from another model."""
    for word in config.optim.lr_by_part:
        pattern, _, factor = word.rpartition(":")
        if not (pattern and re.fullmatch(r"[0-9.]+(e-?\d+)?", factor) and float(factor) > 0):
            yield (
                f"optim.lr_by_part: {word}: must be a pattern of names, a colon and a factor greater than 0. Type: "
                f"'optim.lr_by_part=[network.gru.*:0.1]'; a part that stays as it is: 'optim.freeze=[network.gru.*]'"
            )
    guard, task = config.checkpoint.guard, config._get_node("task")
    if guard.max_drop is None:
        return
    if config.init_from is None:
        yield (
            f"checkpoint.guard.max_drop={guard.max_drop} compares with the model that the run began from, and "
            "init_from is not given. Type: init_from=<run directory>"
        )
    scores: Any = task.get("metrics") if isinstance(task, DictConfig) else None
    if OmegaConf.is_list(scores) and guard.metric not in ("loss", *scores):
        known = ", ".join(("loss", *scores))
        yield f"checkpoint.guard.metric={guard.metric}: no score of this task. Available: {known}"


def _data(config: DictConfig, choices: Mapping[str, str]) -> Iterator[str]:
    """The loader's keys stand in the data node, whoever wrote its YAML."""
    if not OmegaConf.is_dict(config._get_node("data")):
        return
    for key, least in (("num_workers", 0), ("prefetch_factor", 1)):
        value = config.data.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            plus = "+" if key not in config.data else ""
            yield f"data.{key}={value}: must be a whole number from {least} up. Type: {plus}data.{key}=2"


def _dist(config: DictConfig, choices: Mapping[str, str]) -> Iterator[str]:
    dist = config.dist
    if not re.fullmatch(r"auto|[1-9]\d*", dist.num_procs):
        yield f"dist.num_procs={dist.num_procs}: must be a whole number from 1 up, or auto. Type: dist.num_procs=2"
        return
    if dist.name == StrategyKind.single:
        if dist.num_procs != "1":
            yield (
                f"dist=single runs one process, but dist.num_procs={dist.num_procs}. "
                f"Type: dist=ddp dist.num_procs={dist.num_procs}"
            )
        world = os.environ.get("WORLD_SIZE", "1")
        if "TORCHELASTIC_RUN_ID" in os.environ and world != "1":
            yield f"torchrun started {world} processes; dist=single would make them {world} equal runs. Type: dist=ddp"
        if dist.num_nodes > 1 or dist.rendezvous is not None:
            yield "dist=single runs one process, but dist.num_nodes or dist.rendezvous asks for several. Type: dist=ddp"
        if dist.backend == Backend.nccl:
            yield "dist.backend=nccl would be ignored by dist=single. Type: dist=ddp dist.backend=nccl"
        return
    yield from _machines(dist)
    if dist.backend == Backend.nccl:
        if config.train.device == "cpu":
            yield "dist.backend=nccl works on GPUs only, but train.device=cpu. Type: dist.backend=gloo"
        elif not _has_cuda(choices):
            yield "dist.backend=nccl needs a GPU that torch can use, and there is none here. Type: dist.backend=auto"


def _machines(dist: DictConfig) -> Iterator[str]:
    """dist.num_nodes, dist.rendezvous and dist.interface; whether they exist on this machine is seen at the start."""
    if dist.rendezvous is not None and not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}", dist.rendezvous):
        yield (
            f"dist.rendezvous={dist.rendezvous}: must be HOST:PORT, a machine of the run as the others reach it. Type: "
            "dist.rendezvous=10.0.0.5:29400"
        )
    if dist.interface is not None and not re.fullmatch(r"[^\^=,\s/]+", dist.interface):
        ncclish = " (^ and = are NCCL's syntax)" if dist.interface[:1] in ("^", "=") else ""
        yield (
            f"dist.interface={dist.interface}: must be the name of one interface{ncclish}. Type: dist.interface=eth0 "
            "(python -m echofree.doctor lists them)"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ and "ECHOFREE_JOB_ID" not in os.environ:
        if dist.num_nodes > 1 or dist.rendezvous is not None:
            yield (
                "torchrun has brought the machines together already: leave out dist.num_nodes and dist.rendezvous, and "
                "give torchrun --nnodes and --rdzv-endpoint"
            )
    elif dist.num_nodes > 1 and dist.rendezvous is None and not _in_step():
        yield (
            f"dist.num_nodes={dist.num_nodes} needs a place to meet: an address of one of the machines and a free "
            "port. Type: dist.rendezvous=10.0.0.5:29400, the same on every machine"
        )
    elif dist.num_nodes == 1 and dist.rendezvous is not None:
        yield f"dist.rendezvous={dist.rendezvous} is for several machines. Type: dist.num_nodes=2, or leave it out"
    if dist.num_nodes > 1 and dist.init_method != "auto":
        yield f"dist.init_method={dist.init_method} and dist.num_nodes={dist.num_nodes}: leave dist.init_method out"


def _in_step() -> bool:
    """Whether srun has brought the machines together; see slurm/env.py, which compares the numbers."""
    task = env.found_in(os.environ)
    return task is not None and task.size > 1


def _has_cuda(choices: Mapping[str, str]) -> bool:
    if choices.get(LAUNCHER) == "slurm":
        return True
    import torch  # only a config that asks for nccl pays for it

    return torch.cuda.is_available()


def _device(config: DictConfig, choices: Mapping[str, str]) -> Iterator[str]:
    if config.train.device == "cuda" and not _has_cuda(choices):
        yield f"train.device={config.train.device}: torch finds no GPU here. Type: train.device=auto"


def _task(config: DictConfig, choices: Mapping[str, str]) -> Iterator[str]:
    task = config._get_node("task")  # by its class: a task file of one's own may name it too
    if not isinstance(task, DictConfig) or task.get("_target_") != "echofree.task.quantise.QuantAware":
        return
    if config.dist.name not in (StrategyKind.single, StrategyKind.ddp):
        yield (
            f"task=quantise rounds whole weights, and dist={config.dist.name.value} shares them out over ranks. "
            "Type: dist=ddp"
        )
    if config.train.compile:
        yield "task=quantise rounds the inputs of layers, which train.compile can't follow. Type: train.compile=false"


def _checkpoint(config: DictConfig, choices: Mapping[str, str]) -> Iterator[str]:
    checkpoint = config.checkpoint
    task = config._get_node("task")
    # a task of one's own may name its scores otherwise: then only the evaluation knows them
    scores: Any = task.get("metrics") if isinstance(task, DictConfig) else None
    if OmegaConf.is_list(scores) and checkpoint.metric not in ("loss", *scores):
        known = ", ".join(("loss", *scores))
        yield (
            f"checkpoint.metric={checkpoint.metric}: no score of this task. Available: {known}. Type: "
            f"checkpoint.metric=loss, or 'task.metrics=[{','.join((*scores, checkpoint.metric))}]'"
        )
    elif OmegaConf.is_list(scores):
        right = Mode.min if checkpoint.metric in SCORES_DOWN else Mode.max
        if checkpoint.mode != right:
            yield (
                f"checkpoint.mode={checkpoint.mode.value} keeps the worst by checkpoint.metric={checkpoint.metric}. "
                f"Type: checkpoint.mode={right.value}"
            )


def _logger(config: DictConfig, choices: Mapping[str, str]) -> Iterator[str]:
    name = config.logger.name.value
    if config.logger.name == LoggerKind.tensorboard and importlib.util.find_spec("tensorboard") is None:
        yield "logger=tensorboard needs a package that isn't installed. Type: pip install 'echofree[tensorboard]'"
    if config.logger.name != LoggerKind.wandb:
        if config.logger.entity is not None:
            yield f"logger.entity={config.logger.entity} is read by wandb only, but logger={name}. Type: logger=wandb"
        if config.logger.mode != "offline":
            yield f"logger.mode={config.logger.mode} is read by wandb only, but logger={name}. Type: logger=wandb"


def _paths(config: DictConfig, choices: Mapping[str, str]) -> Iterator[str]:
    root = Path(config.output_root)
    if root.exists() and not root.is_dir():
        yield f"output_root={config.output_root} is a file, but run directories go there. Type: output_root=outputs"
    if config.resume_allow and config.resume is None:
        yield f"resume_allow={list(config.resume_allow)} is read only beside resume=. Type: resume=auto"


RULES = (_train, _optim, _parts, _data, _dist, sharing.rules, _device, _task, _checkpoint, _logger, _paths)
