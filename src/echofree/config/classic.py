"""Spellings that people bring from other tools, and what to type here instead.

Most training scripts take `--batch_size 4`, launchers add `--local_rank 0`. EchoFree takes `key=value` words. Every
such flag is answered with its translation, all at once, and with the whole command line spelled right.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

# foreign name -> key. Names are compared in lower case with "-" read as "_".
SPELLINGS = {
    "batch_size": "train.batch_size",
    "bs": "train.batch_size",
    "per_device_train_batch_size": "train.batch_size",
    "epochs": "train.epochs",
    "epoch": "train.epochs",
    "num_epochs": "train.epochs",
    "max_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "steps": "train.max_steps",
    "max_steps": "train.max_steps",
    "num_steps": "train.max_steps",
    "max_time": "train.max_time",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "accumulate_grad_batches": "train.gradient_accumulation_steps",
    "grad_accum": "train.gradient_accumulation_steps",
    "accumulation_steps": "train.gradient_accumulation_steps",
    "log_interval": "train.log_every",
    "log_every": "train.log_every",
    "log_every_n_steps": "train.log_every",
    "save_interval": "train.save_interval",
    "save_every": "train.save_interval",
    "save_steps": "train.save_every_steps",
    "eval_interval": "train.eval_interval",
    "eval_steps": "train.eval_every_steps",
    "precision": "train.precision",
    "grad_clip": "train.clip_norm",
    "clip": "train.clip_norm",
    "clip_norm": "train.clip_norm",
    "max_grad_norm": "train.clip_norm",
    "gradient_clip_val": "train.clip_norm",
    "ema": "train.ema_decay",
    "ema_decay": "train.ema_decay",
    "patience": "train.early_stop_patience",
    "device": "train.device",
    "lr": "optim.lr",
    "learning_rate": "optim.lr",
    "weight_decay": "optim.weight_decay",
    "wd": "optim.weight_decay",
    "momentum": "optim.momentum",
    "scheduler": "optim.schedule",
    "lr_scheduler": "optim.schedule",
    "schedule": "optim.schedule",
    "warmup": "optim.warmup_steps",
    "warmup_steps": "optim.warmup_steps",
    "optimizer": "optim",
    "model": "model",
    "arch": "model",
    "hidden_size": "model.hidden_size",
    "num_layers": "model.num_layers",
    "data": "data",
    "dataset": "data",
    "data_root": "data.root",
    "data_dir": "data.root",
    "data_path": "data.root",
    "root": "data.root",
    "num_workers": "data.num_workers",
    "workers": "data.num_workers",
    "loss": "loss",
    "backend": "dist.backend",
    "dist_backend": "dist.backend",
    "dist_url": "dist.init_method",
    "init_method": "dist.init_method",
    "timeout": "dist.timeout_s",
    "num_procs": "dist.num_procs",
    "strategy": "dist",
    "seed": "seed",
    "name": "name",
    "exp_name": "name",
    "run_name": "name",
    "experiment": "experiment",
    "output_dir": "output_root",
    "out_dir": "output_root",
    "save_dir": "output_root",
    "resume": "resume",
    "resume_from": "resume",
    "resume_from_checkpoint": "resume",
    "load": "resume",
    "ckpt": "resume",
    "ckpt_path": "resume",
    "checkpoint": "resume",
    "logger": "logger",
    "wandb_project": "logger.project",
    "debug": "debug",
}

# Flags that stand for other words than one key: name -> (words, None: drop it; what to say). `{}` is the value.
SPECIAL: dict[str, tuple[str | None, str]] = {
    "local_rank": (None, "drop the flag: it comes from torchrun's environment (or start ranks with dist=ddp)"),
    "rank": (None, "drop the flag: ranks are read from torchrun's or SLURM's environment"),
    "node_rank": (None, "drop the flag: it's a flag of torchrun, before -m echofree.train"),
    "nnodes": (None, "drop the flag: it's a flag of torchrun, before -m echofree.train"),
    "master_addr": (None, "drop the flag: it's a flag of torchrun, or dist.init_method=tcp://HOST:PORT"),
    "master_port": (None, "drop the flag: it's a flag of torchrun, or dist.init_method=tcp://HOST:PORT"),
    "gpus": ("dist=ddp dist.num_procs={}", ""),
    "num_gpus": ("dist=ddp dist.num_procs={}", ""),
    "ngpus": ("dist=ddp dist.num_procs={}", ""),
    "n_gpus": ("dist=ddp dist.num_procs={}", ""),
    "devices": ("dist=ddp dist.num_procs={}", ""),
    "nproc_per_node": ("dist=ddp dist.num_procs={}", "or start it with torchrun --nproc-per-node={}"),
    "world_size": ("dist=ddp dist.num_procs={}", ""),
    "gpu": ("train.device=cuda", "which one: CUDA_VISIBLE_DEVICES={}"),
    "config": (
        "experiment={stem}",
        "with the differences in experiments/experiment/{stem}.yaml, first line: # @package _global_",
    ),
    "config_file": ("experiment={stem}", "with the differences in experiments/experiment/{stem}.yaml"),
    "cfg_file": ("experiment={stem}", "with the differences in experiments/experiment/{stem}.yaml"),
    "config_path": (
        "experiment={stem}",
        "with the differences in experiments/experiment/{stem}.yaml; another folder: ECHOFREE_EXPERIMENTS=DIR",
    ),
    "eval": (None, "type: python -m echofree.evaluate checkpoint=<run dir>"),
    "evaluate": (None, "type: python -m echofree.evaluate checkpoint=<run dir>"),
    "test": (None, "type: python -m echofree.evaluate checkpoint=<run dir>"),
}

# Switches without a value.
SWITCHES = {
    "fp16": "train.precision=fp16",
    "amp": "train.precision=bf16",
    "bf16": "train.precision=bf16",
    "cpu": "train.device=cpu",
    "cuda": "train.device=cuda",
    "ddp": "dist=ddp",
    "distributed": "dist=ddp",
    "wandb": "logger=wandb",
    "tensorboard": "logger=tensorboard",
    "compile": "train.compile=true",
    "deterministic": "train.deterministic=true",
    "sweep": "-m",
}


@dataclass
class Translation:
    """What became of the flags: `spelled` is the whole command line in our spelling."""

    spelled: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def translate(argv: Sequence[str]) -> Translation:
    """Splits `argv` (EchoFree's and Hydra's own flags already taken out) into words and foreign flags.

    A flag takes the next word as its value unless that is a flag or a `key=value` word itself.
    """
    result, words = Translation(), list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            result.spelled.append(word)
            continue
        name, has_value, value = word.partition("=")
        key = name.lstrip("-").replace("-", "_")
        switch = key.lower() in SWITCHES
        if not has_value and not switch and words and not words[0].startswith("--") and not _is_setting(words[0]):
            value = words.pop(0)
            word = f"{word} {value}"
        _explain(result, word, key, value)
    return result


def _is_setting(word: str) -> bool:
    head = word.partition("=")[0]
    return "=" in word and head.replace(".", "").replace("/", "").replace("_", "").lstrip("+~").isalnum()


def _explain(result: Translation, word: str, key: str, value: str) -> None:
    lower = key.lower()
    ours, remark = None, ""
    if lower in SWITCHES:
        ours = SWITCHES[lower]
    elif lower in SPECIAL:
        ours, remark = SPECIAL[lower]
        stem = value.rpartition("/")[2].rpartition(".")[0] or value.rpartition("/")[2] or "NAME"
        shown = value or "N"
        ours = ours.replace("{stem}", stem).replace("{}", shown) if ours else None
        remark = remark.replace("{stem}", stem).replace("{}", shown)
    elif lower in SPELLINGS or "." in key:
        ours = f"{SPELLINGS.get(lower, key)}={value or ('true' if '.' in key else '...')}"
    else:
        near = difflib.get_close_matches(lower, [*SPELLINGS, *SPECIAL, *SWITCHES], n=1, cutoff=0.75)
        if near and near[0] in SPELLINGS:
            ours = f"{SPELLINGS[near[0]]}={value or '...'}"
        else:
            result.problems.append(f"{word}: unknown flag. Settings are typed key=value, without dashes; see --help")
            return
    if ours:
        result.spelled += [part for part in ours.split(" ") if part not in result.spelled]
        result.problems.append(f"{word}: EchoFree takes key=value. Type: {ours}{f' ({remark})' if remark else ''}")
    else:
        result.problems.append(f"{word}: {remark}")
