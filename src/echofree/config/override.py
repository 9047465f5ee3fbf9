"""The command line's `key=value` words, checked one by one so that every mistake is told at once.

Hydra stops at the first wrong word and does not say what would be right. Here each word is parsed, its group option or
key looked up, and its value tried on a config of its own; only words that pass reach the composition.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from echofree.config.classic import SPELLINGS
from echofree.config.schema import RunConfig

OPEN_GROUPS = ("model", "data", "task", "loss")
LISTED_GROUPS = ("export",)  # that take several options at once: export=[onnx,onnx_int8]
# Hydra's own settings that a single run reads; all others would be ignored without -m.
SINGLE_RUN_KEYS = ("hydra.run.dir", "hydra.searchpath")


@dataclasses.dataclass
class Words:
    """The words that are right so far, and what is wrong with the others."""

    overrides: list[Override]
    problems: list[str]


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that a typo most likely meant, or None.

    A key whose last part is equal wins (`batch_size`, `train.lr`), then a known foreign name, then a like one in the
    same group, in any group, and at last likeness of the whole.
    """
    names = list(candidates)
    head, _, last = word.rpartition(".")
    same_last = [name for name in names if name.rpartition(".")[2] == last]
    if same_last:
        return max(same_last, key=lambda name: difflib.SequenceMatcher(None, word, name).ratio())
    for foreign in (word, last):
        if SPELLINGS.get(foreign) in names:
            return SPELLINGS[foreign]
    near_last = {name.rpartition(".")[2]: name for name in reversed(names)}
    siblings = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == head}
    for table, cutoff in ((siblings, 0.6), (near_last, 0.75)):
        close = difflib.get_close_matches(last, table, n=1, cutoff=cutoff)
        if close:
            return table[close[0]]
    whole = [name for name in names if name.count(".") == word.count(".")] if not siblings else []
    close = difflib.get_close_matches(word, whole, n=1, cutoff=0.7)
    return close[0] if close else None


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of every leaf; lists are leaves, interpolations stay as written, `???` where missing."""
    plain = OmegaConf.to_container(config, resolve=False) if OmegaConf.is_config(config) else config
    return dict(_leaves(plain, prefix))


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and (node or not prefix):
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node.name if isinstance(node, Enum) else node


def field_type(key: str) -> Any:
    """The annotated type of a typed key such as `train.batch_size`; None outside the typed groups."""
    owner: Any = RunConfig
    for part in key.split("."):
        if not dataclasses.is_dataclass(owner):
            return None
        hints = typing.get_type_hints(owner)
        if part not in hints:
            return None
        owner = hints[part]
    return owner


def valid_values(annotation: Any) -> str:
    """What a value of this type looks like, in words."""
    if isinstance(annotation, types.UnionType):
        if set(typing.get_args(annotation)) == {int, str}:
            return "a whole number or auto"
        parts = [valid_values(part) for part in typing.get_args(annotation) if part is not type(None)]
        return " or ".join([*parts, "null"])
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(annotation.__members__)
    if typing.get_origin(annotation) is list:
        return "a list such as [a,b]"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(annotation, "a value")


def parse(words: Sequence[str], loader: ConfigLoaderImpl) -> Words:
    """Parses each word by Hydra's grammar; a key given twice is a problem, since one of the two would be ignored."""
    parser = OverridesParser.create(config_loader=loader)
    result = Words([], [])
    for word in words:
        key = word.partition("=")[0]
        if "=" not in word and not word.startswith("~"):
            result.problems.append(f"{word!r} is no setting: type key=value, for example train.batch_size=4")
            continue
        try:
            override = parser.parse_override(word)
        except HydraException as error:
            lines = [line for line in str(error).splitlines() if line.strip() and "hydra.cc" not in line]
            result.problems.append(
                f"{word!r} can't be read ({lines[0].strip() if lines else 'grammar'}). Quote values with special "
                f"characters, for example: '{key}=\"a value (with) signs\"'; a list is [a,b]"
            )
            continue
        twin = next((o for o in result.overrides if o.get_key_element().lstrip("+~") == override.key_or_group), None)
        if twin is not None and not override.is_delete():
            result.problems.append(
                f"{override.key_or_group} is given twice ({twin.input_line}, then {override.input_line}): keep one"
            )
            continue
        result.overrides.append(override)
    return result


