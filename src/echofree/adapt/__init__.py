"""python -m echofree.adapt: a trained canceller made to fit one device, from recordings of it that nobody labelled.

Stretches in which only the far end is heard are found and remixed with clean speech into clips with a target. Several
ways of adapting are tried on three quarters of them; the rest, and data from elsewhere, judge. What makes the model
worse is refused: then no checkpoint is written and the exit code is 1.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echofree.errors import ConfigError, DataError, ExitCode
from echofree.verb import REQUIRED, Key, Words, composed, ending, help_asked, parse, show_help

KEYS = {
    "checkpoint": Key(REQUIRED, "a run directory (its best weights) or one of its checkpoints"),
    "methods": Key("bn,affine", "ways that are tried: bn (statistics of batch norms), affine (norms and last layer)"),
    "steps": Key("60", "of affine"),
    "lr": Key("1e-3", "of affine"),
    "batch_size": Key("8", "clips of a step"),
    "replay": Key("0.5", "share of the run's own data in affine, so that it doesn't forget"),
    "speech_root": Key("null", "a folder of clean speech; null: the embedded readings"),
    "min_gain": Key("0.5", "dB of echo that must be gone beyond what was, on the device, or it's refused"),
    "max_drop": Key("0.2", "dB of SI-SDR that may be lost elsewhere and in double talk on the device"),
    "clips": Key("24", "clips that judge elsewhere"),
    "min_s": Key("8", "seconds of echo alone that must be found"),
    "out": Key("auto", "where adapted/ goes; auto: adapt/<date_time> in the run directory"),
    "seed": Key("0", "of the clips"),
}
GROUPS = ("data",)
NOTES = (
    "data.root=DIR takes a folder as data=folder does: microphone and far end are enough. Stretches that a cases.csv",
    "labels far-end single talk are taken at their word, in unlabelled recordings they are found.",
    "What is written: adapted/ (a run directory: evaluate, export and cancel take it), adapt.json, stretches.json.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """The verb. -> the exit code"""
    words = list(sys.argv[1:] if argv is None else argv)
    if help_asked(words):
        show_help("adapt", KEYS, NOTES)
        return 0
    return ending(lambda: run(parse(words, KEYS, GROUPS)), "interrupted, nothing was written")


def number(words: Words, key: str, least: float) -> float:
    """
    Raises:
        ConfigError: no number, or a smaller one.
    """
    try:
        value = float(words[key])
    except ValueError:
        value = float("nan")
    if not value >= least:
        raise ConfigError(f"{key}={words[key]}: give a number from {least:g}")
    return value


def run(words: Words) -> int:
    """Finds, adapts, judges. -> the exit code"""
    import torch

    from echofree.adapt import judge, listen, method
    from echofree.checkpoint import find, load_model, run_of
    from echofree.config.frozen import freeze
    from echofree.process import num_threads
    from echofree.shipped import place

    torch.set_num_threads(num_threads(1, 1))  # as evaluate: a thread that waits for a core costs most
    numbers = {key: number(words, key, 0.0) for key in ("min_gain", "max_drop", "min_s", "lr", "replay", "seed")}
    counts = {key: words.number(key) or 1 for key in ("steps", "batch_size", "clips")}
    methods = words.names("methods")
    if wrong := [name for name in methods if name not in method.METHODS]:
        raise ConfigError(f"methods={','.join(wrong)}: there are {', '.join(method.METHODS)}")
    if numbers["replay"] >= 1:
        raise ConfigError(f"replay={words['replay']}: give a share from 0 up to, but without, 1")
    checkpoint = find(words["checkpoint"])
    loaded, parent = load_model(checkpoint)
    model: Any = loaded
    plain = freeze(parent)
    recordings = device_recordings(words, model.sample_rate)
    say(f"listening to {len(recordings)} recordings for stretches of echo alone ...")
    found = listen.stretches_of(recordings, model)
    seconds = sum(s.stop_s - s.start_s for s in found)
    say(f"{seconds:.1f} s of echo alone in {len(found)} stretches, {len({s.mic for s in found})} recordings")
    if seconds < numbers["min_s"] or len({s.split for s in found}) < 2:
        raise DataError(
            f"only {seconds:.1f} s of echo alone were found, min_s={numbers['min_s']:g} are needed: let the device "
            "play speech for half a minute while nobody talks, and record both sides"
        )
    out = output(words, place(run_of(checkpoint)))
    remix = method.remix_node(out, found, words, model.sample_rate, counts["clips"])
    exam = judge.Exam(found, remix, plain, model.sample_rate, counts["clips"])
    before = exam.scores(model)
    tried: dict[str, tuple[Any, dict[str, float], list[str]]] = {}
    for name in methods:
        say(f"{name}: {method.METHODS[name]} ...")
        adapted = method.adapt(name, model, checkpoint, plain, remix, out, numbers, counts)
        if isinstance(adapted, str):
            say(f"{name}: left out: {adapted}")
            continue
        after = exam.scores(adapted)
        tried[name] = adapted, after, judge.problems(before, after, numbers["min_gain"], numbers["max_drop"])
    print(judge.table(before, {name: after for name, (_, after, _) in tried.items()}))
    passed = {name: after for name, (_, after, why) in tried.items() if not why}
    chosen = max(passed, key=lambda name: passed[name]["device_erle"]) if passed else None
    about = {
        "parent": str(checkpoint), "seconds": seconds, "stretches": len(found), "before": before, "chosen": chosen,
        "tried": {name: {"scores": after, "problems": why} for name, (_, after, why) in tried.items()},
    }  # fmt: skip
    (out / "adapt.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    if chosen is None:
        for name, (_, _, why) in tried.items():
            print(f"{name} is refused: {'; '.join(why)}", file=sys.stderr)
        print(f"no adapted checkpoint was written: keep {checkpoint}", file=sys.stderr)
        return int(ExitCode.FAILED)
    folder = method.write(out / "adapted", tried[chosen][0], plain, checkpoint, about)
    print(f"{chosen}: {folder}")
    return int(ExitCode.DONE)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def device_recordings(words: Words, rate_hz: int) -> Any:
    """All recordings that the data words name, whole."""
    from echofree.config.build import build_data
    from echofree.config.frozen import freeze

    given = words.passed if any(w.startswith("data=") for w in words.passed) else ["data=folder", *words.passed]
    config = freeze(composed(given))
    source = build_data({**config, "data": {**config["data"], "sample_rate": rate_hz}})
    try:
        found = source.split("all")
    except KeyError:
        found = None
    if found is None or not hasattr(found, "recordings"):
        raise ConfigError("adapt needs recordings of a device. Type: data.root=<folder of recordings>")
    return found


def output(words: Words, run_dir: Path) -> Path:
    """The folder of this adaptation, made.

    Raises:
        ConfigError: it holds something, or can't be made.
    """
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    out = run_dir / "adapt" / stamp if words["out"] == "auto" else Path(words["out"])
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise ConfigError(f"out={out} isn't empty: give another folder")
    except OSError as error:
        raise ConfigError(f"out={out}: can't be made ({error.strerror}). Give another folder with out=") from error
    return out
