"""A training run in miniature for tests of the loop: clips of 64 samples or fewer, a two-layer net, no front end.

Everything is real but the model, the data and the task: the plan, the loader, the strategy, the optimizer, the
checkpoints. Legend: B batch, T samples, H hidden.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first optimizer step imports it, in every forked rank anew (2 s)
from omegaconf import OmegaConf
from torch import Tensor, nn

from echofree.config.schema import RunConfig
from echofree.contracts import Batch, Clip
from echofree.data.loader import Plan, TrainLoader
from echofree.dist.strategy import Amp, build_strategy
from echofree.dist.world import World, join
from echofree.log import Position
from echofree.loop import Loop
from echofree.optim import build_optimizer
from echofree.parts import Parts
from echofree.rundir import RunDir
from echofree.stop import StopFlag
from echofree.training import early_part
from ranks.harness import INIT_METHOD

SAMPLE_RATE = 64  # Hz: the longest clip lasts one second
CPU = torch.device("cpu")


class ToyModel(nn.Module):
    """mic, far [B, T] -> [B, T]. Its second layer looks at one sample, so that padding can't leak into valid ones."""

    sample_rate, hop_samples, latency_samples = SAMPLE_RATE, 1, 3

    def __init__(self, norm: bool = False, dropout: float = 0.0, hidden: int = 6):
        super().__init__()
        self.wide = nn.Conv1d(2, hidden, 5, padding=2)
        self.norm: nn.Module = nn.BatchNorm1d(hidden) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.out = nn.Conv1d(hidden, 1, 1)

    def forward(self, mic: Tensor, far: Tensor, details: bool = False) -> Tensor:
        x = torch.stack([mic, far], 1)  # [B, 2, T]
        x = self.drop(torch.tanh(self.norm(self.wide(x))))  # [B, H, T]
        return self.out(x)[:, 0]  # [B, T]


class ToyData:
    """Clips that are a pure function of (seed, epoch, index).

    Args:
        uneven: clips have 24 to 64 samples instead of 64.
        nan_at: indices whose microphone is NaN.
        log: a file to which every item made appends "epoch index", for tests of the order.
    """

    sample_rate = SAMPLE_RATE

    def __init__(self, num: int, seed: int = 0, uneven: bool = True, nan_at: tuple[int, ...] = (), log: str = ""):
        self.num, self.seed, self.uneven, self.nan_at, self.log = num, seed, uneven, nan_at, log

    def __len__(self) -> int:
        return self.num

    def item(self, index: int, epoch: int) -> Clip:
        rng = np.random.default_rng([self.seed, 7, epoch, index])
        length = int(rng.integers(24, 65)) if self.uneven else 64
        near, far = (rng.standard_normal((2, length)) * 0.5).astype(np.float32)
        mic = near + 0.5 * far
        if index in self.nan_at:
            mic = np.full_like(mic, np.nan)
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{epoch} {index}\n")
        return Clip(mic, far, near, name=f"epoch {epoch}/clip {index}", index=index)


class ToyTask:
    """Mean square error of each clip times its seconds."""

    def weight(self, batch: Batch) -> float:
        return float(batch.weight.sum())

    def per_clip(self, model: nn.Module, batch: Batch) -> Tensor:
        """-> [B]"""
        error = (model(batch.mic, batch.far) - batch.near).square()  # [B, T]
        valid = torch.arange(batch.mic.shape[1]) < batch.num_samples[:, None]  # [B, T]
        return torch.where(valid, error, 0).sum(1) / batch.num_samples

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = (self.per_clip(model, batch) * batch.weight).sum()
        return total, batch.weight.sum(), {"mse": total.detach()}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        values = self.per_clip(model, batch).tolist()
        return [
            {
                "name": batch.name[i],
                "index": int(batch.index[i]),
                "scenario": "unknown",
                "seconds": float(batch.weight[i]),
                "loss": value,
                "place": float(batch.index[i]),  # a score whose mean is known
            }
            for i, value in enumerate(values)
            if batch.weight[i] > 0
        ]


