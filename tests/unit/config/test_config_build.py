"""Open groups: every mistake told with its place before anything is built."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import pytest

from echofree.config import build
from echofree.config.build import fits, instantiate, problems, wants
from echofree.errors import ConfigError

MODULE = """
from __future__ import annotations
from typing import Literal

BUILT = []

class Inner:
    def __init__(self, width: int, kind: Literal["a", "b"] = "a"):
        BUILT.append("inner")
        self.width, self.kind = width, kind

class Outer:
    def __init__(self, size: int, inner: Inner, names: list[str] | None = None, rate: float = 1.0, *, loss=None):
        BUILT.append("outer")
        self.size, self.inner, self.names, self.rate, self.loss = size, inner, names, rate, loss

class Denoiser:
    def forward(self, noisy): ...

class Stepless:
    def forward(self, mic, far): ...
    def step(self, mic, state): ...

class Canceller:
    def forward(self, mic, far, details=False): ...
    def step(self, mic, far, state): ...

class Open:
    def __init__(self, **keywords):
        self.keywords = keywords
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The module experiments.plugins in the current folder."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "plugins.py").write_text(MODULE)
    (tmp_path / "experiments" / "broken.py").write_text("import not_there_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.split(".")[0] == "experiments"]:
        monkeypatch.delitem(sys.modules, name)
    yield lambda: sys.modules["experiments.plugins"]
    for name in [name for name in sys.modules if name.split(".")[0] == "experiments"]:
        del sys.modules[name]


def node(**keywords):
    inner = {"_target_": "experiments.plugins.Inner", "width": 3}
    return {"_target_": "experiments.plugins.Outer", "size": 2, "inner": inner, **keywords}


def test_builds_nested_nodes_first_and_hands_in_extras(plugins):
    made = instantiate(node(names=["x"], rate=2), "task", loss="the loss")
    assert (made.size, made.names, made.rate, made.loss) == (2, ["x"], 2, "the loss")
    assert (made.inner.width, made.inner.kind) == (3, "a")
    assert plugins().BUILT == ["inner", "outer"]


def test_builds_nodes_inside_lists_and_mappings(plugins):
    inner = {"_target_": "experiments.plugins.Inner", "width": 1}
    made = instantiate({"_target_": "experiments.plugins.Open", "many": [inner, 5], "by_name": {"a": inner}}, "x")
    assert made.keywords["many"][0].width == 1
    assert made.keywords["many"][1] == 5
    assert made.keywords["by_name"]["a"].width == 1


def test_all_mistakes_at_once_and_nothing_built(plugins):
    wrong = node(sise=4, rate="fast")
    del wrong["size"]
    wrong["inner"] = {"_target_": "experiments.plugins.Inner", "kind": "c", "widht": 2}
    with pytest.raises(ConfigError) as caught:
        instantiate(wrong, "model")
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 6
    assert "model.sise=4: experiments.plugins.Outer takes no 'sise'. Type: model.size=4" in text
    assert "model.size is not given" in text
    assert "model.rate=fast: experiments.plugins.Outer wants a number" in text
    assert "model.inner.widht=2" in text
    assert "Type: model.inner.width=2" in text
    assert "model.inner.width is not given" in text
    assert "model.inner.kind=c: experiments.plugins.Inner wants a | b" in text
    assert plugins().BUILT == []


def test_a_keyword_of_the_program_cannot_be_set_and_must_be_taken(plugins):
    assert list(problems(node(loss=1), "task", ("loss",))) == [
        "task.loss is handed in by the program and can't be set. Type: ~task.loss"
    ]
    (problem,) = problems({"_target_": "experiments.plugins.Inner", "width": 1}, "task", ("loss",))
    assert "must take the keyword 'loss'" in problem


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("os.system", ["only names under echofree., torch., experiments."]),
        ("echofree.model.nothing.Net", ["no module 'echofree.model.nothing'"]),
        ("echofree.errors.ConfgError", ["no class 'ConfgError'", "echofree.errors.ConfigError"]),
        ("experiments.absent.Net", ["no module 'experiments.absent'", "looked in", "experiments"]),
        ("experiments.broken.Net", ["needs the package 'not_there_at_all'", "pip install"]),
        ("experiments.plugins.MODULE", ["no class 'MODULE'"]),
    ],
)
def test_a_target_that_cannot_be_found_is_explained(plugins, target, parts):
    (problem,) = problems({"_target_": target}, "model")
    assert problem.startswith(f"model._target_={target}:")
    for part in parts:
        assert part in problem


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Denoiser", r"its forward\(self, noisy\) can't be given mic, far\. .*write forward\(self, mic, far, details"),
        ("Stepless", r"its step\(self, mic, state\) can't be given mic, far, state"),
    ],
)
def test_a_model_that_hears_one_signal_is_refused_before_it_is_built(plugins, name, said):
    model = {"model": {"_target_": f"experiments.plugins.{name}"}}
    with pytest.raises(ConfigError, match=said):
        build.build_model(model)
    assert type(build.build_model({"model": {"_target_": "experiments.plugins.Canceller"}})).__name__ == "Canceller"


def test_a_node_without_target_is_refused():
    (problem,) = problems({"width": 3}, "model")
    assert problem.startswith("model has no _target_")


@pytest.mark.parametrize(
    ("value", "annotation", "right"),
    [
        (3, int, True), (3.0, int, False), (True, int, False), (3, float, True), ("3", float, False),
        (True, bool, True), (1, bool, False), ("x", str, True), (None, str, False), (None, str | None, True),
        (3, str | None, False), ("a", Literal["a", "b"], True), ("c", Literal["a", "b"], False),
        ([1], list[int], True), ("x", list[int], True),
    ],
)  # fmt: skip
def test_fits(value, annotation, right):
    assert fits(value, annotation) is right


def test_wants_reads_like_words():
    assert wants(int | None) == "a whole number or null"
    assert wants(Literal["a", "b"]) == "a | b"


def test_the_loader_keys_do_not_reach_the_source(plugins):
    config = {"data": {"_target_": "experiments.plugins.Open", "root": "r", "num_workers": 3, "prefetch_factor": 2}}
    assert build.build_data(config).keywords == {"root": "r"}


def test_the_task_gets_the_loss(plugins):
    made = build.build_task({"task": node(), "loss": {"_target_": "experiments.plugins.Inner", "width": 9}})
    assert made.loss.width == 9


def test_check_collects_over_all_groups(plugins):
    wrong = {"_target_": "experiments.plugins.Inner", "wide": 1}
    right = {"_target_": "experiments.plugins.Open", "num_workers": 0}
    with pytest.raises(ConfigError) as caught:
        build.check({"model": wrong, "data": right, "loss": wrong, "task": node()})
    assert len(caught.value.problems) == 4  # wide unknown and width missing, twice; the task is right


def test_every_shipped_option_matches_its_class():
    from omegaconf import OmegaConf

    from echofree.config import search
    from echofree.config.compose import Composer

    composer = Composer()
    for group in ("model", "data", "loss", "task"):
        extra = ("loss",) if group == "task" else ()
        for option in search.groups()[group]:
            node = OmegaConf.to_container(composer.base([f"{group}={option}"])[group], resolve=False)
            node = {key: value for key, value in build._source(node).items() if value != "???"}
            wrong = [
                text
                for text in problems(node, group, extra)
                if "${" not in text and "is not given" not in text  # references and what the user has to say
            ]
            assert wrong == [], f"{group}={option}"
