"""What the README promises exists, and its Chinese twin promises the same."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from echofree.config import search
from echofree.config.compose import Composer, compose, settings
from echofree.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]
README, TWIN = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
DOCS = ["README.md", "README.zh.md", "CONTRIBUTING.md", "CHANGELOG.md"]
DOCS += ["docs/decisions.md", "docs/slurm.md", "docs/sweep.md"]
BLOCK = re.compile(r"^(?:<!-- (?P<mark>[^>]*?) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[str, str, str]]:
    """(mark, kind, text) of each code block."""
    return [(m["mark"] or "", m["kind"], m["text"]) for m in BLOCK.finditer(text)]


def section(text: str, title: str) -> str:
    """From a heading to the next one."""
    return re.split(r"^#+ ", text.split(f" {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(table: str) -> list[str]:
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    return [row.split("|")[1].strip() for row in rows]


COMMANDS = [
    line
    for _, kind, text in blocks(README)
    if kind == "bash"
    for line in text.splitlines()
    if line.strip() and not line.startswith("#")
]


def test_blocks_are_found() -> None:
    assert len(COMMANDS) >= 10
    assert [mark for mark, _, _ in blocks(README) if mark.startswith("ci:")] == ["ci:main", "ci:test"]


def verb_of(command: str) -> tuple[str, list[str]]:
    words = shlex.split(command.split("&&")[-1])
    for place, word in enumerate(words):
        if word.startswith("echofree."):
            return word, words[place + 1 :]
    return "", []


@pytest.mark.parametrize("command", COMMANDS)
def test_verb_exists(command: str) -> None:
    module, _ = verb_of(command)
    assert module == "" or find_spec(module) is not None, f"{command}: there is no {module}"
    assert module != "" or "-m pytest" in command


@pytest.mark.parametrize("command", [c for c in COMMANDS if verb_of(c)[0] == "echofree.train"])
def test_train_words_compose(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    words = [re.sub(r"/path/to/[\w/]+", str(tmp_path), word) for word in verb_of(command)[1]]
    if words[:1] == ["-m"]:
        assert settings(words[1:], Composer(), multirun=True)[2] == []
        words = [word.split(",")[0] for word in words[1:] if not word.startswith("hydra")]
    if any(word.startswith("resume=outputs") for word in words):
        pytest.skip("names a run that only a reader has")
    compose(words)


def test_every_recipe_is_told_with_a_command_that_composes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "experiments/README.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| `python -m echofree.train ([^`]+)` \|", text, re.MULTILINE))
    assert sorted(told) == sorted(path.stem for path in (ROOT / "experiments/experiment").glob("*.yaml"))
    for name, words in told.items():
        assert f"experiment={name}" in words.split()
        given = [re.sub(r"/path/to/\w+", str(tmp_path), word) for word in words.split()]
        compose([word for word in given if "DATE_TIME" not in word])


def write_files(folder: Path) -> None:
    """The files that the README shows, at their places."""
    for mark, _, text in blocks(README):
        if mark.startswith("file: "):
            path = folder / mark.removeprefix("file: ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def test_table_of_groups_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ((?:`\w+` ?)+)\|", section(README, "Config groups"), re.MULTILINE)
    told = {group: sorted(re.findall(r"`(\w+)`", options)) for group, options in rows}
    assert told == {group: options for group, options in search.groups().items() if group != "model_preset"}


def test_table_of_exit_codes_is_complete() -> None:
    assert first_cells(section(README, "Exit codes")) == [str(int(code)) for code in ExitCode]


def test_twin_is_in_step() -> None:
    assert blocks(README) == blocks(TWIN)
    for pattern in (r"^(#+) ", r"^(\|[- |]+\|)$", r"^(- )", r"(<!-- .*? -->)"):
        ours, theirs = (re.findall(pattern, text, re.MULTILINE) for text in (README, TWIN))
        assert ours == theirs, pattern
    # code, numbers and names in the text don't get translated
    assert sorted(set(re.findall(r"`[^`\n]+`", README))) == sorted(set(re.findall(r"`[^`\n]+`", TWIN)))


@pytest.mark.parametrize("name", DOCS)
def test_named_files_exist(name: str) -> None:
    """`path/to/file` in the text names something of this repository."""
    text = (ROOT / name).read_text(encoding="utf-8")
    heads = ("src/", "conf/", "docs/", "tests/", "benchmarks/", ".ci/")
    named = [path for path in re.findall(r"`([\w./-]+)`", text) if path.startswith(heads)]
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_changelog_has_this_version() -> None:
    from echofree import __version__

    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_names_of_the_tour_exist() -> None:
    """A guided tour goes stale first."""
    import torch

    from echofree import contracts, loop, train, training

    homes = {
        "train": train,
        "training": training,
        "Loop": loop.Loop,
        "Strategy": contracts.Strategy,
        "Optimizer": torch.optim.Optimizer,
    }
    tour = re.search(r"in six names: (.*?)\. Read", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
    assert tour is not None
    names = re.findall(r"`(\w+)\.(\w+)`", tour[1])
    assert len(names) == 6
    assert [f"{home}.{name}" for home, name in names if not hasattr(homes[home], name)] == []
