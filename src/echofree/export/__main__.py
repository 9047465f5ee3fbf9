"""python -m echofree.export: from a checkpoint to artifacts for devices, each compared with its model before it may
ship."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echofree.verb import REQUIRED, Key, Words, composed, ending, help_asked, parse, show_help

KEYS = {
    "checkpoint": Key(REQUIRED, "a run directory (its best weights), one of its checkpoints, or linear"),
    "out": Key("auto", "where the folders go, one a target; auto: <run dir>/export, or export/linear here"),
}
NOTES = (
    "Groups passed on: export (export=onnx, or several: export=[onnx,onnx_int8]; export.minutes=1; left out: onnx).",
    "An artifact that doesn't agree with its model is kept as <target>.rejected, no runtime loads it, and the exit",
    "code is 1. What was compared stands in its alignment.json.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """The verb. -> the exit code"""
    words = list(sys.argv[1:] if argv is None else argv)
    if help_asked(words):
        show_help("export", KEYS, NOTES)
        return 0
    return ending(lambda: run(parse(words, KEYS, ("export",))))


def run(words: Words) -> int:
    """-> 0 when every target agrees with its model, else 1"""
    chosen = any(word.partition("=")[0] == "export" for word in words.passed)
    config = composed(words.passed if chosen else ["export=onnx", *words.passed])
    from echofree.config.frozen import freeze
    from echofree.export.run import build_exporters, export

    settings = freeze(config)["export"]
    exporters = build_exporters(settings["targets"])
    model, source, root = load(words["checkpoint"])
    if words["out"] != "auto":
        root = Path(words["out"])
    outcomes = export(model, exporters, root, source, settings["minutes"])
    return 0 if all(not outcome.problems for outcome in outcomes) else 1


def load(name: str) -> tuple[Any, str, Path]:
    """-> (model on the CPU, what it came from, where its exports go)

    Raises:
        CheckpointError, ConfigError: there's none.
    """
    if name == "linear" and not Path(name).exists():
        from echofree.config.build import build_model

        return build_model(composed(["model=linear"])).eval(), "linear", Path("export") / "linear"
    from echofree import checkpoint, shipped

    folder = checkpoint.find(name)
    model, _ = checkpoint.load_model(folder)
    return model, str(folder), shipped.place(checkpoint.run_of(folder)) / "export"


if __name__ == "__main__":
    sys.exit(main())
