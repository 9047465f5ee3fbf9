"""Every option of every group composes with the rest at its defaults, and so does every experiment."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from echofree.config import search
from echofree.config.compose import Composer, compose
from echofree.errors import ConfigError

# Keys that an option can't know: what a user has to type beside it.
BESIDE = {
    "data=folder": ["data.root={here}"],
    "data=aec_challenge": ["data.root={here}"],
    "dist=tensor": ["model=base"],
    "dist=pipeline": ["model=base"],
}
# Chosen by way of `model=`, never by hand.
FOLLOWS = {"model_preset"}

OPTIONS = [
    f"{group}={option}" for group, options in search.groups().items() if group not in FOLLOWS for option in options
]
OPTIONS.remove("model=linear")  # has nothing to train; see below


@lru_cache(maxsize=1)
def composer() -> Composer:
    return Composer()


def test_groups_of_the_promise() -> None:
    promised = {
        "model",
        "data",
        "dist",
        "optim",
        "task",
        "loss",
        "train",
        "checkpoint",
        "logger",
        "experiment",
        "debug",
    }
    assert promised <= set(search.groups())


@pytest.mark.parametrize("word", OPTIONS)
def test_option_composes(word: str, tmp_path: Path) -> None:
    words = [word, *(beside.format(here=tmp_path) for beside in BESIDE.get(word, []))]
    composed = compose(words, composer())
    group, option = word.split("=")
    assert composed.choices[group] == option


@pytest.mark.parametrize("preset", search.groups()["model_preset"])
def test_preset_belongs_to_a_model(preset: str) -> None:
    assert preset in search.groups()["model"]
    assert compose([f"model={preset}"], composer()).choices["model_preset"] == preset


def test_linear_composes_and_is_refused_for_training() -> None:
    assert composer().base(["model=linear"]).model._target_ == "echofree.model.linear.Linear"
    with pytest.raises(ConfigError, match=r"nothing to train.*echofree\.evaluate model=linear"):
        compose(["model=linear"], composer())


def test_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="model=tinny"):
        compose(["model=tinny"], composer())
