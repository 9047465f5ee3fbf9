"""python -m echofree.runs: the runs below a folder as a table; which settings two of them differ in.

Reads run.json of each run, and more only of those that haven't ended, so that ten thousand take a second or two.
Nothing here imports torch.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from echofree.errors import ConfigError, UserError
from echofree.rundir import CONFIG, METRICS, RUN, truth
from echofree.verb import Key, help_asked, parse, report, show_help

KEYS = {
    "dir": Key("outputs", "the folder to look in, also typed without dir="),
    "filter": Key("", "conditions a,b,c that all hold: status=failed, best<0.1, optim.lr=0.001, name~tiny"),
    "sort": Key("start", "a column or a setting; -best: the greatest first"),
    "limit": Key("null", "this many rows, the last ones"),
    "diff": Key("", "[a,b]: the settings in which two runs differ, instead of the table"),
    "format": Key("table", "table | csv | json"),
}
NOTES = (
    "Columns: run name status step best metric age settings (what the command line changed).",
    "Conditions: = != < > <= >=, and ~ for a part of the text. Settings left at their default are in config.yaml only.",
    "status=failed is also said of a run whose process is gone without a word.",
)
COLUMNS = ("run", "name", "status", "step", "best", "metric", "age", "settings")
DEPTH = 5  # multirun/<name>/<date_time>/<job> from one level above
TAIL_BYTES = 4096
FORMATS = ("table", "csv", "json")
LIVE = ("running", "restarting", "created")

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """The verb. -> the exit code"""
    words = list(sys.argv[1:] if argv is None else argv)
    if help_asked(words):
        show_help("runs", KEYS, NOTES)
        return 0
    if words and "=" not in words[0] and not words[0].startswith("-"):
        words[0] = f"dir={words[0]}"
    try:
        asked = parse(words, KEYS)
        root = Path(asked["dir"])
        if asked["format"] not in FORMATS:
            raise ConfigError(f"format={asked['format']}: give {' | '.join(FORMATS)}")
        if not root.is_dir():
            raise ConfigError(f"dir={root}: no such folder. Type the folder that holds the runs: dir=outputs")
        pair = asked.names("diff")
        if pair:
            print(shown(differences(root, pair), ("setting", *pair), asked["format"]))
            return 0
        rows = ordered([row for row in table(root) if matches(row, asked.names("filter"))], asked["sort"])
        rows = rows[-(asked.number("limit") or len(rows)) :]
    except UserError as error:
        return report(error)
    print(shown(rows, COLUMNS, asked["format"]) if rows or asked["format"] != "table" else f"no runs in {root}")
    return 0


def find(root: Path, depth: int = DEPTH) -> Iterator[str]:
    """Run directories below `root`, `root` itself included. Nothing is looked for inside one."""
    try:
        entries = list(os.scandir(root))
    except OSError:
        return  # another user's, or gone meanwhile
    if any(entry.name == RUN for entry in entries):
        yield str(root)
    elif depth:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from find(Path(entry.path), depth - 1)


def table(root: Path) -> list[Row]:
    """One row per run."""
    now = time.time()
    return [describe(folder, os.path.relpath(folder, root), now) for folder in find(root)]


def describe(folder: str, name: str, now: float) -> Row:
    """The row of one run. A run.json that can't be read gives the status unreadable."""
    row: Row = {"run": name, "name": os.path.basename(os.path.dirname(os.path.abspath(folder))), "status": "unreadable"}
    row |= {"step": None, "best": None, "metric": None, "age": None, "start": 0.0, "settings": {}}
    try:
        with open(f"{folder}/{RUN}", "rb") as file:
            facts = json.loads(file.read())
    except (OSError, ValueError):
        return row
    status = facts["status"]
    settings = dict(facts.get("settings", {}))
    for again in facts.get("resumes", []):
        settings.update({key: pair[1] for key, pair in again["changed"].items()})
    row |= {
        "step": facts.get("steps"), "best": facts.get("best"), "metric": facts.get("metric"), "settings": settings,
        "start": facts["start"], "age": round(now - facts["start"]), "status": status,
    }  # fmt: skip
    if status in LIVE or row["step"] is None:
        row["status"] = truth(Path(folder), facts)
        row["step"] = last_step(folder)
        row["best"] = best_so_far(folder, row["metric"])
    return row


def last_step(folder: str) -> int | None:
    """The step of the last whole record."""
    try:
        with open(f"{folder}/{METRICS}", "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        found = re.search(rb'"step": (\d+)', line) if line.endswith(b"}") else None
        if found:
            return int(found[1])
    return None


