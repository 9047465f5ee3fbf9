"""The summary of an evaluation as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echofree.verb import warn

if TYPE_CHECKING:
    from echofree.score import Row

SPEED = (
    ("rtf", "real-time factor", "{:.3f}"),
    ("rtf_stream", "  as a stream, one thread", "{:.3f}"),
    ("latency_ms", "latency, ms", "{:.0f}"),
)


def table(summary: Mapping[str, Any], names: Sequence[str]) -> str:
    """The summary as text: a block per scenario, a line per metric, a column per system, mean [low, high]."""
    systems = list(summary)
    lines = []
    for scenario in dict.fromkeys(s for system in summary.values() for s in system["scenarios"]):
        parts = {s: summary[s]["scenarios"].get(scenario, {"clips": 0, "metrics": {}}) for s in systems}
        count = max(part["clips"] for part in parts.values())
        head = f"{scenario.replace('_', ' ')} ({count} clip{'' if count == 1 else 's'})"
        block = []
        for name in names:
            cells = [_cell(parts[s]["metrics"].get(name)) for s in systems]
            if any(cell != "-" for cell in cells):
                block.append(f"  {name:26}" + "".join(f"{cell:>26}" for cell in cells))
        if block:
            lines += [f"{head:28}" + "".join(f"{system:>26}" for system in systems), *block, ""]
    for key, what, form in SPEED:
        cells = [form.format(value) if (value := summary[s].get(key)) is not None else "-" for s in systems]
        if any(cell != "-" for cell in cells):
            lines.append(f"{what:28}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)


def _cell(numbers: Mapping[str, Any] | None) -> str:
    if numbers is None:
        return "-"
    if numbers["mean"] is None:
        return f"invalid x{numbers['invalid']}"
    digits = 1 if abs(numbers["mean"]) >= 10 else 2
    text = f"{round(numbers['mean'], digits) + 0.0:.{digits}f}"  # + 0.0: no minus in front of zero
    if numbers["low"] is not None:
        text += f" [{numbers['low']:.{digits}f}, {numbers['high']:.{digits}f}]"
    if numbers["invalid"]:
        text += f" {numbers['invalid']}!"
    return text if numbers["valid"] else f"({text})"


def tell(rows: Sequence[Row], summary: Mapping[str, Any], out: Path, page: Path | None = None) -> None:
    """What the table needs to be read right, and where the files are.

    Args:
        page: the folder of which a report can be made, when that has to be said.
    """
    for system, about in summary.items():
        for flag in about["flags"] if system != "mic" else ():
            warn(f"{system}: {flag}")
    failed = [row for row in rows if row["problems"]]
    for row in failed[:5]:
        warn(f"{row['system']}, {row['name']}: {row['problems'][0]}")
    if len(failed) > 5:
        warn(f"and {len(failed) - 5} more, see {out / 'scores.csv'}")
    if any(row["problems"] for row in rows):
        print("n! = n clips whose output is invalid and not in the mean; (x) = doesn't count, the near end is muted")
    print(f"wrote {out / 'scores.csv'} and {out / 'scores.json'}")
    if page is not None:
        print(f"to read and to hear it: python -m echofree.report {page}")
