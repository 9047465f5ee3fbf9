"""The pages of the site promise what exists: commands compose, files and names are there, both languages are in step.

The commands are composed, not run. A page marks its code blocks in the line above: `<!-- file: PATH -->` a file that
the reader makes; `<!-- exit: 2 -->` the exit code of all commands of the block (any: it depends on the machine);
`<!-- not run: WHY -->`; `<!-- output: WHAT -->` what a command printed.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import yaml

from echofree.config.compose import Composer, compose, settings
from echofree.config.help import VERBS
from echofree.data.match import read_cases
from echofree.errors import ConfigError, ExitCode
from echofree.verb import parse

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs/tools"))
import generate  # noqa: E402
import pictures  # noqa: E402
from page import Page, commands, filled, pages, words_of, write_files  # noqa: E402

PAGES = pages()
IDS = [page.name for page in PAGES]
COMMANDS = [(page, block, line) for page in PAGES for block, line in commands(page)]


def test_pages_are_found() -> None:
    assert len(PAGES) >= 20
    assert len(COMMANDS) >= 60


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_both_languages_are_in_step(page: Page) -> None:
    """The same files, headings, code, tables, links, pictures and names in backticks."""
    assert page.twin is not None, f"docs/{page.name} has no {page.name.replace('.md', '.zh.md')}"
    ours, theirs = page.text, page.twin
    assert page.blocks == Page(page.name, theirs, None).blocks
    for pattern in (
        r"^(#+) ",
        r"^(\|[- |]+\|)$",
        r"^(- )",
        r"(<!-- .*? -->)",
        r"!\[[^\]]*\]\(([^)]*)\)",
    ):
        found = [re.findall(pattern, prose(text), re.MULTILINE) for text in (ours, theirs)]
        assert found[0] == found[1], pattern
    for pattern in (r"[^!]\[[^\]]*\]\(([^)]*)\)", r"`([^`\n]+)`"):
        found = [sorted(set(re.findall(pattern, prose(text).replace("\n", " ")))) for text in (ours, theirs)]
        assert found[0] == found[1], pattern


def prose(text: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def test_the_twin_is_chinese() -> None:
    """Not English that was left standing: most letters of a twin's prose are Chinese."""
    for page in PAGES:
        text = re.sub(r"`[^`]*`|\([^)]*\)|<!--.*?-->|[^\w]", "", prose(page.twin or ""))
        share = len(re.findall(r"[一-鿿]", text)) / max(1, len(text))
        assert share > 0.6, f"{page.name}: {share:.2f}"


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "experiments"]:
        del sys.modules[name]
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_are_understood(page: Page, reader: Path) -> None:
    """Verbs exist, words of train compose, keys of the other verbs are theirs; what must fail does."""
    write_files(page, reader)
    for block, line in commands(page):
        verb, words = words_of(line)
        if verb is None:
            continue
        assert verb in VERBS, line
        words = [filled(word, reader, None) for word in words]
        wrong = block.exit_code == str(int(ExitCode.USER)) and not any(word.startswith("resume=") for word in words)
        try:
            understand(verb, words)
        except ConfigError as error:
            if not wrong:
                raise AssertionError(line) from error
        else:
            assert not wrong or "+model" in line, f"{line}: this was to fail"