def best_so_far(folder: str, metric: str | None) -> float | None:
    """The score of the checkpoint that `checkpoints/best` names."""
    try:
        best = Path(folder, "checkpoints", "best").read_text(encoding="utf-8").strip()
        about = json.loads(Path(folder, "checkpoints", best, "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    score: float | None = about.get("scores", {}).get(metric)
    return score


# --- filter, sort, diff ---------------------------------------------------------------------------------------------

COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
}


def value(row: Row, key: str) -> Any:
    """A column's or a setting's value; None where the run has none."""
    return row[key] if key in row and key != "settings" else row["settings"].get(key)


def matches(row: Row, conditions: Sequence[str]) -> bool:
    """Whether all conditions hold.

    Raises:
        ConfigError: text that is no condition.
    """
    for condition in conditions:
        found = re.fullmatch(r"([\w./]+)(!=|<=|>=|=|<|>|~)(.*)", condition)
        if found is None:
            raise ConfigError(f"filter={condition}: no condition. Type filter=status=failed, filter='best<0.1'")
        key, sign, text = found.groups()
        have = value(row, key)
        if sign == "~":
            holds = text.lower() in str(have).lower()
        elif isinstance(have, (int, float)) and not isinstance(have, bool):
            try:
                holds = COMPARE[sign](float(have), float(text))
            except ValueError:
                holds = sign == "!="
        else:
            holds = sign in ("=", "!=") and COMPARE[sign](str(have).lower(), text.lower())
        if not holds:
            return False
    return True


def ordered(rows: list[Row], key: str) -> list[Row]:
    """Sorted by a column or setting; rows without a value come first, so that the end of the screen is worth reading.

    Raises:
        ConfigError: no run has such a column or setting.
    """
    name, backwards = key.removeprefix("-"), key.startswith("-")
    known = [value(row, name) for row in rows]
    if rows and all(v is None for v in known) and name not in rows[0]:
        raise ConfigError(f"sort={key}: no run has it. Columns: {', '.join(COLUMNS[:-1])}, start; or a changed setting")
    numbers = all(isinstance(v, (int, float)) for v in known if v is not None)
    have = [(v if numbers else str(v), i) for i, v in enumerate(known) if v is not None]
    have.sort(key=lambda pair: pair[0], reverse=backwards)
    return [row for row, v in zip(rows, known, strict=True) if v is None] + [rows[i] for _, i in have]


def differences(root: Path, pair: Sequence[str]) -> list[Row]:
    """The settings in which two runs differ.

    Raises:
        ConfigError: not two, or one of them has no config.yaml.
    """
    from omegaconf import OmegaConf

    if len(pair) != 2:
        raise ConfigError(f"diff={','.join(pair)}: give two runs, diff=[a,b], as the table names them")
    configs = []
    for name in pair:
        folder = next((p for p in (root / name, Path(name)) if (p / CONFIG).is_file()), None)
        if folder is None:
            raise ConfigError(f"diff: {name} has no {CONFIG}. Name a run as the table does, below {root}")
        configs.append(dict(leaves(OmegaConf.to_container(OmegaConf.load(folder / CONFIG)))))
    keys = [key for key in sorted({*configs[0], *configs[1]}) if configs[0].get(key, "") != configs[1].get(key, "")]
    return [{"setting": key, **{n: c.get(key, "") for n, c in zip(pair, configs, strict=True)}} for key in keys]


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key -> value; lists are values."""
    if isinstance(node, Mapping) and node:
        for name, inner in node.items():
            yield from leaves(inner, f"{path}.{name}" if path else str(name))
    else:
        yield path, node


# --- output ---------------------------------------------------------------------------------------------------------


def shown(rows: Sequence[Row], columns: Sequence[str], how: str) -> str:
    """The rows as a table, CSV or JSON. CSV and JSON have ages in seconds and every digit."""
    if how == "json":
        return json.dumps([{c: row[c] for c in columns} for row in rows], indent=1)
    if how == "csv":
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_settings(row[c]) if c == "settings" else row[c] for c in columns] for row in rows)
        return file.getvalue().removesuffix("\n")
    cells = [list(columns), *([_cell(c, row[c]) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


def _cell(column: str, content: Any) -> str:
    if content is None:
        return "-"
    if column == "settings":
        return _settings(content)
    if column == "age":
        return _age(content)
    return f"{content:.5g}" if isinstance(content, float) else str(content)


def _settings(settings: Mapping[str, Any]) -> str:
    hidden = ("name", "output_root", "resume", "resume_allow")
    return " ".join(f"{key}={content}" for key, content in settings.items() if key not in hidden)


def _age(seconds: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= unit:
            return f"{seconds / unit:.1f}{name}"
    return f"{seconds:.0f}s"


if __name__ == "__main__":
    sys.exit(main())
