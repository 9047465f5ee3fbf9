"""The command line of a verb other than train: a few typed keys, and perhaps some of train's groups.

`evaluate checkpoint=... data=folder data.root=...` has its own keys (`checkpoint`) and one group of train (`data`).
Keys follow the verb's dataclass; a group is composed as train would compose it. All problems are told at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from echofree.config import override
from echofree.config.arguments import parse_flags
from echofree.config.check import unresolved
from echofree.config.compose import Composer, report, without_hydra
from echofree.errors import ConfigError, UserError


def verb_config(argv: Sequence[str], verb: str, schema: type, groups: Sequence[str] = ()) -> DictConfig:
    """Everything between `python -m echofree.<verb> ...` and its work.

    Args:
        argv: the words after the verb.
        verb: its name, a key of `help.VERBS`.
        schema: a dataclass of the verb's own keys; MISSING ones have to be given.
        groups: groups of train that may be chosen; each is a field of `schema` of type Any with default None.

    Returns:
        The typed config. A group that no word mentions is None.

    Raises:
        SystemExit: 0 after `--help`, 2 after the problems were printed.
    """
    flags = parse_flags(argv, verb, [field.name for field in dataclasses.fields(schema)])
    try:
        if flags.help:
            from echofree.config.help import verb_help

            print(verb_help(verb))
            raise SystemExit(0)
        if flags.multirun or flags.show:
            flags.problems.append(f"-m, --cfg, --info and --hydra-help are flags of train, not of {verb}")
        return compose_verb(flags.words, schema, groups, flags.problems)
    except UserError as error:
        raise SystemExit(report(error, flags.hint)) from None


def compose_verb(
    words: Sequence[str], schema: type, groups: Sequence[str] = (), problems: Sequence[str] = ()
) -> DictConfig:
    """`verb_config` without flags and exits.

    Raises:
        ConfigError: `problems` and every problem of the words.
    """
    composer, found = Composer(), list(problems)
    config: DictConfig = OmegaConf.structured(schema)
    OmegaConf.set_struct(config, True)
    parsed = override.parse(words, composer.loader)
    found += parsed.problems
    own = [word for word in parsed.overrides if word.key_or_group.split(".")[0] not in groups]
    checker = override.Checker(composer.loader, config, multirun=False, schema=schema)
    for word in own:
        found += checker.use_problems(word) or checker.value_problems(word, config)
    for group in groups:
        mine = [word for word in parsed.overrides if word.key_or_group.split(".")[0] == group]
        if mine:
            node, wrong = _group(group, mine, composer)
            found += wrong
            OmegaConf.update(config, group, node, merge=False, force_add=True)
    found += unresolved(config)
    if found:
        raise ConfigError(found)
    return config


def _group(group: str, words: list[Any], composer: Composer) -> tuple[Any, list[str]]:
    """-> (the node of one group as train composes it, interpolations resolved; the problems)"""
    choice = [word for word in words if word.key_or_group == group]
    checker = override.Checker(composer.loader, composer.base(()), multirun=False)
    problems = [text for word in choice for text in checker.use_problems(word) + checker.group_problems(word)]
    config = composer.base([] if problems else [str(word.input_line).lstrip("+") for word in choice])
    for word in words:
        if word not in choice:
            problems += checker.use_problems(word) or checker.value_problems(word, config)
    whole = without_hydra(config)
    problems += [text for text in unresolved(whole) if text.startswith(f"{group}.")]
    return (None if problems else OmegaConf.to_container(whole[group], resolve=True)), problems
