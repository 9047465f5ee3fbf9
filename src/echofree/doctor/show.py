"""The checks as a table for people, or as JSON for scripts."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence

from echofree.doctor.check import Check, Status

WIDEST = 140


def table(checks: Sequence[Check], width: int | None = None) -> str:
    """A line per check, wrapped; the remedy stands below what it is for."""
    width = min(width or shutil.get_terminal_size((120, 24)).columns, WIDEST)
    first = max(len(check.name) for check in checks)
    indent = " " * (first + 9)
    lines = []
    for check in checks:
        begin = f"{check.status!s:4}   {check.name:{first}}  "
        lines += textwrap.wrap(check.found, width, initial_indent=begin, subsequent_indent=indent)
        if check.remedy:
            lines += textwrap.wrap(f"-> {check.remedy}", width, initial_indent=indent, subsequent_indent=indent + "   ")
    return "\n".join([*lines, "", summary(checks)])


def summary(checks: Sequence[Check]) -> str:
    counts = {status: sum(check.status is status for check in checks) for status in Status}
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def as_json(checks: Sequence[Check]) -> str:
    """{"status": the worst, "checks": [{name, status, found, remedy}]}"""
    worst = max((check.status for check in checks), default=Status.passed)
    rows = [{"name": c.name, "status": str(c.status), "found": c.found, "remedy": c.remedy} for c in checks]
    return json.dumps({"status": str(worst), "checks": rows}, indent=1)
