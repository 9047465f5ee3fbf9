"""The `key=value` words of the small verbs. `train` composes its config with Hydra; `evaluate` and `cancel` take a few
keys of their own and hand the rest (`data=... data.root=...`) on to the same composition."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from echofree.errors import ConfigError, EchoFreeError, ExitCode, UserError

REQUIRED = "???"


@dataclass(frozen=True)
class Key:
    """A key of a verb.

    Attributes:
        default: its value when nothing is typed; `REQUIRED` when something must be.
        what: a line of help.
    """

    default: str
    what: str


@dataclass
class Words:
    """A command line taken apart: the verb's own keys with their values, and the words of the groups passed on."""

    values: dict[str, str]
    passed: list[str] = field(default_factory=list)

    def __getitem__(self, key: str) -> str:
        return self.values[key]

    def given(self, key: str) -> str | None:
        """The value, or None for the spellings of nothing."""
        value = self.values[key]
        return None if value in ("", "null", "none", "None") else value

    def switch(self, key: str) -> bool:
        """The value as true or false."""
        value = self.values[key].lower()
        if value not in ("true", "false"):
            raise ConfigError(f"{key}={self.values[key]}: give true or false")
        return value == "true"

    def number(self, key: str) -> int | None:
        """The value as a whole number from 1, or None."""
        value = self.given(key)
        if value is not None and not (value.isdigit() and int(value) > 0):
            raise ConfigError(f"{key}={value}: give a whole number from 1, or null")
        return None if value is None else int(value)

    def names(self, key: str) -> list[str]:
        """The value as a list: `a,b` or `[a,b]`."""
        return [name.strip() for name in self.values[key].strip("[]").split(",") if name.strip()]


def parse(argv: Sequence[str], keys: Mapping[str, Key], groups: Sequence[str] = ()) -> Words:
    """Takes `key=value` words apart.

    Args:
        argv: the words behind the verb.
        keys: the verb's own keys.
        groups: config groups whose words (`data=folder`, `data.root=x`) are passed on.

    Raises:
        ConfigError: all problems: unknown keys with the nearest one, `--key value` with our spelling, missing keys.
    """
    words, problems, rest = Words({name: key.default for name, key in keys.items()}), [], list(argv)
    while rest:
        word = rest.pop(0)
        if word.startswith("-"):
            name, has_value, value = word.lstrip("-").partition("=")
            if not has_value and rest and not rest[0].startswith("-"):
                value = rest.pop(0)
            problems.append(_flag_problem(word, name.replace("-", "_"), value, keys, groups))
            continue
        name, has_value, value = word.partition("=")
        if not has_value:
            problems.append(f"{word!r}: settings are typed key=value. Keys: {', '.join(keys)}")
        elif name in keys:
            words.values[name] = value
        elif name.lstrip("+~").partition(".")[0] in groups:
            words.passed.append(word)
        else:
            near = difflib.get_close_matches(name, [*keys, *groups], 1)
            remedy = f"Type: {near[0]}={value}" if near else f"Keys: {', '.join([*keys, *groups])}"
            problems.append(f"{word}: there is no key {name!r}. {remedy}")
    missing = [name for name, value in words.values.items() if value == REQUIRED]
    problems += [f"{name} is missing: {keys[name].what}. Type: {name}=..." for name in missing]
    if problems:
        raise ConfigError(problems)
    return words


def _flag_problem(word: str, name: str, value: str, keys: Mapping[str, Key], groups: Sequence[str]) -> str:
    known = [*keys, *groups]
    near = name if name.partition(".")[0] in known else next(iter(difflib.get_close_matches(name, known, 1)), None)
    typed = word if "=" in word or not value else f"{word} {value}"
    if near is None:
        return f"{typed}: unknown flag. Settings are typed key=value, without dashes. Keys: {', '.join(known)}"
    return f"{typed}: EchoFree takes key=value. Type: {near}={value or '...'}"


def help_asked(argv: Sequence[str]) -> bool:
    return any(word in ("-h", "--help") for word in argv)


def show_help(verb: str, keys: Mapping[str, Key], notes: Sequence[str] = ()) -> None:
    """Prints what the verb takes: the usage and examples that all verbs share, every key, and `notes`."""
    from echofree.config.help import verb_help

    width = max(map(len, keys))
    print(verb_help(verb), "", "All keys:", sep="\n")
    for name, key in keys.items():
        default = "must be given" if key.default == REQUIRED else f"default: {key.default or 'nothing'}"
        print(f"  {name:{width}}  {key.what} ({default})")
    if notes:
        print("", *notes, sep="\n")


def composed(words: Sequence[str]) -> Any:
    """The run config that these words make, without the rules that only a training has to obey.

    Raises:
        ConfigError: all problems of the words.
    """
    from echofree.config.compose import Composer, settings, without_hydra

    config, _, problems = settings(list(words), Composer(), multirun=False)
    if problems:
        raise ConfigError(problems)
    return without_hydra(config)


def report(error: UserError) -> int:
    """Prints what the user has to change, a line per problem. -> the exit code"""
    problems = error.problems if isinstance(error, ConfigError) else [str(error)]
    print(*problems, sep="\n", file=sys.stderr, flush=True)
    return int(error.exit_code)


def ending(work: Callable[[], int | None], interrupted: str = "interrupted") -> int:
    """Does a verb's work and turns what it raises into the exit code that is promised, with the text and no traceback.

    Args:
        work: -> an exit code; None: done.
        interrupted: what Ctrl-C is answered with.
    """
    try:
        return work() or int(ExitCode.DONE)
    except UserError as error:
        return report(error)
    except EchoFreeError as error:
        print(error, file=sys.stderr, flush=True)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr, flush=True)
        return int(ExitCode.INTERRUPTED)


def warn(text: str) -> None:
    """A line on standard error."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
