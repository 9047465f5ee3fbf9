"""Who is to blame when a run stands still: what each rank reports about itself, and what follows from all of it.

A rank that waits in a collective is a victim; the one to name is the rank that has not entered it. The collectives are
read from torch's flight recorder where this torch has one (gloo's and NCCL's), else from the phase and the stack.
"""

from __future__ import annotations

import json
import linecache
import os
import socket
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echofree.data.worker import WorkerBoard

RECORDERS = {"_dump_fr_trace_json": "", "_dump_nccl_trace_json": "nccl "}  # function -> prefix of its groups' names
TALKING = ("agree", "gather", "start", "end")  # phases in which a rank only exchanges with others
NOT_THEIRS = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
WATCHING = ("watchdog", "ThreadPoolExecutor")  # names of the threads that only look on
MAX_LINES = 40  # frames of one thread

Report = dict[str, Any]


# --- what one rank knows --------------------------------------------------------------------------------------------


def progress() -> dict[str, list[int]]:
    """Group -> [last collective entered, last finished]; cheap. Empty where torch has no flight recorder."""
    found: dict[str, list[int]] = {}
    for prefix, dump in _dumps(entries=False):
        for group, status in dump.get("pg_status", {}).items():
            last = [int(status.get(f"last_{what}_collective", -1)) for what in ("enqueued", "completed")]
            found[prefix + str(group)] = last
    return found


def pending() -> list[dict[str, Any]]:
    """The collectives that this rank has entered and not finished."""
    found = []
    for prefix, dump in _dumps(entries=True):
        for entry in dump.get("entries", []):
            if not entry.get("retired", True):
                group, name = entry["process_group"][:2]
                found.append(
                    {
                        "group": prefix + str(group),
                        "name": prefix + ("data" if name == "default_pg" else name),
                        "number": int(entry["collective_seq_id"]),
                        "op": str(entry["profiling_name"]).rpartition(":")[2],
                        "sizes": entry.get("input_sizes", []),
                    }
                )
    return found


def _dumps(entries: bool) -> list[tuple[str, dict[str, Any]]]:
    import torch

    home = getattr(torch._C, "_distributed_c10d", None)
    found = []
    for name, prefix in RECORDERS.items():
        dump = getattr(home, name, None)
        if dump is not None:
            found.append((prefix, json.loads(dump(includeCollectives=entries, onlyActive=False))))
    return found


def threads() -> dict[str, list[str]]:
    """Name -> "file:line in function: source", innermost frame first; the main thread comes first."""
    names = {t.ident: t.name for t in threading.enumerate()}
    main = threading.main_thread().ident
    found: dict[str, list[str]] = {}
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        name = names.get(ident, str(ident))
        if name.startswith(WATCHING):
            continue
        lines: list[str] = []
        walk: Any = frame
        while walk is not None and len(lines) < MAX_LINES:
            code, line = walk.f_code, walk.f_lineno
            source = linecache.getline(code.co_filename, line).strip()
            lines.append(f"{code.co_filename}:{line} in {code.co_name}" + (f": {source}" if source else ""))
            walk = walk.f_back
        found[name] = lines
    return found


def where(lines: Sequence[str]) -> str:
    """The innermost frame that isn't Python's own or an installed package's, else the innermost; path shortened."""
    mine = [line for line in lines if not line.startswith(NOT_THEIRS) and "/" in line.split(":")[0]]
    if not lines:
        return "nowhere in Python"
    return _short(mine[0] if mine else lines[0])


def _short(line: str) -> str:
    path, colon, rest = line.partition(":")
    for root in (os.getcwd(), os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))):
        if path.startswith(root + os.sep):
            path = os.path.relpath(path, root)
    return path + colon + rest


def debugged(lines: Sequence[str]) -> bool:
    """A person in the debugger isn't a hang."""
    return any("/pdb.py:" in line or "/bdb.py:" in line for line in lines)


def report(rank: int, step: int, epoch: int, phase: str, still_s: float, board: WorkerBoard | None) -> Report:
    """Everything that this rank can say about where it stands."""
    stacks = threads()
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "step": step,
        "epoch": epoch,
        "phase": phase,
        "still_s": round(still_s, 1),
        "since": time.strftime("%H:%M:%S", time.localtime(time.time() - still_s)),
        "where": where(next(iter(stacks.values()), [])),
        "collectives": progress(),
        "pending": pending(),
        "loader": _loader(board),
        "threads": stacks,
    }


def _loader(board: WorkerBoard | None) -> list[dict[str, Any]]:
    if board is None:
        return []
    stacks = board.stacks()
    found = []
    for making in board.read():
        text = stacks.get(making.worker, "") if making.worker is not None else ""
        lines = _from_faulthandler(text)
        found.append(
            {
                "says": str(making),
                "busy": making.index is not None or not making.alive,
                "where": where(lines) if lines else "",
                "stack": text.splitlines()[:MAX_LINES],
            }
        )
    return found