class Checker:
    """Checks parsed words against the groups and keys that exist.

    Args:
        loader: Hydra's config loader with our search path.
        base: the composition of the group choices alone, with its hydra node.
        multirun: whether -m was given.
    """

    def __init__(self, loader: ConfigLoaderImpl, base: DictConfig, multirun: bool):
        self.loader, self.base, self.multirun = loader, base, multirun
        self.parser = OverridesParser.create(config_loader=loader)

    def group_problems(self, override: Override) -> list[str]:
        """Problems of a word that chooses an option of a group."""
        group, options = override.key_or_group, sorted(self.loader.get_group_options(override.key_or_group))
        if override.is_delete():
            return []
        problems = []
        for value in self._values(override):
            name = "null" if value is None else str(value)
            if isinstance(value, list) and group in LISTED_GROUPS:
                problems += [self._unknown_option(group, str(v), options) for v in value if str(v) not in options]
            elif isinstance(value, (list, dict)):
                problems.append(f"{override.input_line}: the group {group} takes one option of: {', '.join(options)}")
            elif name not in options:
                problems.append(self._unknown_option(group, name, options))
        return problems

    @staticmethod
    def _unknown_option(group: str, name: str, options: list[str]) -> str:
        near = nearest(name, options)
        text = f"{group}={name}: the group {group} has no option {name!r}. Available: {', '.join(options)}."
        if near:
            return f"{text} Type: {group}={near}"
        return f"{text} Your own options go into experiments/{group}/{name}.yaml (or set ECHOFREE_EXPERIMENTS)"

    def use_problems(self, override: Override) -> list[str]:
        """Words that are right in themselves but would be ignored, or need -m."""
        line, key = override.input_line, override.key_or_group
        if override.is_sweep_override() and not self.multirun:
            return [
                f"{line}: several values need a sweep: add -m. A single value that is a list is written {key}=[a,b]"
            ]
        if override.is_sweep_override() and key.startswith(("hydra.", "hydra/")):
            return [f"{line}: Hydra's own settings can't be swept: give one value"]
        if key.startswith(("hydra.", "hydra/")) and not self.multirun and key not in SINGLE_RUN_KEYS:
            return [f"{line}: a single run doesn't read it: add -m to make this a sweep, or leave it out"]
        if key == "hydra.run.dir" and self.multirun:
            return [f"{line}: a sweep doesn't read it: type hydra.sweep.dir=... instead"]
        return []

    def value_problems(self, override: Override, config: DictConfig) -> list[str]:
        """Problems of a word that sets a key. On success the (first) value is set in `config`."""
        problems, applied = [], False
        for line in self._lines(override):
            single = self.parser.parse_override(line)
            trial = config if not applied else config.copy()
            if applied:  # the first value has added the key
                single = without_plus(single, self.loader)
            problem = self._try(single, trial)
            applied = applied or problem is None
            if problem:
                problems.append(problem)
        return problems

    def _try(self, override: Override, config: DictConfig) -> str | None:
        key, line = override.key_or_group, str(override.input_line)
        adds = override.is_add() or override.is_force_add()
        if not exists(config, key) and (not adds or self._closed(key)):
            return self._unknown_key(override, config)
        try:
            ConfigLoaderImpl._apply_overrides_to_config([override], config)
        except (HydraException, OmegaConfBaseException) as error:
            return self._wrong_value(line, key, error)
        return None

    @staticmethod
    def _closed(key: str) -> bool:
        """Whether `key` lies in a typed group, where nothing can be added."""
        head = key.split(".")[0]
        return head not in OPEN_GROUPS and head != "hydra"

    def _unknown_key(self, override: Override, config: DictConfig) -> str:
        key = override.key_or_group
        line = f"{key}={override.get_value_element_as_str()}" if not override.is_delete() else f"~{key}"
        head = key.split(".")[0]
        names = [name for name in flat(config) if head == "hydra" or not name.startswith("hydra.")]
        names += [group for group in self._groups() if group != "hydra"]
        near = nearest(key, names)
        text = f"{line}: there is no key {key!r}."
        value = override.get_value_element_as_str() if not override.is_delete() else ""
        owners = self._options_with(key)
        if owners:
            return f"{text} It belongs to {', '.join(owners)}. Type: {owners[0]} {key}={value}"
        if near:
            text += f" Type: {near}={value}"
        elif head in config and "." in key:
            text += f" Keys of {head}: {', '.join(k for k in names if k.startswith(head + '.'))}"
        else:
            text += " All keys: python -m echofree.train --cfg job"
        if head in OPEN_GROUPS and "." in key:
            text += f". A keyword of its class that the file doesn't name is added with a plus: +{key}={value}"
        return text

    def _wrong_value(self, line: str, key: str, error: Exception) -> str:
        annotation = field_type(key)
        if annotation is not None:
            default = flat(self.base).get(key)
            remedy = f"{key}={'null' if default is None else default}"
            return f"{line}: not a valid value. Valid: {valid_values(annotation)}. Type, for example: {remedy}"
        cause = error.__cause__ or error
        return f"{line}: {str(cause).splitlines()[0]}"

    def _options_with(self, key: str) -> list[str]:
        """`group=option` of the options of an open group whose file has this key."""
        head, _, rest = key.partition(".")
        if head not in OPEN_GROUPS or not rest:
            return []
        found = []
        for option in sorted(self.loader.get_group_options(head)):
            result = self.loader.repository.load_config(f"{head}/{option}")
            if result is not None and isinstance(result.config, DictConfig) and exists(result.config, rest):
                found.append(f"{head}={option}")
        return found

    def _groups(self) -> list[str]:
        return list(self.loader.list_groups(""))

    def _values(self, override: Override) -> list[Any]:
        return list(override.sweep_iterator()) if override.is_discrete_sweep() else [override.value()]

    def _lines(self, override: Override) -> list[str]:
        """One `key=value` line per value; a continuous range has none that could be tried here."""
        if not override.is_sweep_override():
            return [str(override.input_line)]
        if override.is_discrete_sweep():
            return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        return []


def without_plus(override: Override, loader: ConfigLoaderImpl) -> Override:
    """The same word as a plain setting: a `+` before something that is there already says the same."""
    if not (override.is_add() or override.is_force_add()) or override.is_delete():
        return override
    return OverridesParser.create(config_loader=loader).parse_override(str(override.input_line).lstrip("+"))


def exists(config: DictConfig, key: str) -> bool:
    """Whether the dotted `key` is there, its value possibly null or missing."""
    node: Any = config
    for part in key.split("."):
        if isinstance(node, ListConfig):
            if not part.isdigit() or int(part) >= len(node):
                return False
            node = node[int(part)]
        elif isinstance(node, DictConfig) and not node._is_none() and part in node.keys():  # noqa: SIM118, `in` hides ???
            node = node._get_node(part)
        else:
            return False
    return True
