"""docs/benchmarks.md and its Chinese twin, from figures.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from claims import BENCHES, Bench, Claim

Found = Mapping[str, Mapping[str, Any]]
MARK = "<!-- written by benchmarks/all.py -->"
HEAD = (
    f"""# Benchmarks

{MARK}

Every figure that this project claims, how it was measured, and what it has to keep. A ratio is taken between things
that took turns in the same run, so that a busy machine slows both; below 1 EchoFree is the quicker one. One command
measures all of it anew and writes this page:

<!-- not run: an hour or two, on a machine that does nothing else -->
```bash
python benchmarks/all.py --peers FOLDER --checkpoint RUN_DIR --recordings DIR --slurm
```

`benchmarks/all.py` says what the words are. Left out, they leave out what needs them.
""",
    f"""# 基准测试

{MARK}

本项目声称的每一个数字、测量方法以及必须守住的界限。比值取自同一次运行中轮流进行的双方，因此机器繁忙时双方同样变慢；小于一表示
EchoFree 更快。一条命令即可重新测量全部数字并写出此页：

<!-- not run: an hour or two, on a machine that does nothing else -->
```bash
python benchmarks/all.py --peers FOLDER --checkpoint RUN_DIR --recordings DIR --slurm
```

各个参数的含义见 `benchmarks/all.py`。省略某个参数，也就省略了需要它的测量。
""",
)
COLUMNS = ("| figure | value | bound | beside it |", "| 数字 | 测得的值 | 必须守住的界限 | 同一次运行中的对照 |")
KEPT = ("kept", "守住")
MISSED = ("MISSED", "未守住")
NOT_YET = ("Not measured yet.", "尚未测量。")
FAILED = ("It failed: `{why}`.", "运行失败：`{why}`。")
WHERE = (
    "Measured on {date} in {seconds} s: {cores} cores of a {processor}, {memory} GB{gpu}, torch {torch}, load {load}.",
    "测量日期 {date}，用时 {seconds} 秒：{processor} 的 {cores} 核，{memory} GB{gpu}，torch {torch}，负载 {load}。",
)


def outcome(claim: Claim, lines: Sequence[dict[str, Any]]) -> tuple[float | None, bool | None]:
    """-> (value, whether its bound is kept; None without value or bound)"""
    try:
        value = claim.value(list(lines))
    except (KeyError, IndexError, TypeError):
        value = None  # that run had no such part
    if value is None or claim.bound is None:
        return value, None
    return value, value <= claim.bound if claim.most else value >= claim.bound


def rows(bench: Bench, lines: Sequence[dict[str, Any]], place: int) -> list[str]:
    """The table of a benchmark, without what it has no figure for."""
    out = []
    for claim in bench.claims:
        value, kept = outcome(claim, lines)
        if value is None:
            continue
        bound = ""
        if claim.bound is not None:
            sign, verdict = "≤" if claim.most else "≥", (KEPT if kept else MISSED)[place]
            bound = f"`{sign} {claim.bound:g}` {verdict}"
        beside = claim.beside[place]
        peer = claim.peer(list(lines)) if claim.peer is not None else ""
        if claim.peer is not None and not peer:
            continue  # the peer wasn't there
        if peer:
            beside += f" `{peer}`"
        out.append(f"| {claim.what[place]} | `{claim.form.format(value)}` | {bound} | {beside} |")
    return [COLUMNS[place], "| --- | --- | --- | --- |", *out] if out else []


def section(bench: Bench, entry: Mapping[str, Any] | None, place: int) -> str:
    parts = [f"## {bench.title[place]}", ""]
    command = entry["command"] if entry else f"python benchmarks/{' '.join([bench.script, *bench.words])}"
    parts += ["<!-- not run: a benchmark -->", "```bash", command, "```", ""]
    if entry is None:
        return "\n".join([*parts, NOT_YET[place], ""])
    if "failed" in entry:
        parts += [FAILED[place].format(why=entry["failed"]), ""]
    if table := rows(bench, entry["lines"], place):
        parts += [*table, ""]
    about = entry["machine"]
    facts = {
        "date": entry["date"], "seconds": entry["seconds"], "cores": about["cores"], "processor": about["processor"],
        "memory": about["memory_gb"], "torch": about["torch"], "load": entry["load_before"],
    }  # fmt: skip
    gpu = f", `{about['gpu']}`" if about["gpu"] else ""
    parts += [WHERE[place].format(**{name: f"`{value}`" for name, value in facts.items()}, gpu=gpu), ""]
    return "\n".join(parts)


def pages(found: Found) -> tuple[str, str]:
    """-> (English, Chinese)"""
    texts = []
    for place in range(2):
        sections = [section(bench, found.get(bench.name), place) for bench in BENCHES]
        texts.append("\n".join([HEAD[place], *sections]).rstrip() + "\n")
    return texts[0], texts[1]


def write(found: Found, folder: Path) -> None:
    """Writes both into a folder."""
    for name, text in zip(("benchmarks.md", "benchmarks.zh.md"), pages(found), strict=True):
        (folder / name).write_text(text, encoding="utf-8")


def missed(found: Found, names: Sequence[str]) -> list[str]:
    """What a person should know: benchmarks that failed, bounds that weren't kept."""
    out = []
    for bench in BENCHES:
        entry = found.get(bench.name)
        if bench.name not in names or entry is None:
            continue
        if "failed" in entry:
            out.append(f"{bench.name}: {entry['failed']}")
        for claim in bench.claims:
            value, kept = outcome(claim, entry["lines"])
            if kept is False:
                assert value is not None
                beside = f" (beside: {claim.beside[0]})" if claim.beside[0] else ""
                out.append(f"{bench.name}: {claim.what[0]}{beside}: {claim.form.format(value)}, bound {claim.bound:g}")
    return out