def last_dump(log_file: Path) -> str:
    """Where a rank stood that kept the interpreter lock, from what faulthandler's timer left in its log; "" if nothing.

    The timer dumps every thread; the one of the training is the one that isn't ours.
    """
    if not log_file.exists():
        return ""
    dump = log_file.read_text(encoding="utf-8", errors="replace").rpartition("Timeout (")[2]
    for thread in dump.split("Thread 0x")[1:]:
        lines = _from_faulthandler("Current thread" + thread)
        if any("train.py" in line and " in work" in line for line in lines):
            return where(lines)
    return ""


def _from_faulthandler(text: str) -> list[str]:
    """Its lines of the current thread in the form that `threads` gives."""
    found = []
    for line in text.partition("Current thread")[2].splitlines()[1:]:
        if not line.strip().startswith("File "):
            break
        path, number, function = line.strip().removeprefix('File "').replace('"', "").split(", ")[0], 0, ""
        rest = line.rpartition(", line ")[2]
        number, function = int(rest.split()[0]), rest.rpartition(" in ")[2]
        source = linecache.getline(path, number).strip()
        found.append(f"{path}:{number} in {function}" + (f": {source}" if source else ""))
    return found


# --- what follows ---------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """`rank` is the one to name first; None when all wait for each other."""

    rank: int | None
    culprits: list[int]
    text: str


def waits(item: Mapping[str, Any]) -> bool:
    """Whether a rank (its report) is in a collective that others have to enter too."""
    return bool(item["pending"]) or (not item["collectives"] and item["phase"] in TALKING)


def judge(reports: Sequence[Report], silent: Mapping[int, str], size: int, limit: str) -> Verdict:
    """Names the culprits.

    Args:
        reports: of the ranks that could still report.
        silent: why the others can't, by rank.
        limit: the setting that ran out, as "dist.timeout_s=300".
    """
    idle = [r["rank"] for r in reports if not waits(r)]
    apart = _apart(reports)
    if silent:
        culprits, why = sorted(silent), "the others wait for it"
    elif idle:
        culprits, why = idle, "the others wait for it" if size > 1 else ""
    elif apart is not None:
        culprits, why = apart, "the ranks are in different collectives, so that none can end: one took another branch"
    else:
        culprits, why = [], "all ranks wait in the same collective: the network between them has stopped carrying data"
    names = " and ".join(f"rank {r}" for r in culprits) or "every rank"
    longest = max((r["still_s"] for r in reports if r["rank"] in culprits or not culprits), default=0.0)
    since = f" for {longest:.1f} s" if longest else ""
    # rank 0 of 1 would be a strange way to say "it"
    head = f"hang: {names}{f' of {size}' if size > 1 and culprits else ''} has not moved{since}"
    head += f"; {why} ({limit})" if why else f" ({limit})"
    lines = [head, *(f"  rank {r} {text}" for r, text in sorted(silent.items()))]
    for item in sorted(reports, key=lambda r: (r["rank"] not in culprits, r["rank"])):
        lines += _stands(item, item["rank"] in culprits, culprits, reports)
    lines.append(
        f"  The stacks of all threads are in logs/hang.json. If such a pause is normal here, raise {_key(limit)}"
    )
    return Verdict(culprits[0] if culprits else None, culprits, "\n".join(lines))


def _key(limit: str) -> str:
    return limit.partition("=")[0]


def _apart(reports: Sequence[Report]) -> list[int] | None:
    """The ranks that are in another collective than most; empty when there is no such majority. None when all are in
    the same one."""
    place = {r["rank"]: (r["pending"][0]["group"], r["pending"][0]["number"]) for r in reports if r["pending"]}
    counts = Counter(place.values()).most_common()
    if len(counts) < 2:
        return None
    if counts[0][1] == counts[1][1]:
        return []
    return sorted(rank for rank, where_it_is in place.items() if where_it_is != counts[0][0])


def _stands(item: Report, guilty: bool, culprits: Sequence[int], reports: Sequence[Report]) -> list[str]:
    verb = "stands" if guilty or not culprits else "waits"
    who = f"rank {item['rank']} on {item['host']} (process {item['pid']})"
    place = f"{item['phase']!r} of step {item['step'] + 1}, epoch {item['epoch']}"
    lines = [f"  {who} {verb} in {place}, since {item['since']}:", f"    {item['where']}"]
    for wait in item["pending"]:
        entered = {r["rank"]: r["collectives"].get(wait["group"], [-1])[0] for r in reports if r is not item}
        behind = [f"rank {rank} has entered {n}" for rank, n in sorted(entered.items()) if n < wait["number"]]
        more = f" ({'; '.join(behind)})" if behind else ""
        lines.append(f"    in {wait['op']} number {wait['number']} of the {wait['name']} group{more}")
    busy = [w for w in item["loader"] if w["busy"]]
    if guilty and item["phase"] in ("data", "evaluate"):
        lines += [f"    {w['says']}" + (f": {w['where']}" if w["where"] else "") for w in busy]
    return lines
