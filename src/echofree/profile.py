"""python -m echofree.profile: where the time of a training step goes, and what to change; or, with estimate=true, how
much memory a rank will take, without running.

Composes and starts what `train` would with the same words, and measures instead of training. Its directory holds
profile.json and a trace of one step for each rank, for ui.perfetto.dev.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from echofree.errors import ConfigError, UserError
from echofree.verb import Key, ending, help_asked, parse, report, show_help

if TYPE_CHECKING:
    from echofree.loop import Loop, Outcome

log = logging.getLogger("echofree")

KEYS = {
    "profile.steps": Key("10", "steps that are measured, after two to warm up"),
    "estimate": Key("false", "true: tell what memory a rank will take, and run nothing"),
}
NOTES = ("All other words are those of train: model=base dist=ddp dist.num_procs=2 train.batch_size=8 ...",)
FILE = "profile.json"


def main(argv: Sequence[str] | None = None) -> int:
    """The verb. -> the exit code"""
    from echofree.config.compose import main_config

    words = list(sys.argv[1:] if argv is None else argv)
    if help_asked(words):
        show_help("profile", KEYS, NOTES)
        return 0
    own = [word for word in words if word.partition("=")[0] in KEYS or word.startswith("profile.")]
    try:
        asked = parse(own, KEYS)
        steps, only_estimate = asked.number("profile.steps") or 1, asked.switch("estimate")
    except UserError as error:
        return report(error)
    composed = main_config([word for word in words if word not in own])
    return ending(lambda: run(composed, steps, only_estimate))


def run(composed: Any, steps: int, only_estimate: bool) -> int:
    """-> the exit code"""
    if composed.resumed:
        raise ConfigError("profile measures a new run. Leave resume= out")
    return _estimate(composed) if only_estimate else _start(composed, steps)


def _estimate(composed: Any) -> int:
    from echofree.dist.local import how_many
    from echofree.estimate import estimate
    from echofree.parts import build

    config = composed.config
    parts = build(config)
    dist = config.dist
    count = 1 if dist.name.value == "single" else how_many(dist.num_procs, config.train.device) * dist.num_nodes
    device = "cuda" if config.train.device == "cuda" or (config.train.device == "auto" and _has_cuda()) else "cpu"
    print(estimate(config, parts, count, device).table())
    return 0


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _start(composed: Any, steps: int) -> int:
    from echofree import train

    composed.profile_steps = steps
    if "name" not in composed.changed:
        composed.config.name = "profile"
    if "export" in composed.config:
        composed.config.export.targets = {}
    composed.config.logger.name = type(composed.config.logger.name).console
    return train.start(composed)


def measure(loop: Loop, steps: int) -> Outcome:
    """In every rank, in place of the training: measures, tells, writes profile.json and the traces."""
    from echofree import measure as measuring
    from echofree.loop import Outcome

    own = measuring.times(loop, steps)
    trace = _trace(loop)
    ranks = loop.world.gather(own)
    mean = measuring.mean(ranks)
    share = measuring.shares(mean, loop.config.train.batch_size)
    bound = measuring.verdict(share)
    advice = measuring.advice(bound, mean, loop.config, loop.world.size, loop.device.type)
    loop.peaks_mb = [rank.peak_mb for rank in ranks]
    if loop.world.is_first:
        for line in [f"{steps} steps on {len(ranks)} rank(s):", *measuring.table(ranks)]:
            log.info("%s", line)
        parts = ", ".join(f"{name} {100 * value:.0f} %" for name, value in share.items())
        log.info("bound by %s (%s)", bound, parts)
        log.info("what to change: %s", "; ".join(advice))
        log.info("%s and %s (open it in ui.perfetto.dev) are in the run directory", FILE, trace)
        facts = {
            "steps": steps, "batch_size": loop.config.train.batch_size, "mean_s": mean, "share": share,
            "bound_by": bound, "advice": advice, "ranks": [dataclasses.asdict(rank) for rank in ranks],
            "trace": trace, "device": str(loop.device),
        }  # fmt: skip
        text = json.dumps(facts, indent=1).replace("NaN", "null")
        (loop.run.folder / FILE).write_text(text + "\n", encoding="utf-8")
    return Outcome("done", f"bound by {bound}")


def _trace(loop: Loop) -> str:
    """Records one whole step of this rank; -> the file's name."""
    from torch.profiler import ProfilerActivity, profile

    from echofree.measure import turn

    loop.pulse.at("trace")
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if loop.device.type == "cuda" else [])
    loader = loop.make_loader((0, 0))
    loop.state.epoch, loop.state.step_in_epoch = 0, 0
    try:
        with profile(activities=kinds) as profiler:
            turn(loop, loader)
    finally:
        loader.close()
    name = f"trace-rank{loop.world.rank}.json.gz"
    profiler.export_chrome_trace(str(loop.run.folder / name))
    return name


if __name__ == "__main__":
    sys.exit(main())
