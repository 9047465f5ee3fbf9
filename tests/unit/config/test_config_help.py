"""Help texts say what is there."""

from __future__ import annotations

import dataclasses

from echofree.config import help as texts
from echofree.config import search
from echofree.config.schema import RunConfig


def test_every_key_of_the_schema_is_read_off_its_text():
    docs = texts.schema_docs()
    for field in dataclasses.fields(RunConfig):
        if dataclasses.is_dataclass(field.default_factory):
            for key in dataclasses.fields(field.default_factory):
                assert f"{field.name}.{key.name}" in docs
        else:
            assert field.name in docs


def test_the_defaults_in_the_help_are_those_of_the_schema():
    docs = texts.schema_docs()
    assert docs["train.batch_size"][1] == str(RunConfig().train.batch_size)
    assert docs["train.precision"][1] == RunConfig().train.precision.name
    assert docs["train.max_steps"][1] == "null"
    assert docs["name"][1] == RunConfig().name


def test_train_help_shows_every_group_option_key_and_exit_code():
    text = texts.verb_help("train")
    for group in texts.GROUP_LINES:
        for option in search.groups()[group]:
            assert option in text
    assert "[tiny]" in text
    for key in texts.MOST_USED:
        assert f"  {key}=" in text
        assert texts.schema_docs()[key][2], f"{key} has no comment in schema.py"
    assert text.count("  python -m echofree.train") >= 5
    for code in ("0  done", "1  failed", "2  the input was wrong", "75  preempted", "130  interrupted"):
        assert code in text


def test_every_group_has_its_line():
    groups = {group.split("/")[0] for group in search.groups()} - {"hydra", "model_preset", "local"}
    assert groups <= set(texts.GROUP_LINES)


def test_every_verb_has_help_with_an_example():
    for name, verb in texts.VERBS.items():
        text = texts.verb_help(name)
        assert verb.line in text
        assert f"python -m echofree.{name} {verb.examples[-1][0]}" in text
        assert name in texts.overview()
