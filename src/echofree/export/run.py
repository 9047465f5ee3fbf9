"""From a model to checked artifacts: write, compare, and only then give the folder its name."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from echofree.errors import ConfigError, EchoFreeError
from echofree.export import gate
from echofree.export.base import Exporter, ExportError, describe
from echofree.export.golden import Reference, Tick, calibration, prepare, ship
from echofree.model.graph import StreamGraph, stream_graph
from echofree.runtime.contract import CHECKED, REJECTED, UNCHECKED, digest

ALIGNMENT = "alignment.json"
Say = Callable[[str], None]


@dataclass
class Outcome:
    """What became of one target.

    Attributes:
        name: of the target.
        folder: where it is: `<root>/<name>`, or `<root>/<name>.rejected`; None when nothing could be written.
        problems: why it was rejected; empty when it passed.
        alignment: what alignment.json holds.
    """

    name: str
    folder: Path | None
    problems: list[str]
    alignment: dict[str, Any]


def build_exporters(targets: Mapping[str, Any]) -> dict[str, Exporter]:
    """The exporters of a config's `export.targets`, everything that they need being there.

    Raises:
        ConfigError: no targets, unknown keywords, values that don't fit.
        MissingExtra, UserError: a package that isn't installed.
    """
    from echofree.config.build import instantiate

    if not targets:
        raise ConfigError("export=none writes nothing. Type: export=onnx, or several: export=[onnx,onnx_int8]")
    exporters = {name: instantiate(node, f"export.targets.{name}") for name, node in targets.items()}
    for exporter in exporters.values():
        exporter.require()
    return exporters


def export(
    model: Any,
    exporters: Mapping[str, Exporter],
    root: Path,
    source: str,
    minutes: float,
    say: Say = print,
    tick: Tick = lambda: None,
) -> list[Outcome]:
    """Writes and checks every target below `root`.

    Args:
        model: in evaluation mode, on the CPU.
        exporters: target name -> exporter.
        root: made when missing.
        source: the checkpoint, for the contract.
        minutes: of the long stream of the gate.
        say: gets a line per target.
        tick: called at least every few seconds.

    Raises:
        CheckpointError: a model that can't stream.
    """
    graph = stream_graph(model)
    for name, exporter in exporters.items():
        describe(model, graph, name, exporter, source)  # its complaints come before the long work
    root.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # steps of one stream are too small to share
    outcomes = []
    try:
        with TemporaryDirectory(prefix="echofree-gate-") as work:
            written = {}
            for name, exporter in exporters.items():
                written[name] = _write(model, graph, name, exporter, root, source)
                tick()
            if not any(isinstance(folder, Path) for folder in written.values()):
                reference = None
            else:
                say(f"comparing with the model over {minutes:g} minutes of audio ...")
                reference = prepare(model, graph, Path(work), minutes, tick)
            for name, exporter in exporters.items():
                folder = written[name]
                if isinstance(folder, ExportError) or reference is None:
                    outcomes.append(Outcome(name, None, [str(folder)], {}))
                else:
                    outcomes.append(_judged(model, graph, name, exporter, folder, root, reference, tick))
                for line in lines(outcomes[-1]):
                    say(line)
    finally:
        torch.set_num_threads(threads)
    return outcomes


def _write(
    model: Any, graph: StreamGraph | None, name: str, exporter: Exporter, root: Path, source: str
) -> Path | ExportError:
    """A temporary folder with the artifact, or why there is none."""
    folder = root / f".{name}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        contract = describe(model, graph, name, exporter, source)
        if graph is not None:
            contract.notes = exporter.write(graph, calibration(model, graph), folder)
            contract.sha256 = digest(folder / contract.file)
            if any(bool(value.any()) for value in graph.initial.values()):
                contract.initial = "initial.npz"
                first: dict[str, Any] = {key: value.numpy() for key, value in graph.initial.items()}
                np.savez(folder / contract.initial, **first)
        contract.save(folder)
    except ExportError as error:
        shutil.rmtree(folder)
        return error
    except BaseException:
        shutil.rmtree(folder)
        raise
    return folder


def _judged(
    model: Any,
    graph: StreamGraph | None,
    name: str,
    exporter: Exporter,
    folder: Path,
    root: Path,
    reference: Reference,
    tick: Tick,
) -> Outcome:
    """Runs the gate over a written folder and gives it its name."""
    from echofree.runtime.contract import read

    contract, _ = read(folder, (UNCHECKED,))
    try:
        ship(model, graph, reference, folder)
        tick()
        try:
            alignment = gate.check(model, graph, contract, exporter, folder, reference, tick)
        except EchoFreeError as error:
            alignment = {"passed": False, "problems": [str(error)]}
        contract.status = CHECKED if alignment["passed"] else REJECTED
        contract.save(folder)
        (folder / ALIGNMENT).write_text(json.dumps(alignment, indent=1) + "\n", encoding="utf-8")
        good, bad = root / name, root / f"{name}.rejected"
        for old in (good, bad) if alignment["passed"] else (bad,):
            shutil.rmtree(old, ignore_errors=True)
        final = good if alignment["passed"] else bad
        folder.replace(final)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Outcome(name, final, alignment["problems"], alignment)


def lines(outcome: Outcome) -> list[str]:
    """What a person should read about a target."""
    if outcome.folder is None:
        return [f"{outcome.name}: NOT WRITTEN: {'; '.join(outcome.problems)}"]
    found = outcome.alignment
    if outcome.problems:
        text = [f"{outcome.name}: REJECTED, {outcome.folder}"]
        text += [f"  - {problem}" for problem in outcome.problems]
        at = found.get("parts_at")
        if at is not None and at["tensor"] is not None:
            text.append(
                f"  with the model's own inputs, step {at['step']} of stream {at['stream']!r} parts at tensor "
                f"{at['tensor']!r}, by {at['difference']:.2g} of its largest value"
            )
        return text
    long, cost = found["takes"]["long"], found["cost"]
    loss = found["quality"]["si_sdr"]["loss_db"]
    quality = "" if loss is None else f", SI-SDR {-loss:+.2f} dB"
    head = (
        f"{outcome.name}: agrees: differs by at most {long['max']:.1e}{quality} over {long['seconds'] / 60:g} minutes"
    )
    figures = (
        f"{found['bytes'] / 1e6:.2f} MB, loads in {cost['load_s']:.2f} s, {cost['hop_us_median']:.0f} us a hop "
        f"(99.9 %: {cost['hop_us_999']:.0f}), real-time factor {cost['real_time_factor']:.4f}"
    )
    return [f"{head}; {figures}: {outcome.folder}"]
