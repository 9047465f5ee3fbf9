"""What a run directory holds, as plain values that fit into a page. A failed or half run is a run, too."""

from __future__ import annotations

import csv
import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from echofree import __version__
from echofree.rundir import CONFIG, METRICS, PATCH, RUN, truth
from echofree.runs import leaves
from echofree.standing import BOTH, ECHO, SPEECH

Run = dict[str, Any]

SCORES = "scores.json"
WHEN = "%Y-%m-%d %H:%M"
MAX_POINTS = 900  # of a curve
MAX_CLIPS = 400  # rows of a table of clips
MAX_LOG_BYTES = 4_000_000  # looked through for warnings, from the end
MAX_WARNINGS = 40
PLACE = ("kind", "split", "step", "epoch", "clips")
WAIT_SHARE = 0.2
OUTSIDE = ("name", "output_root", "resume", "resume_allow")  # settings that change no number
WARNING = re.compile(r"^\[EchoFree: rank=(\d+)[^\]]*\] (?:WARNING: |ERROR: |warning: )(.*)$")
ABOUT_MODEL = re.compile(r"^\[EchoFree: [^\]]*\] (\w+: [\d,]+ parameters.*)$")


def run(folder: Path, name: str, kind: str) -> Run:
    """Everything of one run. What is missing or damaged is told in its warnings.

    Args:
        folder: the run directory.
        name: what the page calls it.
        kind: run, compare or sweep: a sweep's page leaves the tables of clips out.
    """
    warnings: list[dict[str, str]] = []
    facts = _json(folder / RUN, warnings) or {}
    config = _config(folder / CONFIG, warnings) if facts else {}
    records = _records(folder / METRICS, warnings)
    said = truth(folder, facts) if "status" in facts else "scored" if (folder / SCORES).is_file() else "unreadable"
    evaluations = _evaluations(folder, warnings, with_clips=kind != "sweep")
    found: Run = {
        "name": name,
        "folder": str(folder),
        "status": said,
        "facts": {k: v for k, v in facts.items() if k not in ("settings", "changed", "notes", "error", "resumes")},
        "settings": _settings(facts),
        "notes": list(facts.get("notes", [])),
        "error": _error(facts.get("error")),
        "config": config,
        "curves": _curves(records),
        "scores": _last_scores(records),
        "evaluations": evaluations,
        "exports": _exports(folder, facts) if kind != "sweep" else [],
        "metric": facts.get("metric") or "loss",
        "mode": config.get("checkpoint.mode", "min"),
        "best": _best(facts, records),
        "steps": facts.get("steps") or max((r["step"] for r in records), default=0),
        "seconds": _seconds(facts),
        "size_mb": round(sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / 1e6, 1),
    }
    logged, found["model"] = _log(folder / "logs")
    found["warnings"] = warnings + derived(found, facts, records, folder) + logged
    return found


def names(folders: Sequence[Path]) -> list[str]:
    """What sets the folders apart: the last two parts of their paths, more where that isn't enough; a sweep's jobs by
    their number."""
    parts = [folder.resolve().parts for folder in folders]
    if len(folders) > 1 and len({p[:-1] for p in parts}) == 1 and all(p[-1].isdigit() for p in parts):
        return [f"job {p[-1]}" for p in parts]
    count = 2
    while count < max(map(len, parts)) and len({p[-count:] for p in parts}) < len(parts):
        count += 1
    return ["/".join(p[-count:]) for p in parts]


def about(runs: Sequence[Run], kind: str) -> dict[str, Any]:
    """The page's own head."""
    title = runs[0]["name"] if kind == "run" else f"{len(runs)} runs"
    if kind == "sweep":
        title = f"sweep of {len(runs)} runs"
    return {
        "title": title,
        "version": __version__,
        "made": time.strftime(WHEN),
        "groups": {"echo": list(ECHO), "speech": list(SPEECH), "both": list(BOTH)},
    }


def best(runs: Sequence[Run]) -> Run | None:
    """The run with the best value of its metric."""
    scored = [r for r in runs if r["best"] is not None]
    if not scored:
        return None
    sign = -1 if scored[0]["mode"] == "max" else 1
    chosen: Run = min(scored, key=lambda r: sign * r["best"])
    return chosen


