"""The run config as it is written, read back and told apart: plain containers, complete, resolved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped,unused-ignore]

from echofree.config.override import flat, nearest
from echofree.config.schema import RunConfig
from echofree.errors import ConfigError

# Where a run writes and how it looks on the screen: no part of what is computed, so no part of the hash.
OPERATIONAL = ("name", "output_root", "resume", "resume_allow", "logger", "export")


def freeze(config: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Plain dicts, lists, strings and numbers: interpolations resolved, enums as their names. What config.yaml holds.

    Raises:
        ConfigError: a value is missing or an interpolation leads nowhere.
    """
    node = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    try:
        plain = OmegaConf.to_container(node, resolve=True, throw_on_missing=True, enum_to_str=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}. Type: {error.full_key}=...") from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def thaw(plain: Mapping[str, Any], source: str = "config.yaml") -> DictConfig:
    """The typed run config of a frozen one.

    Args:
        plain: what `freeze` gave, or the contents of a config.yaml.
        source: its file, for error texts.

    Raises:
        ConfigError: keys that this version doesn't know, or values of a wrong type; all of them.
    """
    schema = OmegaConf.structured(RunConfig)
    config: DictConfig = schema.copy()
    problems = []
    known = list(flat(schema))
    for key, value in plain.items():
        for path, leaf in _typed_leaves(str(key), value, schema):
            try:
                OmegaConf.update(config, path, leaf, merge=False)
            except OmegaConfBaseException as error:
                near = nearest(path, known)
                exists = path in known
                problems.append(
                    f"{source}: {path}={leaf} "
                    + (
                        f"isn't valid ({str(error).splitlines()[0]})"
                        if exists
                        else "is a key this version doesn't know"
                    )
                    + (f". Nearest: {near}" if near and not exists else "")
                    + ". Correct the file, or use the version of EchoFree named in run.json beside it"
                )
    problems += [f"{source}: {key} is missing" for key in sorted(OmegaConf.missing_keys(config)) if "." not in key]
    if problems:
        raise ConfigError(problems)
    OmegaConf.set_struct(config, True)
    return config


def _typed_leaves(key: str, value: Any, schema: DictConfig) -> list[tuple[str, Any]]:
    """The leaves of a typed group one by one, so that each wrong one is told; anything else as it is."""
    node = OmegaConf.select(schema, key, throw_on_missing=False)
    if isinstance(value, Mapping) and OmegaConf.is_dict(node):
        return [leaf for name, inner in value.items() for leaf in _typed_leaves(f"{key}.{name}", inner, schema)]
    return [(key, value)]


def dump(config: DictConfig | Mapping[str, Any]) -> str:
    """The text of config.yaml."""
    return OmegaConf.to_yaml(OmegaConf.create(freeze(config)))


def load(run_dir: Path) -> DictConfig:
    """The typed config of a run directory.

    Raises:
        ConfigError: there is none, or this version can't read it.
    """
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ConfigError(
            f"{run_dir} is no run directory: it has no config.yaml. Type the path of one, such as "
            f"outputs/tiny/<date_time>"
        )
    # OmegaConf's reader, since plain YAML 1.1 takes 1e-05 for a word
    try:
        plain = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, YAMLError) as error:
        raise ConfigError(f"{path} can't be read: {' '.join(str(error).split())}") from error
    if not isinstance(plain, dict):
        raise ConfigError(f"{path} is no config: a mapping of keys was expected")
    return thaw({str(key): value for key, value in plain.items()}, str(path))


def digest(config: DictConfig | Mapping[str, Any]) -> str:
    """12 hex digits over the complete config, defaults included, without what doesn't change the result.

    Two runs with equal digests computed the same thing; any default that changes later changes the digest too.
    """
    plain = freeze(config) if isinstance(config, DictConfig) else dict(config)
    kept = {key: value for key, value in plain.items() if key not in OPERATIONAL}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:12]
