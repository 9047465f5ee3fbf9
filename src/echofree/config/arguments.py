"""The few flags that train takes beside `key=value` words; everything else that begins with a dash is translated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from echofree.config.classic import translate

# flag -> (name, choices: None takes any value, () takes none)
_FLAGS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "--help": ("help", ()),
    "-h": ("help", ()),
    "--multirun": ("multirun", ()),
    "-m": ("multirun", ()),
    "--resolve": ("resolve", ()),
    "--hydra-help": ("hydra_help", ()),
    "--cfg": ("cfg", ("job", "hydra", "all")),
    "-c": ("cfg", ("job", "hydra", "all")),
    "--info": ("info", ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")),
    "-i": ("info", ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")),
    "--package": ("package", None),
    "-p": ("package", None),
    "--config-name": ("config_name", None),
    "-cn": ("config_name", None),
    "--config-dir": ("config_dir", None),
    "-cd": ("config_dir", None),
}
_OPTIONAL_VALUE = {"info": "all"}
# Other spellings of keys: `async` is a word of Python's own, `resume` holds a path and can't have keys below it.
_SAME = {"checkpoint.async": "checkpoint.async_save", "resume.allow": "resume_allow"}


@dataclass
class Flags:
    """A command line taken apart.

    Attributes:
        words: the `key=value` words.
        problems: what is wrong with the flags.
        hint: after foreign flags, the whole line spelled right; else "".
        cfg, info: what to show instead of running, or None.
        package: part of the config that `--cfg` shows.
    """

    words: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    hint: str = ""
    help: bool = False
    multirun: bool = False
    resolve: bool = False
    hydra_help: bool = False
    cfg: str | None = None
    info: str | None = None
    package: str | None = None
    config_name: str = "train"
    config_dir: str | None = None

    @property
    def show(self) -> bool:
        return bool(self.cfg or self.info or self.hydra_help)


def parse_flags(argv: Sequence[str]) -> Flags:
    """Takes our own and Hydra's flags out of `argv`; the rest goes to `classic.translate`. Never raises."""
    flags, rest, words = Flags(), [], list(argv)
    while words:
        word = words.pop(0)
        name, has_value, value = word.partition("=")
        if name not in _FLAGS or not word.startswith("-"):
            if has_value and name.startswith("launcher."):
                word = f"hydra.{word}"
            rest.append(f"{_SAME[name]}={value}" if has_value and name in _SAME else word)
            continue
        target, choices = _FLAGS[name]
        if choices == ():
            setattr(flags, target, True)
            if has_value:
                flags.problems.append(f"{word}: takes no value. Type: {name}")
            continue
        if not has_value:
            takes = bool(words) and not words[0].startswith("-") and (choices is None or words[0] in choices)
            value = words.pop(0) if takes else _OPTIONAL_VALUE.get(target, "")
        if not value or (choices is not None and value not in choices):
            flags.problems.append(f"{word}: needs a value" + (f": {', '.join(choices)}" if choices else ""))
        else:
            setattr(flags, target, value)
    translation = translate(rest)
    # flags go on as the words that they mean, so that their values are checked, too
    flags.words = [word for word in translation.spelled if word != "-m" and not word.endswith(("=...", "=NAME"))]
    flags.problems += translation.problems
    if translation.problems and translation.spelled:
        flags.hint = f"The whole line in EchoFree's spelling: python -m echofree.train {' '.join(translation.spelled)}"
    return flags
