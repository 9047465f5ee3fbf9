"""Open groups become objects: `_target_` names a class, the other keys are its keywords.

The class is found and its signature read before anything is built, so that a misspelt keyword, a missing one or a value
of a wrong type is told with its place, all of them together. Hydra's own `instantiate` stops at the first, halfway
through building, and accepts `+model.typo=1` until then.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from echofree.config import search
from echofree.config.frozen import freeze
from echofree.config.override import nearest
from echofree.errors import ConfigError

ROOTS = ("echofree.", "torch.", "experiments.")
LOADER_KEYS = ("num_workers", "prefetch_factor")  # of the data node: read by the loader, not by the source
AROUND_KEYS = ("partition", "sampling", "replay")  # of the data node: what is put around the source, see `around`
SCALARS = (int, float, str, bool)


def build_model(config: DictConfig | Mapping[str, Any]) -> Any:
    """The model of a run config.

    Raises:
        ConfigError: see `instantiate`; also a class that doesn't take the far end.
    """
    node = freeze(config)["model"]
    found = list(problems(node, "model")) or list(other_inputs(node, "model"))
    if found:
        raise ConfigError(found)
    return instantiate(node, "model")


def build_data(config: DictConfig | Mapping[str, Any], training: bool = False) -> Any:
    """The data source of a run config; the loader's keys of that node are left to the loader.

    Args:
        training: with what the run puts around it, see `around`.
    """
    plain = freeze(config)
    source = instantiate(_source(plain["data"]), "data")
    return around(source, plain) if training else source


def around(source: Any, plain: Mapping[str, Any]) -> Any:
    """What the keys of `AROUND_KEYS` make of a source.

    Raises:
        ConfigError: old data that isn't named, or can't be found.
    """
    source = _shaped(source, plain)
    replay, guard = plain["data"].get("replay") or {}, plain.get("checkpoint", {}).get("guard", {})
    share = float(replay.get("share") or 0.0)
    if share or guard.get("max_drop") is not None:
        from echofree.config.frozen import load
        from echofree.data.replay import Replay
        from echofree.inherit import run_dir_of

        run = replay.get("run") or plain.get("init_from")
        if not run:
            raise ConfigError(
                "data.replay mixes in the data of another run, and none is named. Type: data.replay.run=<run directory>"
            )
        old = freeze(load(run_dir_of(run)))
        old["data"] = {**old["data"], "sample_rate": plain["data"].get("sample_rate", old["data"].get("sample_rate"))}
        source = Replay(source, build_data(old), share, int(plain.get("seed", 0)))
    return source


def build_task(config: DictConfig | Mapping[str, Any]) -> Any:
    """The task of a run config, handed the loss that the group `loss` describes."""
    plain = freeze(config)
    return instantiate(plain["task"], "task", loss=instantiate(plain["loss"], "loss"))


def check(config: DictConfig | Mapping[str, Any]) -> None:
    """Compares all open groups with what they name, which imports it (and so mostly torch). Then builds loss and task,
    which is cheap, for the complaints of their constructors; model and data are not built.

    Raises:
        ConfigError: all problems of model, data, loss, task and export.
        MissingExtra: a metric or an export whose package isn't installed.
    """
    plain = freeze(config)
    found = list(problems(plain["model"], "model")) or list(other_inputs(plain["model"], "model"))
    found += problems(_source(plain["data"]), "data")
    found += problems(plain["loss"], "loss")
    found += problems(plain["task"], "task", ("loss",))
    targets = plain.get("export", {}).get("targets", {})
    for name, target in targets.items():
        found += problems(target, f"export.targets.{name}")
    if found:
        raise ConfigError(found)
    build_task(plain)
    if targets:
        from echofree.export.run import build_exporters

        build_exporters(targets)


def _shaped(source: Any, plain: Mapping[str, Any]) -> Any:
    """`data.partition` and `data.sampling`: their other keys are looked at once `by` or `how` is given."""
    from echofree.data import partition, sampling
    from echofree.data.shaped import Shaped

    seed = int(plain.get("seed", 0))
    parts, drawn = (dict(plain["data"].get(key) or {}) for key in ("partition", "sampling"))
    chosen = partition.Settings(**parts, seed=seed) if parts.get("by") else None
    how = sampling.Settings(**drawn, seed=seed) if drawn.get("how") else None
    return source if chosen is None and how is None else Shaped(source, chosen, how)


def instantiate(node: Mapping[str, Any] | DictConfig, path: str, **extra: Any) -> Any:
    """Builds what `node` describes, nested nodes first.

    Args:
        node: `_target_` and keywords; values may again be such nodes, or lists and mappings of them.
        path: where it stands in the config, for error texts.
        extra: keywords that the program hands in beside those of the node.

    Raises:
        ConfigError: all problems of the node, before anything is built; or the constructor's own.
    """
    plain = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
    found = list(problems(plain, path, tuple(extra)))
    if found:
        raise ConfigError(found)
    return _build(plain, extra)


def _build(value: Any, extra: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        built = {str(key): _build(item, {}) for key, item in value.items() if key != "_target_"}
        return locate(str(value["_target_"]), "")(**built, **extra) if "_target_" in value else built
    if isinstance(value, list):
        return [_build(item, {}) for item in value]
    return value


def _source(data: Any) -> Any:
    """The node without what isn't the source's."""
    apart = (*LOADER_KEYS, *AROUND_KEYS)
    return {key: value for key, value in data.items() if key not in apart} if isinstance(data, Mapping) else data


def locate(target: str, path: str) -> Callable[..., Any]:
    """The class or function with this dotted name.

    Raises:
        ConfigError: not under one of `ROOTS`, no such module or name, or its import failed.
    """
    where = f"{path}._target_={target}"
    if not target.startswith(ROOTS):
        raise ConfigError(
            f"{where}: only names under {', '.join(ROOTS)} are built. Put your own module into experiments/ and type "
            f"experiments.<module>.<class>"
        )
    if target.startswith("experiments."):
        for root in search.import_roots():
            if root not in sys.path:
                sys.path.append(root)
    module_name, _, name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise ConfigError(f"{where}: there is no module {error.name!r}{_place(target)}") from error
        raise ConfigError(
            f"{where}: {module_name} needs the package {error.name!r}, which isn't installed. "
            f"Type: pip install {error.name}"
        ) from error
    except (ImportError, SyntaxError) as error:
        raise ConfigError(f"{where}: importing {module_name} failed ({type(error).__name__}: {error})") from error
    found = getattr(module, name, None)
    if not callable(found):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = nearest(name, public)
        hint = f"Type: {path}._target_={module_name}.{near}" if near else f"It has: {', '.join(sorted(public)[:12])}"
        raise ConfigError(f"{where}: {module_name} has no class {name!r}. {hint}")
    return typing.cast("Callable[..., Any]", found)


def _place(target: str) -> str:
    if not target.startswith("experiments."):
        return ""
    folders = ", ".join(str(folder) for folder in search.experiment_dirs()) or "no folder experiments/ here"
    return f" (looked in: {folders}). The folder must be named experiments; it is found beside the command you type"


def problems(node: Any, path: str, extra: tuple[str, ...] = ()) -> Iterator[str]:
    """What is wrong with a node, nested ones included. Nothing is built.

    Args:
        node: plain containers.
        path: where the node stands.
        extra: names of keywords that the program will hand in.
    """
    if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
        yield f"{path} has no _target_: its YAML must name the class to build, such as _target_: experiments.my.Model"
        return
    yield from _nested(node, path)
    try:
        function = locate(node["_target_"], path)
        parameters = inspect.signature(function).parameters
    except ConfigError as error:
        yield from error.problems
        return
    except ValueError:  # a class written in C shows no signature: its own complaint has to do
        return
    given = {str(key): value for key, value in node.items() if key != "_target_"}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    hints = _hints(function)
    for key, value in given.items():
        if key in extra:
            yield f"{path}.{key} is handed in by the program and can't be set. Type: ~{path}.{key}"
        elif key not in names and not open_ended:
            near = nearest(key, [name for name in names if name not in extra])
            yield (
                f"{path}.{key}={value}: {node['_target_']} takes no {key!r}. "
                + (f"Type: {path}.{near}={value}" if near else f"It takes: {', '.join(names) or 'nothing'}")
            )
        elif key in hints and not fits(value, hints[key]):
            yield f"{path}.{key}={value}: {node['_target_']} wants {wants(hints[key])}"
    for name in extra:
        if name not in names and not open_ended:
            yield f"{path}: {node['_target_']} must take the keyword {name!r}, which the program hands in"
    for name in names:
        if parameters[name].default is inspect.Parameter.empty and name not in given and name not in extra:
            yield f"{path}.{name} is not given, and {node['_target_']} needs it. Type: +{path}.{name}=..."


def other_inputs(node: Mapping[str, Any], path: str) -> Iterator[str]:
    """Whether a model isn't called with a microphone and a far end, such as a noise suppressor that hears only one
    signal.

    Args:
        node: without `problems`.
        path: where it stands.
    """
    target = str(node["_target_"])
    function = locate(target, path)
    for name, inputs in (("forward", ("mic", "far")), ("step", ("mic", "far", "state"))):
        method = getattr(function, name, None) if isinstance(function, type) else None
        if method is None:
            continue
        signature = inspect.signature(method)
        try:
            signature.bind(None, *inputs)
        except TypeError:
            given = ", ".join(inputs)
            details = ", details=False" if name == "forward" else ""
            yield (
                f"{path}._target_={target}: its {name}{signature} can't be given {given}. An echo canceller hears two "
                f"signals: write {name}(self, {given}{details}), see echofree.contracts.Model"
            )


def _nested(value: Any, path: str) -> Iterator[str]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, Mapping) and "_target_" in item:
            yield from problems(item, f"{path}.{key}")
        else:
            yield from _nested(item, f"{path}.{key}")


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function.__init__ if isinstance(function, type) else function)  # type: ignore[misc]
    except (NameError, TypeError, AttributeError):  # names imported for type checkers only: such hints can't be read
        return {}


def fits(value: Any, annotation: Any) -> bool:
    """Whether a config value suits a keyword. Judges numbers, texts, truth values, null, choices and unions of those;
    anything else is left to the constructor."""
    if annotation is type(None) or annotation is None:
        return value is None
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in typing.get_args(annotation))
    if origin is typing.Literal:
        return value in typing.get_args(annotation)
    if annotation not in SCALARS:
        return value is not None or annotation in (Any, inspect.Parameter.empty, object)
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)


def wants(annotation: Any) -> str:
    """`annotation` in words."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(wants(part) for part in typing.get_args(annotation))
    if origin is typing.Literal:
        return " | ".join(str(choice) for choice in typing.get_args(annotation))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))
