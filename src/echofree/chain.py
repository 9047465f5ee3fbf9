"""python -m echofree.chain: several verbs one after the other, each with what those before have made, by a recipe.

A recipe is a file NAME.yaml in experiments/: stages with their verb and words, where {stage} is the run directory of an
earlier one, and words for each size. What is done is kept in chain.json, so that the same command goes on where it was
stopped; at its end chain.md holds one table over all stages.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echofree.errors import ConfigError, ExitCode
from echofree.verb import REQUIRED, Key, ending, help_asked, parse, show_help

KEYS = {
    "recipe": Key(REQUIRED, "a file of experiments/ without .yaml, such as cloud_to_edge; also typed without recipe="),
    "size": Key("test", "one of the recipe's sizes"),
    "out": Key("auto", "where all of it goes; auto: outputs/<recipe>-<size>"),
}
NOTES = (
    "Other words are a stage's, typed behind its name (student.optim.lr=5e-4), or behind all. for all that train.",
    "The same command goes on where it was stopped. chain.md in the folder is the table at the end.",
)
FILE, TABLE = "chain.json", "chain.md"
TRAIN = ("train", "federate")  # verbs that have a run directory of their own
ALL = "all"
COLUMNS = (  # head, scenario, score
    ("SI-SDR, double talk", "double_talk", "si_sdr"),
    ("echo gone, double talk", "double_talk", "true_erle"),
    ("speech kept, double talk", "double_talk", "speech_survival"),
    ("ERLE, far end alone", "far_end", "erle"),
)


@dataclass
class Stage:
    """One command of the chain."""

    name: str
    verb: str
    what: str
    words: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    """The verb. -> the exit code"""
    words = list(sys.argv[1:] if argv is None else argv)
    if help_asked(words):
        show_help("chain", KEYS, NOTES)
        return 0
    return ending(lambda: run(words), "interrupted: the same command goes on")


def run(words: list[str]) -> int:
    """All stages that aren't done. -> the exit code of the first that fails, or 0"""
    words = [f"recipe={word}" if "=" not in word and not word.startswith("-") else word for word in words]
    own = [word for word in words if word.partition("=")[0] in KEYS or "." not in word.partition("=")[0]]
    asked = parse(own, KEYS)
    name, size = asked["recipe"], asked["size"]
    found = stages(read(name), name, size, [word for word in words if word not in own])
    out = Path(f"outputs/{name}-{size}" if asked["out"] == "auto" else asked["out"])
    out.mkdir(parents=True, exist_ok=True)
    book = Book(out / FILE)
    for number, stage in enumerate(found, 1):
        typed = [filled(word, found, out) for word in stage.words]
        if book.done(stage, typed):
            print(f"{number}/{len(found)} {stage.name}: done already", flush=True)
            continue
        print(f"{number}/{len(found)} {stage.name}: {stage.what}", flush=True)
        code = execute(stage, typed, out, book)
        if code != ExitCode.DONE:
            print(f"{stage.name} ended with exit code {code}. The same command goes on from here", file=sys.stderr)
            return code
    text = table(found, out, book)
    (out / TABLE).write_text(text, encoding="utf-8")
    print(text)
    print(f"wrote {out / TABLE}")
    return int(ExitCode.DONE)


# --- the recipe -----------------------------------------------------------------------------------------------------


def read(name: str) -> dict[str, Any]:
    """
    Raises:
        ConfigError: no such recipe.
    """
    from omegaconf import OmegaConf

    from echofree.config.search import experiment_dirs

    paths = [folder / f"{name}.yaml" for folder in experiment_dirs()]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        there = sorted({path.stem for folder in experiment_dirs() for path in folder.glob("*.yaml")})
        raise ConfigError(f"recipe={name}: there is no {name}.yaml in experiments/. There are: {', '.join(there)}")
    content: Any = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(content, dict) or not isinstance(content.get("stages"), dict):
        raise ConfigError(f"{path} is no recipe: it has no stages")
    return content


def stages(recipe: Mapping[str, Any], name: str, size: str, typed: Sequence[str]) -> list[Stage]:
    """The recipe's stages with the words of a size and those typed behind their names.

    Raises:
        ConfigError: no such size or stage.
    """
    sizes, names = recipe.get("sizes", {}), list(recipe["stages"])
    if size not in sizes:
        raise ConfigError(f"size={size}: {name} has {', '.join(sizes)}")
    own: dict[str, list[str]] = {stage: [] for stage in (ALL, *names)}
    for word in typed:
        stage, _, rest = word.partition(".")
        if stage not in own or "=" not in rest:
            raise ConfigError(f"{word}: begins with no stage of {name}. Stages: {', '.join(own)}")
        own[stage].append(rest)
    found = []
    for stage, facts in recipe["stages"].items():
        shared = [*sizes[size].get(ALL, []), *own[ALL]] if facts["verb"] in TRAIN else []
        words = [*facts.get("words", []), *shared, *sizes[size].get(stage, []), *own[stage]]
        found.append(Stage(stage, str(facts["verb"]), str(facts.get("what", "")), last_wins([str(w) for w in words])))
    return found


