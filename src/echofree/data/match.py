"""Which files belong together: names by pattern, scenarios by keyword, or a table of cases."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from echofree.contracts import Scenario
from echofree.data.recording import Recording
from echofree.errors import ConfigError, DataError

ROLES = ("echo", "near", "far", "mic")
SCENARIO_WORDS = {
    "fe": Scenario.FAR_END,
    "farend": Scenario.FAR_END,
    "ne": Scenario.NEAR_END,
    "nearend": Scenario.NEAR_END,
    "dt": Scenario.DOUBLE_TALK,
    "doubletalk": Scenario.DOUBLE_TALK,
    "silence": Scenario.SILENCE,
}
FAR_COLUMNS = ("ref", "far", "lpb", "loopback")


@dataclass(frozen=True)
class LeftOut:
    """Something that isn't used, and why (a reason without file names, so that equal ones can be counted)."""

    name: str
    reason: str


def compile_pattern(pattern: str, key: str) -> list[re.Pattern[str]]:
    """ "{id}_mic.*|mic/{id}.*" -> regular expressions for a path relative to the root.

    Alternatives are separated by |, * stands for anything within one name, {id} for what the files of one recording
    share. A pattern with / names folders; any folders may stand before it, and count as part of the id.

    Raises:
        ConfigError: no {id} in an alternative.
    """
    found = []
    for part in filter(None, (p.strip() for p in pattern.split("|"))):
        if part.count("{id}") != 1:
            raise ConfigError(f'{key}={pattern!r}: each alternative needs {{id}} once, such as "{{id}}_mic.*".')
        text = re.escape(part).replace(re.escape("{id}"), "(?P<id>[^/]+?)").replace(r"\*", "[^/]*")
        found.append(re.compile(f"(?P<folder>(?:.*/)?){text}", re.IGNORECASE))
    return found


def pair(root: Path, paths: Iterable[Path], patterns: Mapping[str, str]) -> tuple[list[Recording], list[LeftOut]]:
    """Groups files by id.

    Args:
        patterns: a pattern for each role of `ROLES`; "" for none.

    Returns:
        (recordings that have at least a microphone, what fits nothing). `far` may be None in them.
    """
    compiled = {role: compile_pattern(patterns[role], f"data.{role}_pattern") for role in ROLES}
    groups: dict[str, dict[str, Path]] = {}
    left_out = []
    for path in sorted(paths):
        relative = path.relative_to(root).as_posix()
        found = _classify(relative, compiled)
        if found is None:
            left_out.append(LeftOut(relative, "the name fits no pattern"))
            continue
        role, name = found
        group = groups.setdefault(name, {})
        if role in group:
            left_out.append(LeftOut(relative, f"a second {role} file of one recording"))
        else:
            group[role] = path
    recordings = []
    for name, group in sorted(groups.items()):
        if "mic" in group:
            far, near, echo = (group.get(role) for role in ("far", "near", "echo"))
            recordings.append(Recording(name, group["mic"], far, near, echo, scenario_of(name)))
        else:
            left_out += [LeftOut(p.relative_to(root).as_posix(), "no microphone file") for p in group.values()]
    return recordings, left_out


def scenario_of(name: str) -> Scenario:
    """By keyword: farend, nearend, doubletalk, or fe, ne, dt as a word of its own; the last one counts."""
    text = re.sub(r"(far|near)[ _-]end", r"\1end", name.lower())
    text = re.sub(r"double[ _-]talk", "doubletalk", text)
    words = re.split(r"[^a-z]+", text)
    for word in reversed(words):
        if word in SCENARIO_WORDS:
            return SCENARIO_WORDS[word]
    return Scenario.UNKNOWN


def read_cases(table: Path) -> tuple[list[Recording], list[LeftOut]]:
    """A CSV with one labelled stretch a row: id, scenario (fe, ne, dt, silence), mic, ref (or far, lpb), near, start_s,
    end_s; file names relative to the table, near, start_s and end_s may be empty.

    Raises:
        DataError: no such file, a column missing, a number or a scenario that can't be read.
    """
    if not table.is_file():
        raise DataError(f"data.cases={table}: no such file.")
    with table.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        columns = set(reader.fieldnames or ())
        far_column = next((c for c in FAR_COLUMNS if c in columns), None)
        missing = [c for c in ("id", "scenario", "mic") if c not in columns]
        if missing or far_column is None:
            names = missing + ([] if far_column else ["ref"])
            raise DataError(f"{table}: no column {', '.join(names)}; it has {', '.join(sorted(columns))}.")
        rows = list(reader)
    recordings: list[Recording] = []
    left_out: list[LeftOut] = []
    for number, row in enumerate(rows, start=2):
        recording = _case(table, number, row, far_column)
        missing_files = [p.name for p in recording.paths if not p.exists()]
        if missing_files:
            left_out.append(LeftOut(recording.name, f"{', '.join(missing_files)}: no such file"))
        else:
            recordings.append(recording)
    return recordings, left_out


def _case(table: Path, number: int, row: Mapping[str, str | None], far_column: str) -> Recording:
    def text(column: str) -> str:
        return (row.get(column) or "").strip()

    def seconds(column: str) -> float | None:
        if not text(column):
            return None
        try:
            return float(text(column))
        except ValueError:
            raise DataError(f"{table}, line {number}: {column}={text(column)!r} isn't a number of seconds.") from None

    def file(column: str) -> Path | None:
        return table.parent / text(column) if text(column) else None

    scenario, mic = SCENARIO_WORDS.get(text("scenario").lower()), file("mic")
    if scenario is None or mic is None:
        what = (
            "names no microphone file" if mic is None else f"scenario={text('scenario')!r}: give fe, ne, dt or silence"
        )
        raise DataError(f"{table}, line {number}: {what}.")
    start_s, end_s = seconds("start_s") or 0.0, seconds("end_s")
    if start_s < 0 or (end_s is not None and end_s <= start_s):
        raise DataError(f"{table}, line {number}: the stretch from {start_s} s to {end_s} s is empty.")
    name = text("id") or mic.stem
    return Recording(name, mic, file(far_column), file("near"), None, scenario, start_s=start_s, end_s=end_s)


def _classify(relative: str, compiled: Mapping[str, Sequence[re.Pattern[str]]]) -> tuple[str, str] | None:
    for role in ROLES:
        for pattern in compiled[role]:
            match = pattern.fullmatch(relative)
            if match:
                return role, match["folder"] + match["id"]
    return None
