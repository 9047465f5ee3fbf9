"""python -m echofree.demo: an exported canceller as a folder of static files that a browser runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from echofree.demo import package
from echofree.demo.folder import build, exported, usable
from echofree.errors import ConfigError, EchoFreeError
from echofree.verb import Key, Words, ending, help_asked, parse, show_help

KEYS = {
    "checkpoint": Key("none", "a run directory (its best weights), one of its checkpoints, or linear; exported first"),
    "artifact": Key("none", "or a folder that python -m echofree.export has written, of the target onnx or onnx_int8"),
    "out": Key("demo", "the folder to make; one that an earlier call made is replaced"),
    "package": Key("auto", f"the file {package.FILE}; auto: the one kept from an earlier call, else npm fetches it"),
    "minutes": Key("0.5", "with checkpoint: minutes of audio over which the export is compared with its model"),
}
NOTES = (
    "Serve the folder with any static file server; browsers open such pages from http, not from a file. Here:",
    "  python -m http.server --directory demo 8000   then open http://localhost:8000",
    "The microphone is given to pages of localhost and https only. The page loads nothing from elsewhere.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """The verb. -> the exit code"""
    words = list(sys.argv[1:] if argv is None else argv)
    if help_asked(words):
        show_help("demo", KEYS, NOTES)
        return 0
    return ending(lambda: run(parse(words, KEYS)))


def run(words: Words) -> None:
    """Judges the words and the place, gets the engine, exports when asked, writes."""
    checkpoint, artifact, out = words.given("checkpoint"), words.given("artifact"), Path(words["out"])
    if (checkpoint is None) == (artifact is None):
        raise ConfigError(
            "give either checkpoint=<run dir|checkpoint> or artifact=<exported folder>. Type: checkpoint=linear for a "
            "demo without a trained model"
        )
    try:
        minutes = float(words["minutes"])
    except ValueError:
        raise ConfigError(f"minutes={words['minutes']}: give a number, such as minutes=0.5") from None
    usable(out)
    if artifact is not None:
        exported(Path(artifact))  # its complaints come before a download of minutes
    engine = package.find(words["package"])
    with TemporaryDirectory(prefix="echofree-demo-") as work:
        if checkpoint is not None:
            artifact = str(_export(checkpoint, Path(work), minutes))
        assert artifact is not None
        size = build(exported(Path(artifact)), engine, out)
    print(f"wrote {out}: {size / 1e6:.1f} MB. To see it: python -m http.server --directory {out} 8000")
    print("then open http://localhost:8000")


def _export(checkpoint: str, work: Path, minutes: float) -> Path:
    from echofree.config.frozen import freeze
    from echofree.export.__main__ import load
    from echofree.export.run import build_exporters, export
    from echofree.verb import composed

    exporters = build_exporters(freeze(composed(["export=onnx"]))["export"]["targets"])
    model, source, _ = load(checkpoint)
    (outcome,) = export(model, exporters, work, source, minutes)
    if outcome.problems or outcome.folder is None:
        raise EchoFreeError(f"{checkpoint} couldn't be exported, so there is no demo of it")
    return outcome.folder


if __name__ == "__main__":
    sys.exit(main())
