"""Writes docs/reference/keys.md and verbs.md, English and Chinese, from the schema, the options in conf/ and the verbs.

The descriptions are the comments and help lines of the source. Their Chinese stands in chinese.yaml beside this file,
English line -> Chinese line; tests/unit/test_site.py names the lines that lack one.

    python docs/tools/generate.py
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHINESE = Path(__file__).with_name("chinese.yaml")
MARK = "<!-- written by docs/tools/generate.py -->"
OPEN = ("data", "model", "task", "loss", "export")  # groups whose keys are the keywords of a class
HOMES = {
    "demo": "echofree.demo.__main__",
    "doctor": "echofree.doctor",
    "export": "echofree.export.__main__",
    "report": "echofree.report",
}

Say = Callable[[str], str]


@dataclass(frozen=True)
class Row:
    key: str
    default: str
    what: str
    valid: str = ""


def core() -> dict[str, list[Row]]:
    """Group -> its keys; "" holds those of no group."""
    from echofree.config import check, help

    found: dict[str, list[Row]] = {}
    table = dict(help.schema_docs())
    rows: dict[str, tuple[str, str, str]] = {}
    for key, row in table.items():
        inner = _class(row[0]) if row[0].endswith("Config") and "." in key else {}
        rows |= {f"{key}.{name}": found for name, found in inner.items()} or {key: row}
    for key, (kind, default, what) in rows.items():
        valid = help._enum_options(kind)
        if key in check.RANGES:
            valid = check.RANGES[key][0][1]
        default = {"field(default_factory=dict)": "{}"}.get(default, default)
        if default != "MISSING":  # the whole of an open group
            found.setdefault(key.rpartition(".")[0].partition(".")[0], []).append(Row(key, default, what, valid))
    return found


def _class(name: str) -> dict[str, tuple[str, str, str]]:
    """key -> (type, default, line) of a class of schema.py that is part of another."""
    text = (ROOT / "src/echofree/config/schema.py").read_text(encoding="utf-8")
    body = re.split(r"^class ", text.split(f"class {name}:", 1)[1], maxsplit=1, flags=re.M)[0]
    items = re.findall(r"^    (\w+): (\S+|\w+ \| None) = (\S+)  # (.+)$", body, flags=re.M)
    return {key: (kind, default, what) for key, kind, default, what in items}


def options(group: str) -> Iterator[tuple[str, str, list[Row]]]:
    """(option, what it is, its keys) of each file in conf/<group>."""
    for path in sorted((ROOT / "conf" / group).glob("*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        head: list[str] = []
        for line in lines:
            if not line.startswith("#"):
                break
            head.append(line.lstrip("# "))
        what = " ".join(line for line in head if not line.startswith("@package"))
        yield path.stem, what, list(_rows(lines[len(head) :], group))


def _rows(lines: list[str], group: str) -> Iterator[Row]:
    parents: list[tuple[int, str]] = []
    for line in lines:
        item = re.match(r"^( *)([\w@-]+):(?: +(\"[^\"]*\"|\[[^\]]*\]|[^#]*?))?(?: *# (.*))?$", line)
        if item is None:
            continue
        indent, name, value, comment = len(item[1]), item[2], (item[3] or "").strip(), item[4] or ""
        while parents and parents[-1][0] >= indent:
            parents.pop()
        key = ".".join([group, *(parent for _, parent in parents), name])
        if name == "defaults":
            continue
        if value == "":
            parents.append((indent, name))
            if comment:
                yield Row(key, "", comment)
            continue
        yield Row(key, value, comment)


def launcher(name: str) -> list[Row]:
    """The keys of hydra/launcher=local or slurm."""
    from dataclasses import MISSING, fields

    settings = importlib.import_module("hydra_plugins.echofree_launcher.settings")
    text = Path(settings.__file__ or "").read_text(encoding="utf-8")
    comments = dict(re.findall(r"^    (\w+): .*?  # (.+)$", text.split(f"class {name}")[1], flags=re.M))
    found = []
    for item in fields(getattr(settings, name)):
        if item.name == "_target_":
            continue
        value = item.default if item.default is not MISSING else item.default_factory()  # type: ignore[misc]
        shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        found.append(Row(f"hydra.launcher.{item.name}", shown, comments.get(item.name, "")))
    return found


def verbs() -> dict[str, tuple[str, list[Row], list[str]]]:
    """Verb -> (its line, its own keys, its examples)."""
    from echofree.config.help import VERBS

    found = {}
    for name, about in VERBS.items():
        rows = [Row(key, "", what) for key, what in about.keys]
        if name != "train":
            home = importlib.import_module(HOMES.get(name, f"echofree.{name}"))
            tables = [getattr(home, table) for table in ("KEYS", "STREAM_KEYS") if hasattr(home, table)]
            own = {key: Row(key, item.default, item.what) for table in reversed(tables) for key, item in table.items()}
            rows = list(own.values()) + [row for row in rows if row.key not in own and " " not in row.key]
        examples = [f"python -m echofree.{name} {words}".rstrip() for words, _ in about.examples]
        found[name] = (about.line, rows, examples)
    return found


def sentence(text: str, say: Say) -> str:
    """A line of help as a sentence of its own."""
    said = say(text)
    return said[:1].upper() + said[1:] + ("。" if said != text else ".")


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def table(rows: list[Row], say: Say, valid: bool = False) -> list[str]:
    head = [say("key"), say("default"), *([say("valid")] if valid else []), say("what")]
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    for row in rows:
        default = {"???": say("required")}.get(row.default, f"`{cell(row.default)}`" if row.default else "")
        cells = [f"`{row.key}`", default, *([cell(say(row.valid))] if valid else []), cell(say(row.what))]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def keys_page(say: Say) -> str:
    """The reference of every config key."""
    from echofree.config.help import GROUP_LINES

    lines = [f"# {say('Every key')}", "", MARK, "", say(INTRO), ""]
    groups = core()
    lines += [f"## {say('Of the run itself')}", "", *table(groups.pop(""), say, valid=True)]
    for group, rows in groups.items():
        lines += [f"## {group}", "", sentence(GROUP_LINES[group], say), "", *table(rows, say, valid=True)]
    for group in OPEN:
        if group not in groups:
            lines += [f"## {group}", "", sentence(GROUP_LINES[group], say), ""]
        for option, what, rows in options(group):
            lines += [f"### `{group}={option}`", "", say(what), ""]
            lines += table(rows, say) if rows else []
    lines += [f"## {say('Launchers of sweeps')}", ""]
    for option, name in (("local", "LocalSettings"), ("slurm", "SlurmSettings")):
        lines += [f"### `hydra/launcher={option}`", "", *table(launcher(name), say)]
    return "\n".join(lines)


def verbs_page(say: Say) -> str:
    """The reference of the verbs and their own keys."""
    lines = [f"# {say('Every verb')}", "", MARK, "", say(VERBS_INTRO), ""]
    for name, (line, rows, examples) in verbs().items():
        lines += [f"## {name}", "", sentence(line, say), "", *(table(rows, say) if rows else [])]
        lines += ["```text", *examples, "```", ""]
    return "\n".join(lines)


INTRO = (
    "Type `key=value`. A key of a class that its YAML file leaves out is given with a plus: `+model.dropout=0.1`. "
    "`python -m echofree.train --cfg job` shows the composed result."
)
VERBS_INTRO = "`echofree VERB` is the same as `python -m echofree.VERB`. `--help` behind each shows what stands here."


def chinese() -> dict[str, str]:
    return yaml.safe_load(CHINESE.read_text(encoding="utf-8")) or {}


def pages() -> dict[str, str]:
    """File name below docs/ -> text."""
    twin = chinese()

    def english(text: str) -> str:
        return text

    def translated(text: str) -> str:
        return twin.get(text, text)

    return {
        "reference/keys.md": keys_page(english),
        "reference/keys.zh.md": keys_page(translated),
        "reference/verbs.md": verbs_page(english),
        "reference/verbs.zh.md": verbs_page(translated),
    }


def without_chinese() -> list[str]:
    """The English lines of the generated pages that need a Chinese one and have none."""
    twin = chinese()
    seen: dict[str, None] = {}

    def note(text: str) -> str:
        names_only = re.fullmatch(r"[\w.|:/ ]*", text) and ("|" in text or " " not in text)
        if not names_only and re.search(r"[A-Za-z]{2}", text) and text not in twin:
            seen[text] = None
        return text

    keys_page(note)
    verbs_page(note)
    return list(seen)


def write(docs: Path) -> None:
    for name, text in pages().items():
        path = docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(ROOT / "docs")
