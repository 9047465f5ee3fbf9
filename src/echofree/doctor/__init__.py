"""python -m echofree.doctor: what is wrong with this machine, before it costs a night.

`facts` gathers, the checks of `device`, `wire` and `place` judge, `show` prints. A check is a function of the facts
alone, so that each of its answers can be tested anywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from echofree.errors import ConfigError
from echofree.verb import Key, Words, composed, ending, help_asked, parse, show_help

KEYS = {"format": Key("table", "table | json")}
# What a run of these settings would start here is compared with what is here.
GROUPS = ("data", "dist", "train", "model", "output_root", "experiment")
NOTES = (
    "The words of a training (dist=ddp dist.num_procs=4 data=folder data.root=... data.num_workers=8) are taken, too:",
    "what that training would start here is compared with what is here. Exit code 1 when a check fails.",
)
EXCHANGE_S = 40.0  # for two interpreters that import torch on a busy machine
CLIP_S = 4.0  # when the data doesn't say


def main(argv: Sequence[str] | None = None) -> int:
    """The verb. -> 0, 1 when a check fails, 2 when the words are wrong"""
    words = list(sys.argv[1:] if argv is None else argv)
    if help_asked(words):
        show_help("doctor", KEYS, NOTES)
        return 0
    return ending(lambda: run(parse(words, KEYS, GROUPS)))


def run(words: Words) -> int:
    from echofree.doctor import device, facts, place, show, wire
    from echofree.doctor.check import Status

    if words["format"] not in ("table", "json"):
        raise ConfigError(f"format={words['format']}: must be table | json. Type: format=json")
    from echofree.dist.exchange import Exchange

    trial = Exchange("gloo")  # works while we look around
    try:
        config = composed(_with_folder(words.passed))
        found = facts.gather(plan(config))
        checks = [check(found) for check in (*device.CHECKS, *wire.CHECKS, *place.CHECKS)]
        results = [trial.result(EXCHANGE_S)]
    finally:
        trial.close()
    if len(found.gpus) > 1 and found.nccl:
        results.append(Exchange("nccl").result(EXCHANGE_S))
    checks += [wire.all_reduce(found, r.mb_per_s, r.small_ms, r.backend, r.error) for r in results]
    print(show.as_json(checks) if words["format"] == "json" else show.table(checks))
    return int(any(check.status is Status.fail for check in checks))


def _with_folder(words: list[str]) -> list[str]:
    """data.root alone means data=folder."""
    named = {word.partition("=")[0] for word in words}
    return ["data=folder", *words] if "data.root" in named and "data" not in named else words


def plan(config: Any) -> Any:
    """What a run of `config` would start on this machine."""
    from echofree.dist.local import how_many
    from echofree.doctor.facts import Plan
    from echofree.sizing import usual

    data, dist = config.data, config.dist
    root = data.get("root")
    return Plan(
        ranks=1 if dist.name.value == "single" else how_many(dist.num_procs, config.train.device),
        workers=int(data.get("num_workers") or 0),
        prefetch=int(data.get("prefetch_factor") or 1),
        batch_size=usual(config.train),
        clip_s=float(data.get("clip_s") or data.get("max_s") or CLIP_S),
        num_nodes=dist.num_nodes,
        rendezvous=dist.rendezvous,
        interface=dist.interface,
        threads=dist.threads,
        front_end=config.train.front_end.value,
        output_root=str(config.output_root),
        data_root=None if root is None else str(root),
    )
