"""Takes the hand-written pages apart, for the tests: code blocks with their marks, commands, words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parents[1]
GENERATED = ("reference/keys.md", "reference/verbs.md")
ELSEWHERE = ("slurm.md", "sweep.md")  # their commands have tests of their own
NO_TWIN = ("decisions.md", "contributing.md")  # contributing has a test of its own
BLOCK = re.compile(r"^(?:<!-- (?P<mark>[^>]*?) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    mark: str
    kind: str
    text: str

    @property
    def exit_code(self) -> str:
        """Of its commands: a number, or any."""
        return self.mark.removeprefix("exit: ") if self.mark.startswith("exit: ") else "0"


@dataclass(frozen=True)
class Page:
    name: str
    text: str
    twin: str | None

    @property
    def blocks(self) -> list[Block]:
        return [Block(m["mark"] or "", m["kind"], m["text"]) for m in BLOCK.finditer(self.text)]


def pages() -> list[Page]:
    """The English pages that have a Chinese twin, each with its text."""
    found = []
    for path in sorted(DOCS.rglob("*.md")):
        name = path.relative_to(DOCS).as_posix()
        if not name.endswith(".zh.md") and name not in GENERATED + NO_TWIN:
            twin = path.with_suffix(".zh.md")
            found.append(Page(name, path.read_text("utf-8"), twin.read_text("utf-8") if twin.exists() else None))
    return found


def commands(page: Page) -> Iterator[tuple[Block, str]]:
    """Each line of its shell blocks, unless they have tests of their own."""
    for block in page.blocks if page.name not in ELSEWHERE else []:
        if block.kind == "bash":
            for line in block.text.splitlines():
                if line.strip() and not line.startswith("#"):
                    yield block, line


def words_of(line: str) -> tuple[str | None, list[str]]:
    """(verb, its words) of a command, pipes and redirections taken off; (None, []) of another program's."""
    part = next((part for part in line.split(" | ") if "-m echofree." in part), "")
    words = shlex.split(part.split(" > ")[0])
    for place, word in enumerate(words):
        if word.startswith("echofree."):
            return word.removeprefix("echofree."), words[place + 1 :]
    return None, []


def filled(word: str, folder: Path, run: Path | None) -> str:
    """A word with the reader's own paths in place of those that the page shows."""
    word = word.replace("/path/to/recordings", str(folder / "recordings")).replace("/path/to/clean", str(folder))
    if run is not None:
        word = re.sub(r"outputs/[\w-]+/DATE_TIME", str(run), word)
    return word


def write_files(page: Page, folder: Path) -> None:
    """The files that the page shows, at their places."""
    for block in page.blocks:
        if block.mark.startswith("file: "):
            path = folder / block.mark.removeprefix("file: ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