def understand(verb: str, words: list[str]) -> None:
    if verb in ("train", "federate"):
        if words[:1] == ["-m"]:
            assert settings(words[1:], Composer(), multirun=True)[2] == []
            words = [word.split(",")[0] for word in words[1:] if not word.startswith("hydra")]
        words = [word for word in words if not word.startswith(("resume=outputs", "resume_allow="))]
        if "--cfg" in words:
            words = words[: words.index("--cfg")]
        if words[:1] and words[0].startswith("--"):
            raise ConfigError(f"{words[0]}: EchoFree takes key=value")
        compose([word for word in words if word != "--help"])
        return
    home = importlib.import_module(generate.HOMES.get(verb, f"echofree.{verb}"))
    keys = {**home.KEYS, **getattr(home, "STREAM_KEYS", {})}
    own = [word for word in words if word.partition("=")[0] in keys]
    rest = [word for word in words if word not in own and word != "--stream"]
    parse(own, {key: item for key, item in keys.items() if any(word.startswith(f"{key}=") for word in own)})
    if verb in ("profile", "parity", "doctor", "evaluate", "export"):
        compose([word for word in rest if word.partition("=")[0] != "checkpoint"])
    else:
        assert all("=" not in word for word in rest), f"{verb} has no {rest}"


def test_yaml_and_tables_of_the_pages_can_be_read(tmp_path: Path) -> None:
    for page in PAGES:
        for block in page.blocks:
            if block.kind == "yaml":
                yaml.safe_load(block.text)
            if block.kind == "python":
                compile(block.text, page.name, "exec")
            if block.mark == "file: recordings/cases.csv":
                table = tmp_path / "cases.csv"
                table.write_text(block.text, encoding="utf-8")
                assert len(read_cases(table)[1]) == block.text.count("\n") - 1  # its files aren't here


def test_named_files_and_names_exist() -> None:
    """`path/to/file`, `echofree.x.Y` and keys such as `train.epochs` in the text name something."""
    keys = {row.key for rows in generate.core().values() for row in rows}
    for page in PAGES:
        spans = set(re.findall(r"`([^`\n]+)`", prose(page.text)))
        for path in [span for span in spans if re.match(r"(src|conf|docs|tests|benchmarks|examples|\.ci)/", span)]:
            assert (ROOT / path).exists(), f"{page.name}: {path}"
        for name in [span for span in spans if re.fullmatch(r"echofree(\.\w+)+", span)]:
            home, _, last = name.rpartition(".")
            assert hasattr(importlib.import_module(home), last), f"{page.name}: {name}"
        for span in spans:
            key = re.match(r"((?:train|optim|dist|checkpoint|logger)\.[\w.]+)(=|$)", span)
            spoken = ("train.main", "training.run_config")
            assert key is None or key[1] in keys or span in spoken, f"{page.name}: {span} is no key"


def test_the_tables_of_facts_are_complete() -> None:
    text = {page.name: page.text for page in PAGES}
    rows = re.findall(r"^\| (\d+) \|", text["reference/exit-codes.md"], re.MULTILINE)
    assert rows == [str(int(code)) for code in ExitCode]


def test_contributing_is_in_step() -> None:
    ours, theirs = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "docs/contributing.zh.md")
    )
    for pattern in (r"^(#+) ", r"^\|[^|]*`([^|]+)`[^|]*\|", r"^(- )"):
        found = [re.findall(pattern, part, re.MULTILINE) for part in (ours, theirs)]
        assert found[0] == found[1], pattern


def test_generated_pages_hold_every_key() -> None:
    from echofree.config.frozen import flat

    text = generate.pages()
    assert generate.without_chinese() == [], "lines without Chinese: add them to docs/tools/chinese.yaml"
    keys = set(re.findall(r"^\| `([^`]+)` \|", text["reference/keys.md"], re.MULTILINE))
    config = compose([]).config
    missing = [key for key in flat(config) if key not in keys and not key.startswith("hydra")]
    assert missing == []
    assert set(re.findall(r"^\| `([^`]+)` \|", text["reference/keys.zh.md"], re.MULTILINE)) == keys
    headings = [len(re.findall(r"^#+ ", text[name], re.MULTILINE)) for name in text]
    assert headings[0] == headings[1]
    assert headings[2] == headings[3] == len(VERBS) + 1


def test_pictures_are_current(tmp_path: Path) -> None:
    pictures.write(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_text() == (ROOT / "docs/picture" / path.name).read_text(), "python docs/tools/pictures.py"
