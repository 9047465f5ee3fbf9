"""How parity judges: cases, verdicts, causes, table, files. The runs themselves: tests/ranks/test_parity.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from echofree import curve, parity
from echofree.config.schema import RunConfig
from echofree.data.cut import SHORTEST, Cut
from echofree.errors import ConfigError
from echofree.follow import differences
from echofree.verb import parse
from ranks.sharing import Noise, base, tiny

FACTS: dict[str, Any] = {"uneven": True, "batch_norm": [], "dropout": 0.0, "steps": 3}


def config(batch: Any = 4, accumulation: int = 2) -> Any:
    made = OmegaConf.structured(RunConfig)
    made.train.batch_size, made.train.gradient_accumulation_steps = batch, accumulation
    return made


def asked(*words: str) -> Any:
    return parse(words, parity.KEYS)


def rows(**changes: Any) -> list[dict[str, Any]]:
    """Three steps; `changes`: key -> function of step 2's value."""
    found: list[dict[str, Any]] = [
        {"step": n, "clips": [n, n + 1], "loss": 0.5 / n, "grad_norm": 2.0 * n, "worst": [["net.weight", 1e-8]]}
        for n in (1, 2, 3)
    ]
    for key, change in changes.items():
        found[1][key] = change(found[1][key])
    return found


CASE = parity.Case("ddp on 2", "ddp", 2, 2, 2, 2)


def verdict(facts: dict[str, Any] | None = None, **changes: Any) -> parity.Verdict:
    return parity.compare(CASE, rows(**changes), rows(), 1e-6, 0.05, facts or FACTS)


def test_every_case_has_the_same_global_batch() -> None:
    found, left_out = parity.cases(asked("parity.worlds=[1,2,4]"), config(), base())
    names = [case.name for case in found]
    assert names == [
        "one process", "one process, 8 x 1", "ddp on 2", "fsdp on 2", "tensor on 2", "pipeline on 2", "ddp on 4",
        "fsdp on 4", "tensor on 4", "pipeline on 4", "one process, bf16",
    ]  # fmt: skip
    assert left_out == []
    assert {case.batch_size * case.accumulation * case.data_size for case in found} == {8}
    assert all(case.data_size == (case.world if case.strategy in ("ddp", "fsdp") else 1) for case in found)


def test_what_cannot_work_is_left_out_or_refused() -> None:
    found, left_out = parity.cases(asked("parity.worlds=[1,2]", "parity.bf16=false"), config(), tiny())
    assert [case.name for case in found] == ["one process", "ddp on 2", "fsdp on 2"]
    assert len(left_out) == 3
    assert "batch norm" in left_out[0]
    assert all("BarkNet" in text for text in left_out[1:])
    found, _ = parity.cases(asked("parity.worlds=1", "parity.uneven=false"), config(), tiny())
    assert found[1].name == "one process, 8 x 1"
    with pytest.raises(ConfigError, match="tensor on 2 ranks"):
        parity.cases(asked("parity.strategies=[ddp,tensor]"), config(), tiny())
    with pytest.raises(ConfigError, match=r"3 clips can't be dealt out to 2 ranks"):
        parity.cases(asked("parity.strategies=ddp"), config(3, 1), tiny())


