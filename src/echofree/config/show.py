"""The effective config as a log begins with it: complete, with what the command line changed marked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]
from omegaconf import DictConfig

from echofree.config.frozen import freeze

MARK = "  # command line"


def effective(config: DictConfig | Mapping[str, Any], changed: Collection[str]) -> str:
    """YAML of the whole resolved config; it reads back equal.

    Args:
        config: a run config.
        changed: dotted keys to be marked, such as "optim.lr".
    """
    return "\n".join(_lines(freeze(config), "", 0, changed)) + "\n"


def _lines(node: Mapping[str, Any], path: str, depth: int, changed: Collection[str]) -> Iterator[str]:
    for name, value in node.items():
        key = f"{path}.{name}" if path else str(name)
        indent = "  " * depth
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:{MARK if key in changed else ''}"
            yield from _lines(value, key, depth + 1, changed)
        else:
            yield f"{indent}{name}: {_scalar(value)}{MARK if key in changed else ''}"


def _scalar(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