def last_wins(words: Sequence[str]) -> list[str]:
    """Each key once, with the value that was given last."""
    return list({word.partition("=")[0]: word for word in words}.values())


def filled(word: str, found: Sequence[Stage], out: Path) -> str:
    """{stage} becomes its run directory.

    Raises:
        ConfigError: no such stage.
    """
    names = [stage.name for stage in found]

    def place(match: re.Match[str]) -> str:
        if match[1] not in names:
            raise ConfigError(f"{word}: there is no stage {match[1]!r}. Stages: {', '.join(names)}")
        return str(out / match[1])

    return re.sub(r"\{(\w+)\}", place, word)


# --- running it -----------------------------------------------------------------------------------------------------


class Book:
    """What of a chain is done."""

    def __init__(self, path: Path):
        self.path = path
        self.stages: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def done(self, stage: Stage, words: Sequence[str]) -> bool:
        """
        Raises:
            ConfigError: it was begun with other words.
        """
        before = self.stages.get(stage.name)
        if before is None:
            return False
        if before["words"] != list(words):
            differs = sorted({*before["words"], *words} - ({*before["words"]} & {*words}))
            raise ConfigError(
                f"{stage.name} was begun with other words ({', '.join(differs)}). Name another folder: out="
            )
        return bool(before["done"])

    def note(self, stage: Stage, words: Sequence[str], seconds: float, done: bool) -> None:
        from echofree.durable import write_text

        before = self.stages.get(stage.name, {}).get("seconds", 0.0)
        self.stages[stage.name] = {"words": list(words), "seconds": before + seconds, "done": done}
        write_text(self.path, json.dumps(self.stages, indent=1) + "\n")


def execute(stage: Stage, words: list[str], out: Path, book: Book) -> int:
    """Runs a stage in a process of its own, from its last checkpoint where there is one. -> its exit code"""
    from echofree.config.resume import complete_checkpoints

    extra, folder = [], out / stage.name
    if stage.verb in TRAIN and complete_checkpoints(folder):
        extra = [f"resume={folder}"]
    elif stage.verb in TRAIN:
        if (folder / "run.json").is_file():
            shutil.rmtree(folder)  # it ended before its first checkpoint
        extra = [f"hydra.run.dir={folder}"]
    book.note(stage, words, 0.0, False)
    began = time.time()
    code = subprocess.run([sys.executable, "-m", f"echofree.{stage.verb}", *words, *extra], check=False).returncode
    book.note(stage, words, time.time() - began, code == ExitCode.DONE)
    return code


# --- what is told ---------------------------------------------------------------------------------------------------


def table(found: Sequence[Stage], out: Path, book: Book) -> str:
    """One table over all stages: scores on the same test clips, what was exported, how long it took."""
    heads = ["stage", "what", *(head for head, *_ in COLUMNS), "on devices: mean, worst", "file", "time"]
    rows: list[list[str]] = []
    for stage in found:
        folder = out / stage.name
        scores = _scores(folder)
        if not rows and scores:
            rows.append(["(none)", "the linear filter alone", *_cells(scores, "linear"), "", "", ""])
        spent = f"{book.stages[stage.name]['seconds']:.0f} s"
        rows.append(
            [stage.name, stage.what, *_cells(scores, "model"), _devices(folder), _file(stage, out), spent]
        )  # fmt: skip
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _scores(folder: Path) -> dict[str, Any]:
    path = folder / "evaluate" / "test" / "scores.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))["systems"]) if path.is_file() else {}


def _cells(scores: Mapping[str, Any], system: str) -> list[str]:
    cells = []
    for _, scenario, metric in COLUMNS:
        told = scores.get(system, {}).get("scenarios", {}).get(scenario, {}).get("metrics", {}).get(metric, {})
        cells.append(f"{told['mean']:.2f}" if told.get("mean") is not None else "")
    return cells


def _devices(folder: Path) -> str:
    """Clients' scores before and after, of a federated stage."""
    path, found = folder / "metrics.jsonl", []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        row = json.loads(line)
        if row.get("split") == "clients" and "worst_client" in row:
            metric = next(
                key.removeprefix("worst_") for key in row if key.startswith("worst_") and key != "worst_client"
            )
            found.append((metric, row[metric], row[f"worst_{metric}"]))
    if not found:
        return ""
    (metric, *before), (_, *after) = found[0], found[-1]
    return f"{metric} {before[0]:.2f}, {before[1]:.2f} before; {after[0]:.2f}, {after[1]:.2f} after"


def _file(stage: Stage, out: Path) -> str:
    """What an export stage has written, and what its gate says."""
    checkpoint = next((word.partition("=")[2] for word in stage.words if word.startswith("checkpoint={")), None)
    if stage.verb != "export" or checkpoint is None:
        return ""
    root = out / checkpoint.strip("{}") / "export"
    cells = []
    for path in sorted(root.glob("*/alignment.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        size = f"{found['bytes'] / 1e6:.2f} MB" if "bytes" in found else ""
        cells.append(f"{path.parent.name} {size} {'agrees' if found['passed'] else 'REJECTED'}".replace("  ", " "))
    return ", ".join(cells)


if __name__ == "__main__":
    sys.exit(main())
