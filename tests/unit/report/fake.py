"""Makes run directories that look like those of a training, without one: for the pages made of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from echofree import audio
from echofree.contracts import Clip, Scenario
from echofree.listen import write_listening
from echofree.metric import default_metrics
from echofree.score import score, summarise
from echofree.scorefile import protocol, write_scores

RATE_HZ = 16000
METRICS = ["erle", "si_sdr", "near_gain", "speech_survival", "delay_ms"]


class Talks:
    """A dataset of short noisy clips."""

    sample_rate = RATE_HZ

    def __init__(self, count: int = 9, seconds: float = 2.0, seed: int = 0):
        self.count, self.num_samples, self.seed = count, round(seconds * RATE_HZ), seed

    def __len__(self) -> int:
        return self.count

    def item(self, index: int, epoch: int) -> Clip:
        rng = np.random.default_rng([self.seed, index])
        scenario = Scenario(index % 3)
        swell = 0.5 + 0.5 * np.sin(np.arange(self.num_samples) / RATE_HZ * 2 * np.pi * rng.uniform(1, 3))
        near, echo = (0.1 * swell * rng.standard_normal((2, self.num_samples))).astype(np.float32)
        near = near * np.float32(scenario != Scenario.FAR_END)
        echo = echo * np.float32(scenario != Scenario.NEAR_END)
        return Clip(
            near + echo, echo, near, echo, 0 * near, scenario, name=f"talk {index} <{scenario.name}>", index=index
        )


class Source:
    def fingerprint(self) -> str:
        return "0123456789abcdef"


def fake_run(
    folder: Path,
    best: float = 0.25,
    settings: dict[str, Any] | None = None,
    steps: int = 60,
    evaluated: bool = True,
    **facts: Any,
) -> Path:
    """A run directory.

    Args:
        best: of its loss; the curve falls towards it.
        settings: dotted key -> value of what the command line changed.
        evaluated: with scores and clips to listen to.
        facts: of run.json.
    """
    settings = settings or {"optim.lr": 1e-3}
    (folder / "logs").mkdir(parents=True)
    start = 1_790_000_000.0
    about = {
        "id": folder.name,
        "status": "done",
        "command": "python -m echofree.train",
        "start": start,
        "end": start + 95,
        "seed": 0,
        "platform": "Linux",
        "python": "3.11.7",
        "code_digest": "abc",
        "git_commit": "0" * 40,
        "patch": None,
        "metric": "loss",
        "machine": {"host": "desk", "cpu": "a processor", "cpus": 2, "memory_mb": 8000, "driver": None},
        "packages": {"torch": "2.13.0"},
        "world": {"size": 1, "hosts": ["desk"], "backend": "none", "source": "alone", "device": "cpu", "threads": 2},
        "settings": settings,
        "changed": sorted(settings),
        "best": best,
        "steps": steps,
        "peak_mem_mb": [900],
        "notes": [],
    }
    (folder / "run.json").write_text(json.dumps({**about, **facts}))
    config = {
        "model.hidden_size": 32,
        "optim.lr": 1e-3,
        "checkpoint.mode": "min",
        "name": "tiny",
        "seed": 0,
        **settings,
    }
    (folder / "config.yaml").write_text("".join(f"{line}\n" for line in nested(config)))
    records: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = best + math.exp(-step / 15)
        train = {
            "kind": "train",
            "step": step,
            "epoch": step // 20,
            "loss": loss + 0.05 * math.sin(7.0 * step),
            "lr": 1e-3 * (1 - step / (steps + 1)),
        }
        records.append(
            {
                **train,
                "grad_norm": 1 / step,
                "step_s": 0.5,
                "audio_s_per_s": 60.0,
                "peak_mem_mb": 800.0 + step,
                "data_wait_share": 0.01,
            }
        )
        if step % 20 == 0:
            records.append(
                {
                    "kind": "eval",
                    "split": "valid",
                    "step": step,
                    "epoch": step // 20,
                    "loss": best if step == steps else loss,
                    "erle": 10.0 + step / 10,
                    "clips": 8,
                }
            )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "logs" / "rank0.log").write_text(
        "[EchoFree: rank=0, epoch=0, step=0] TinyNet: 12,345 parameters, latency 32 ms\n"
        + "[EchoFree: rank=0, epoch=0, step=7] WARNING: the disk is nearly full\n" * 2
    )
    if evaluated:
        evaluate(folder / "evaluate" / "test", best)
    return folder


def evaluate(out: Path, left: float) -> None:
    """Scores of a model that leaves `left` of the echo (the far end is the echo)."""
    out.mkdir(parents=True)
    data = Talks()
    systems = {"mic": lambda m, f: m, "linear": lambda m, f: m - 0.5 * f, "model": lambda m, f: m - (1 - left) * f}
    metrics = default_metrics(METRICS, RATE_HZ, align=True)
    rows = score(systems, data, metrics)
    rows[-1]["problems"].append("the output is silent </script><b>")
    summary = summarise(rows, METRICS)
    for system in summary.values():
        system.update(rtf_stream=0.01, latency_ms=32.0)
    asked = {
        "split": "test",
        "aecmos_cut": "whole",
        "align": "output",
        "checkpoint": "step-000060",
        "systems": dict.fromkeys(systems, "-"),
    }
    write_scores(
        out, rows, summary, protocol(asked, {"_target_": "Talks"}, Source(), rows, metrics, RATE_HZ, False), METRICS
    )
    write_listening(out, rows, systems, data, "model", 4)


def nested(flat: dict[str, Any]) -> list[str]:
    """Dotted keys as YAML lines."""
    lines, groups = [], {}
    for key, value in flat.items():
        head, _, rest = key.partition(".")
        if rest:
            groups.setdefault(head, []).append(f"  {rest}: {json.dumps(value)}")
        else:
            lines.append(f"{head}: {json.dumps(value)}")
    return [*lines, *(line for head, part in groups.items() for line in (f"{head}:", *part))]


def wave_of(path: Path) -> np.ndarray:
    return audio.read(path)[0]
