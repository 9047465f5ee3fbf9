"""The ways of adapting. Each gives a model beside the one it began from, or says why it can't."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echofree.data.remix import Stretch, write_stretches
from echofree.errors import EchoFreeError, ExitCode
from echofree.verb import Words

METHODS = {
    "bn": "the statistics of its batch norms, anew on this device",
    "affine": "its norms and its last layer, trained on this device's echoes",
}
NUM_BN_CLIPS = 96
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)


def remix_node(out: Path, found: Sequence[Stretch], words: Words, rate_hz: int, num_valid: int) -> dict[str, Any]:
    """The `data` node of the device's remixed clips; writes the list of stretches."""
    path = out / "stretches.json"
    write_stretches(path, found)
    return {
        "_target_": "echofree.data.remix.Remix",
        "stretches": str(path.resolve()),
        "sample_rate": int(rate_hz),
        "speech_root": words.given("speech_root"),
        "num_valid": num_valid,
        "seed": int(float(words["seed"])),
    }


def adapt(
    name: str,
    model: Any,
    checkpoint: Path,
    parent: Mapping[str, Any],
    remix: Mapping[str, Any],
    out: Path,
    numbers: Mapping[str, float],
    counts: Mapping[str, int],
) -> Any:
    """-> the adapted model in evaluation mode, or a text: why this way isn't one for this model

    Raises:
        EchoFreeError: the training failed.
    """
    from echofree.config.build import instantiate

    if name == "affine":
        return tune(model, checkpoint, parent, remix, out, numbers, counts)
    clips = instantiate(remix, "data").split("train")
    adapted = copy.deepcopy(model)
    if not re_estimate(adapted, clips, NUM_BN_CLIPS, counts["batch_size"]):
        return "this model has no batch norms"
    return adapted


@torch.no_grad()
def re_estimate(model: nn.Module, clips: Any, num_clips: int, batch_size: int) -> int:
    """Running statistics of all batch norms become the plain average over `num_clips` clips; nothing else changes.
    -> how many there are"""
    from echofree.data.collate import collate

    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) and m.track_running_stats]
    if not norms:
        return 0
    before = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average
        norm.train()
    for start in range(0, num_clips, batch_size):
        some = [clips.item(i % len(clips), i // len(clips)) for i in range(start, min(start + batch_size, num_clips))]
        batch = collate(some, clips.sample_rate)
        model(batch.mic, batch.far)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
    model.eval()
    return len(norms)


def adapters(model: nn.Module) -> list[str]:
    """Names of the weights of all norms and of the last layer that has any: few, and enough for another device."""
    last = ""
    names = []
    for prefix, module in model.named_modules():
        if isinstance(module, NORMS) or "Norm" in type(module).__name__:
            names += [f"{prefix}.{name}" for name, _ in module.named_parameters(recurse=False)]
        if isinstance(module, LAYERS) and any(True for _ in module.parameters(recurse=False)):
            last = prefix
    return [*names, f"{last}.*"]


def tune(
    model: Any,
    checkpoint: Path,
    parent: Mapping[str, Any],
    remix: Mapping[str, Any],
    out: Path,
    numbers: Mapping[str, float],
    counts: Mapping[str, int],
) -> Any:
    """A run of the training loop with everything else frozen. -> the model of its best step"""
    from echofree import train
    from echofree.checkpoint import find, load_model
    from echofree.config.compose import Composed
    from echofree.config.frozen import thaw

    names = adapters(model)
    config = thaw(tuning(checkpoint, parent, remix, out, names, numbers, counts), "the adaptation")
    run_dir = train.prepare(Composed(config=config), 1)
    code = train.run_prepared(run_dir)
    if code != ExitCode.DONE:
        raise EchoFreeError(f"the training of the adaptation failed, see {run_dir}")
    return load_model(find(run_dir))[0]


def tuning(
    checkpoint: Path,
    parent: Mapping[str, Any],
    remix: Mapping[str, Any],
    out: Path,
    names: Sequence[str],
    numbers: Mapping[str, float],
    counts: Mapping[str, int],
) -> dict[str, Any]:
    """The run config of the training: the parent's model and loss, everything else as an adaptation wants it."""
    from echofree.checkpoint import run_of

    steps, batch = counts["steps"], counts["batch_size"]
    every = max(1, steps // 4)
    node = {
        **remix, "num_train": max(batch, steps * batch), "num_workers": 1, "prefetch_factor": 2,
        "replay": {"share": numbers["replay"], "run": str(run_of(checkpoint))},
    }  # fmt: skip
    task = {
        "_target_": "echofree.task.supervised.Supervised",
        "metrics": ["si_sdr", "true_erle"],
        "sample_rate": node["sample_rate"],
    }
    return {
        "model": parent["model"],
        "loss": parent["loss"],
        "data": node,
        "task": task,
        "train": {
            "batch_size": batch, "epochs": 1, "max_steps": steps, "log_every": every, "save_interval": 0,
            "eval_interval": 0, "eval_every_steps": every, "final_test": False,
            "clip_norm": parent["train"].get("clip_norm", 5.0),
        },
        "optim": {
            "lr": numbers["lr"], "weight_decay": 0.0, "schedule": "cosine",
            "freeze": ["*", *(f"-{name}" for name in names)],
        },
        "checkpoint": {"keep_last": 1},
        "seed": int(numbers["seed"]),
        "name": "tuning",
        "init_from": str(checkpoint),
        "output_root": str(out),
    }  # fmt: skip


def write(folder: Path, model: Any, parent: Mapping[str, Any], checkpoint: Path, about: Mapping[str, Any]) -> Path:
    """A run directory with one checkpoint: the parent's config, the adapted weights. -> it"""
    from echofree import __version__
    from echofree import checkpoint as checkpoints
    from echofree.config import frozen
    from echofree.dist.world import World
    from echofree.inherit import weights_mark
    from echofree.rundir import RunDir, command_line, create_at

    manifest = checkpoints.manifest(checkpoint)
    config = {**parent, "init_from": str(checkpoint), "resume": None}
    run_dir = create_at(folder, frozen.dump(config), command_line(), int(parent.get("seed", 0)), manifest.get("run_id"))
    run = RunDir(run_dir, is_first=True)
    facts = {
        "run_id": run.facts["id"], "version": __version__, "step": int(manifest["step"]), "epoch": 0, "scores": {},
        "world_size": 1, "best_step": int(manifest["step"]),
    }  # fmt: skip
    saved = checkpoints.save(run.checkpoints, facts["step"], {"model": model.state_dict()}, {}, facts, World())
    for name in ("last", "best"):
        checkpoints.point(run.checkpoints, name, saved)
    run.note(
        status="done", end=time.time(), steps=facts["step"], adapt=dict(about),
        parent={"path": str(checkpoint), "run_id": manifest.get("run_id"), "weights": weights_mark(manifest)},
    )  # fmt: skip
    shutil.rmtree(folder.parent / "tuning", ignore_errors=True)
    return run_dir