def differences(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The settings in which runs differ, with each run's value; what only says where files go is left out."""
    keys = list(dict.fromkeys(key for r in runs for key in r["config"] if key not in OUTSIDE))
    rows = [{"key": key, "values": [r["config"].get(key) for r in runs]} for key in keys]
    return [row for row in rows if len({json.dumps(v, sort_keys=True) for v in row["values"]}) > 1]


def name_systems(runs: Sequence[Run]) -> None:
    """In a comparison every run's own system carries the run's name, and scores that mean different things stand apart:
    they get a name of their own, and a warning."""
    from echofree.scorefile import incomparable

    first: dict[str, tuple[Run, Mapping[str, Any]]] = {}
    for r in runs:
        for evaluation in r["evaluations"]:
            own = evaluation["own"]
            evaluation["shown"] = r["name"] if own else None
            name, protocol = evaluation["name"], evaluation["protocol"]
            if name not in first:
                first[name] = (r, protocol)
            elif keys := incomparable([first[name][1], protocol]):
                text = f"scores of {name} can't be compared with those of {first[name][0]['name']}: "
                r["warnings"].append({"kind": "scores", "text": text + f"{', '.join(map(words, keys))} differ"})
                evaluation["name"] = f"{name} of {r['name']}"


def words(key: str) -> str:
    return key.replace("_", " ")


# --- parts ----------------------------------------------------------------------------------------------------------


def _json(path: Path, warnings: list[dict[str, str]]) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        warnings.append({"kind": "file", "text": f"{path.name} can't be read: {error}"})
        return None


def _config(path: Path, warnings: list[dict[str, str]]) -> dict[str, Any]:
    """Dotted key -> value."""
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        warnings.append({"kind": "file", "text": f"{path.name} can't be read: {error}"})
        return {}
    return dict(leaves(loaded))


def _records(path: Path, warnings: list[dict[str, str]]) -> list[dict[str, Any]]:
    found, torn = [], 0
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            torn += 1
    if torn:
        warnings.append({"kind": "file", "text": f"{torn} lines of {path.name} can't be read"})
    return found


def _settings(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What the command line changed, resumes included."""
    settings = dict(facts.get("settings", {}))
    for again in facts.get("resumes", []):
        settings.update({key: pair[1] for key, pair in again["changed"].items()})
    return {key: value for key, value in settings.items() if key != "output_root"}


def _error(error: Any) -> dict[str, Any] | None:
    if not error:
        return None
    if not isinstance(error, Mapping):
        return {"rank": None, "text": str(error)}
    return {"rank": error.get("rank"), "text": str(error.get("traceback", error))[-6000:]}


def _seconds(facts: Mapping[str, Any]) -> float | None:
    if not facts.get("start") or not facts.get("end"):
        return None
    return round(float(facts["end"]) - float(facts["start"]), 1)


def _best(facts: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> float | None:
    best = facts.get("best")
    if isinstance(best, (int, float)) and math.isfinite(best):
        return float(best)
    metric = facts.get("metric") or "loss"
    values = [r[metric] for r in records if r.get("kind") == "eval" and isinstance(r.get(metric), (int, float))]
    return min(values) if values and metric == "loss" else None


def _curves(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """{train | valid...: {key: [[steps], [values]]}}, thinned to means over equal stretches."""
    groups: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for record in records:
        group = groups.setdefault(str(record.get("split") or record.get("kind", "train")), {})
        for key, value in record.items():
            if key in PLACE or isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if math.isfinite(value):
                steps, values = group.setdefault(key, ([], []))
                steps.append(record["step"])
                values.append(value)
    return {g: {k: thinned(*pair) for k, pair in group.items()} for g, group in groups.items()}


def thinned(steps: Sequence[float], values: Sequence[float]) -> list[list[float]]:
    """At most `MAX_POINTS` points: the last step and the mean value of each stretch."""
    size = -(-len(steps) // MAX_POINTS)
    if size <= 1:
        return [list(steps), [_digits(v) for v in values]]
    starts = range(0, len(steps), size)
    return [
        [steps[min(i + size, len(steps)) - 1] for i in starts],
        [_digits(sum(values[i : i + size]) / len(values[i : i + size])) for i in starts],
    ]


def _digits(value: float) -> float:
    return float(f"{value:.6g}")


def _last_scores(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The last evaluation during the training."""
    last: Mapping[str, Any] = next((r for r in reversed(records) if r.get("kind") == "eval"), {})
    return {k: v for k, v in last.items() if k not in PLACE and isinstance(v, (int, float)) and math.isfinite(v)}


def _evaluations(folder: Path, warnings: list[dict[str, str]], with_clips: bool) -> list[dict[str, Any]]:
    """Every scores.json below evaluate/, `test` (the training's own) first; or the folder's own."""
    found = []
    files = sorted((folder / "evaluate").glob(f"**/{SCORES}"), key=lambda p: (p.parent.name != "test", str(p)))
    files += [path for path in [folder / SCORES] if path.is_file()]
    for path in files:
        scores = _json(path, warnings)
        if not scores or "systems" not in scores:
            continue
        listed = _json(path.parent / "listen" / "listen.json", warnings) or {"system": None, "clips": []}
        systems = list(scores["systems"])
        own = listed["system"] or next((s for s in reversed(systems) if s not in ("mic", "linear", "target")), None)
        for name, system in scores["systems"].items():
            if name not in ("mic", "target"):
                warnings += [{"kind": "scores", "text": f"{path.parent.name}: {name}: {f}"} for f in system["flags"]]
        found.append(
            {
                "name": path.parent.name, "folder": str(path.parent), "protocol": scores["protocol"], "own": own,
                "systems": scores["systems"], "clips": _clips(path.with_name("scores.csv"), own) if with_clips else [],
                "listen": listed["clips"], "when": time.strftime(WHEN, time.localtime(path.stat().st_mtime)),
            }
        )  # fmt: skip
    return found


def _clips(path: Path, own: str | None) -> list[dict[str, Any]]:
    """The rows of the run's own system, the worst first."""
    if not path.is_file():
        return []
    with open(path, encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["system"] == own]
    rows.sort(key=lambda row: (not row["problems"], -float(row.get("badness") or 0)))
    return [{k: _cell(v) for k, v in row.items() if k not in ("system", "rtf")} for row in rows[:MAX_CLIPS]]


def _cell(text: str) -> Any:
    try:
        value = float(text)
    except ValueError:
        return text or None
    return _digits(value) if math.isfinite(value) else None


def _exports(folder: Path, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    for target, verdict in facts.get("exports", {}).items():
        place = folder / "export" / target
        about = _json(place / "alignment.json", []) or {}
        sizes = [p.stat().st_size for p in place.glob("*") if p.suffix not in (".json",) and p.is_file()]
        takes = about.get("takes", {})
        worst = max((t.get("max", 0.0) for t in takes.values() if isinstance(t, Mapping)), default=None)
        found.append(
            {
                "target": target, "verdict": verdict, "size_mb": round(max(sizes, default=0) / 1e6, 2), "max": worst,
                "problems": about.get("problems", []),
            }
        )  # fmt: skip
    return found


def _log(folder: Path) -> tuple[list[dict[str, str]], str | None]:
    """-> (warnings of all ranks, each once with its number; the line about the model)."""
    seen: Counter[str] = Counter()
    model = None
    for path in sorted(folder.glob("rank*.log")):
        with open(path, "rb") as file:
            head = file.read(60_000).decode(errors="replace")
            file.seek(max(0, path.stat().st_size - MAX_LOG_BYTES))
            text = file.read().decode(errors="replace")
        model = model or next((m[1] for m in map(ABOUT_MODEL.match, head.splitlines()) if m), None)
        for line in text.splitlines():
            if match := WARNING.match(line):
                seen[match[2]] += 1
    found = [{"kind": "log", "text": f"{text} ({n} times)" if n > 1 else text} for text, n in seen.most_common()]
    if len(found) > MAX_WARNINGS:
        found[MAX_WARNINGS:] = [{"kind": "log", "text": f"and {len(found) - MAX_WARNINGS} more in logs/"}]
    return found, model


def derived(
    found: Run, facts: Mapping[str, Any], records: Sequence[Mapping[str, Any]], folder: Path
) -> list[dict[str, str]]:
    """What a reader should know that nobody has written down."""
    texts: list[tuple[str, str]] = []
    if found["status"] == "failed" and not found["error"]:
        texts.append(("status", "the process ended without a word: killed, or the machine went down"))
    if (folder / PATCH).is_file():
        texts.append(("code", f"ran with uncommitted changes, kept in {PATCH}"))
    resumes, restarts = len(facts.get("resumes", [])), len(facts.get("restarts", []))
    if resumes:
        texts.append(("history", f"gone on with {resumes} time{'s' * (resumes > 1)}"))
    if restarts:
        texts.append(("history", f"restarted {restarts} time{'s' * (restarts > 1)} after a failure"))
    train = [r for r in records if r.get("kind") == "train"]
    skipped = max((r.get("skipped_steps", 0) for r in train), default=0)
    if skipped:
        texts.append(("training", f"{skipped} steps were skipped, since their gradient wasn't finite"))
    waits = [r["data_wait_share"] for r in train[1:] if "data_wait_share" in r]
    if waits and sum(waits) / len(waits) > WAIT_SHARE:
        share = sum(waits) / len(waits)
        texts.append(("speed", f"{share:.0%} of the time went into waiting for data: raise data.num_workers"))
    texts += [("training", text) for text in _shape(records, found)]
    if found["status"] in ("done", "stopped") and not found["evaluations"]:
        texts.append(("scores", "no scores of the best weights: type python -m echofree.evaluate checkpoint=..."))
    return [{"kind": kind, "text": text} for kind, text in texts]


def _shape(records: Iterable[Mapping[str, Any]], found: Run) -> list[str]:
    """Whether it should have gone on, or have ended sooner."""
    metric = found["metric"]
    values = [r[metric] for r in records if r.get("kind") == "eval" and isinstance(r.get(metric), (int, float))]
    if len(values) < 3:
        return []
    sign = -1 if found["mode"] == "max" else 1
    at = min(range(len(values)), key=lambda i: sign * values[i])
    if at == len(values) - 1:
        return [f"the last evaluation is the best ({metric}): a longer training may be better still"]
    if at < len(values) / 2:
        return [f"{metric} was best at evaluation {at + 1} of {len(values)}: the rest of the training was of no use"]
    return []