@pytest.mark.parametrize(
    ("words", "batch", "text"),
    [
        (("parity.strategies=dpp",), 4, "parity.strategies=dpp"),
        (("parity.worlds=two",), 4, "'two' is no number"),
        ((), "auto", "train.batch_size=auto"),
    ],
)
def test_mistakes(words: tuple[str, ...], batch: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parity.cases(asked(*words), config(batch), tiny())


def test_equal() -> None:
    found = verdict()
    assert found.equal
    assert (found.loss, found.norm, found.weights) == (0.0, 0.0, 1e-8)


def test_within_the_tolerances() -> None:
    assert verdict(loss=lambda v: v * (1 + 5e-6), grad_norm=lambda v: v * (1 + 5e-4)).equal
    assert verdict(worst=lambda v: [["net.weight", 9e-7]]).equal


@pytest.mark.parametrize(
    ("changes", "what", "cause"),
    [
        ({"clips": lambda v: [7, 8]}, "clips", "data order"),
        ({"loss": lambda v: v * 2}, "loss", "weighting: the loss is off by a factor of 2"),
        ({"grad_norm": lambda v: v / 4}, "gradient norm", "off by a factor of 4"),
        ({"grad_norm": lambda v: v * 1.03}, "gradient norm", "mean of means"),
        ({"worst": lambda v: [["gru.bias", 1e-3]]}, "weights", "rounding that the optimizer enlarges"),
        ({"worst": lambda v: [["gru.bias", float("inf")]]}, "weights", "rounding"),
        ({"loss": lambda v: None}, "loss", ""),
    ],
)
def test_the_first_difference_and_its_cause(changes: dict[str, Any], what: str, cause: str) -> None:
    found = verdict(**changes)
    assert not found.equal
    assert (found.step, found.what) == (2, what)
    assert cause in found.cause
    if what == "weights":
        assert found.tensor == "gru.bias"


def test_norms_and_dropout_are_named() -> None:
    odd = {"loss": lambda v: v * 1.01}
    assert "batch norm (a.norm): padding" in verdict({**FACTS, "batch_norm": ["a.norm"]}, **odd).cause
    assert "own batch" in verdict({**FACTS, "batch_norm": ["a.norm"], "uneven": False}, **odd).cause
    assert "dropout (0.1)" in verdict({**FACTS, "dropout": 0.1}, **odd).cause


def test_bf16_is_judged_by_its_mean_loss() -> None:
    half = parity.Case("one process, bf16", "single", 1, 1, 4, 2, "bf16")
    near = parity.compare(half, rows(loss=lambda v: v * 1.1, grad_norm=lambda v: 9.0), rows(), 1e-6, 0.05, FACTS)
    assert near.equal
    assert near.loss == pytest.approx(0.025 / (0.5 + 0.25 + 0.5 / 3))
    far = parity.compare(half, rows(loss=lambda v: v * 2), rows(), 1e-6, 0.05, FACTS)
    assert not far.equal
    assert "bf16" in far.cause


def test_table_and_files(tmp_path: Path) -> None:
    bad = verdict(loss=lambda v: v * 2)
    bad.case = replace(CASE, name="fsdp on 2")
    reference = parity.Case("one process", "single", 1, 1, 4, 2)
    text = parity.table(reference, [verdict(), bad])
    assert "the reference" in text
    assert "equal" in text
    assert "DIFFERS at step 2 in loss" in text
    assert "first differs at step 2 in loss, net.weight most. Likely: weighting" in text
    parity.write(tmp_path, reference, rows(), [verdict(), bad], 1e-6, FACTS)
    told = json.loads((tmp_path / "parity.json").read_text())
    assert [case["equal"] for case in told["cases"]] == [True, False]
    assert told["cases"][1]["step"] == 2
    root = ElementTree.parse(tmp_path / "parity.svg").getroot()
    assert len([e for e in root.iter() if e.tag.endswith("polyline")]) == 3 + 2


def test_curve_shows_each_point_where_it_belongs() -> None:
    text = curve.svg(
        [("a", {"one": [(0, 1.0), (1, 3.0), (2, None)]}, False), ("b", {"one": [(0, 0.0), (1, 1e-6)]}, True)]
    )
    lines = [e.attrib["points"].split() for e in ElementTree.fromstring(text).iter() if e.tag.endswith("polyline")]
    (low, high), (only,) = lines
    assert [len(line) for line in lines] == [2, 1], "None, and 0 on a logarithmic axis, are left out"
    assert float(low.split(",")[1]) > float(high.split(",")[1]), "larger is higher"
    assert float(low.split(",")[0]) < float(high.split(",")[0])
    assert only


def test_differences() -> None:
    a = {"w": torch.tensor([0.1, 0.2]), "b": torch.zeros(0), "n": torch.tensor([float("nan")]), "v": torch.ones(2) * 9}
    b = {"w": torch.tensor([0.1, 0.7]), "b": torch.zeros(0), "n": torch.tensor([1.0]), "v": torch.ones(2) * 10}
    found = differences(a, b)
    assert [name for name, _ in found] == ["n", "w", "v"]
    assert [worst for _, worst in found] == pytest.approx([float("inf"), 0.5, 0.1])


class Source:
    sample_rate = 16000

    def split(self, name: str) -> Any:
        return Noise(3, even=True) if name == "train" else Noise(2)

    def fingerprint(self) -> str:
        return "x"

    def survey(self) -> list[tuple[str, str]]:
        return [("noise", "3")]


def test_cut() -> None:
    cut = Cut(Source(), 5, uneven=True).split("train")  # type: ignore[arg-type]
    assert cut is not None
    assert len(cut) == 5
    whole = Noise(3, even=True)
    lengths = []
    for index in range(5):
        clip, full = cut.item(index, 1), whole.item(index % 3, 1)
        assert clip.index == index
        assert clip.near is not None
        assert full.near is not None
        length = len(clip.mic)
        assert SHORTEST * len(full.mic) - 1 <= length <= len(full.mic)
        np.testing.assert_array_equal(clip.near, full.near[:length])
        np.testing.assert_array_equal(clip.mic, cut.item(index, 1).mic)
        lengths.append(length)
    assert len(set(lengths)) > 1
    even = Cut(Source(), 5, uneven=False)  # type: ignore[arg-type]
    assert even.split("valid") is None
    assert len(even.split("train").item(4, 0).mic) == 2400  # type: ignore[union-attr]
    assert even.fingerprint() != Cut(Source(), 5, uneven=True).fingerprint()  # type: ignore[arg-type]