@dataclass
class Toy:
    """How to build a run; every field has a small default.

    Attributes:
        model: its weights come from `seed`; call again for the same ones.
        keys: run config values by dotted key.
    """

    folder: Path
    world: World = field(default_factory=World)
    num_clips: int = 16
    valid_clips: int = 0
    data: ToyData | None = None
    valid: ToyData | None = None
    model: Callable[[], nn.Module] = ToyModel
    task: Any = field(default_factory=ToyTask)
    seed: int = 0
    workers: int = 0
    stop: StopFlag = field(default_factory=StopFlag)
    amp: Amp | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        config = OmegaConf.structured(RunConfig(seed=self.seed))
        defaults = {
            "train.batch_size": 4, "train.log_every": 1, "train.epochs": 2, "train.clip_norm": None,
            "train.save_interval": 0, "train.eval_interval": 0, "optim.lr": 0.01, "optim.schedule": "constant",
            "dist.name": "ddp", "data": {"num_workers": self.workers, "prefetch_factor": 2},
        }  # fmt: skip
        for key, value in {**defaults, **self.keys}.items():
            OmegaConf.update(config, key, value)
        return config

    def loop(self) -> Loop:
        """A loop as `training.run_config` builds it, without what is only told to people."""
        torch.set_num_threads(1)  # for nets this small a second thread is only in the way
        config, world = self.config(), self.world
        data = self.data or ToyData(self.num_clips)
        valid = self.valid or (ToyData(self.valid_clips, seed=1) if self.valid_clips else None)
        torch.manual_seed(self.seed)
        model = self.model()
        ahead = early_part(config.train.front_end, Parts(data, model, self.task), CPU)
        torch.manual_seed(1000 + self.seed + world.rank)
        amp = self.amp or Amp(config.train.precision.value, CPU)
        strategy = build_strategy(config.dist, model, amp, world)
        train = config.train
        plan = Plan(
            len(data), train.batch_size, train.gradient_accumulation_steps, strategy.data_size, config.seed
        )  # fmt: skip
        optimizer = build_optimizer(config.optim, strategy.parameters)

        def make_loader(start: tuple[int, int]) -> TrainLoader:
            return TrainLoader(data, plan, strategy.data_rank, train.epochs, start, self.workers, 2, ahead=ahead)

        run = self.run_dir()
        loop = Loop(
            config, world, strategy, amp, self.task, optimizer, plan, make_loader, valid, run, None,
            Position(rank=world.rank), self.stop, CPU,
        )  # fmt: skip
        loop.ahead = ahead
        return loop

    def run_dir(self) -> RunDir:
        run = RunDir(self.folder, self.world.is_first)
        if self.world.is_first and not (self.folder / "run.json").exists():
            (self.folder / "logs").mkdir(parents=True, exist_ok=True)
            run.checkpoints.mkdir()
            (self.folder / "run.json").write_text(json.dumps({"id": "toy", "status": "created"}))
        self.world.barrier()
        return run


def meet(rank: int, size: int) -> World:
    """The world of a rank that the harness started with init=False; alone when size is 1."""
    world = World(rank, size, rank, size, source="test")
    return join(world, "gloo", CPU, 30.0, 30.0, os.environ.get(INIT_METHOD, "auto"))


def weights(loop: Loop) -> dict[str, Tensor]:
    """A copy of the model's state."""
    return {name: value.detach().clone() for name, value in loop.strategy.model_state().items()}


def gradients(loop: Loop) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in loop.strategy.bare.named_parameters() if p.grad is not None}


TIMES = ("step_s", "samples_per_s", "audio_s_per_s", "data_wait_share", "peak_mem_mb", "save_stall_s")


def records(loop: Loop) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock decides."""
    return [{k: v for k, v in record.items() if k not in TIMES} for record in loop.run.metrics()]
