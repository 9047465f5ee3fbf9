"""A run directory with one checkpoint, made without a training: for tests that need a teacher or a parent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from echofree import checkpoint
from echofree.config import frozen
from echofree.config.build import build_model
from echofree.config.compose import compose
from echofree.dist.world import World

FRONT = ("+model.front_end.num_partitions=2", "model.front_end.max_delay_ms=100.0")
SMALL = ("model=small", "model.channels=[4,6,8,8,8]", "model.hidden_size=16", *FRONT)
TINY = ("model=tiny", "model.hidden_size=24", *FRONT)
DATA = ("data.num_train=8", "data.num_valid=4", "data.num_test=4", "data.num_rooms=8", "data.segment_s=0.5")


def make_run(folder: Path, words: tuple[str, ...] = SMALL, seed: int = 5) -> tuple[Path, Any]:
    """-> (the run directory, its model in evaluation mode). Weights are drawn from `seed`, statistics of batch norms
    too, so that no two runs are alike."""
    config = compose([*words, *DATA]).config
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = build_model(config)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0.0, 0.3)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 2.0)
    torch.set_rng_state(state)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(frozen.dump(config))
    (folder / "run.json").write_text(json.dumps({"id": f"parent-{seed}", "status": "done"}))
    about = {"run_id": f"parent-{seed}", "version": "0", "step": 1, "epoch": 0, "scores": {}, "world_size": 1}
    root = folder / "checkpoints"
    root.mkdir()
    checkpoint.save(root, 1, {"model": model.state_dict()}, {}, about, World())
    return folder, model.eval()
