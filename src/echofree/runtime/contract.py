"""contract.json: what an artifact takes and gives, and what runs beside it. Written by the exporter, read here.

Everything that has a shape or a rate stands in it, so that a runtime in another language needs no other source.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from echofree.errors import CheckpointError

FORMAT = 3
NAME = "contract.json"
UNCHECKED, CHECKED, REJECTED = "unchecked", "checked", "rejected"  # before, after the gate


@dataclass
class State:
    """A state of the graph: fed back from output to input each step.

    Attributes:
        name: as the model calls it.
        input, output: names in the graph.
        shape: first axis 1.
    """

    name: str
    input: str
    output: str
    shape: list[int]


@dataclass
class Contract:
    """What `contract.json` holds.

    Attributes:
        target: the exporter's name: onnx, litert ...
        engine: onnxruntime | litert | executorch | tensorrt | none (nothing but the linear stage).
        file: of the graph, in the same folder; "" with engine none.
        sha256: of that file.
        sample_rate: Hz.
        hop_samples: samples in and out per step.
        window_samples: of the transforms beside the graph; 0 when they're inside or there are none.
        latency_samples: by which the stream's output is late.
        kind: spectra | wave | linear.
        split: where each stage runs, in words: front_end, transform, network -> runtime | graph | nowhere.
        signals: what the linear stage hands to a spectra graph, in this order.
        front_end: numbers of the linear stage, or None.
        inputs: name -> shape of what the graph takes beside the states.
        output: name of what it gives beside the states.
        output_shape: its shape.
        states: fed back each step, in the graph's order. They start at zero unless `initial` names a file.
        initial: npz with the states' first values by name, or "".
        precision: float32 | float16 | int8 ...
        status: unchecked | checked | rejected.
        version: of EchoFree.
        source: the checkpoint.
        notes: what else a reader should know.
    """

    target: str
    engine: str
    file: str
    sha256: str
    sample_rate: int
    hop_samples: int
    window_samples: int
    latency_samples: int
    kind: str
    split: dict[str, str]
    signals: list[str]
    front_end: dict[str, Any] | None
    inputs: dict[str, list[int]]
    output: str
    output_shape: list[int]
    states: list[State]
    initial: str = ""
    precision: str = "float32"
    status: str = UNCHECKED
    version: str = ""
    source: str = ""
    notes: list[str] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Writes contract.json, whole or not at all."""
        part = folder / f".{NAME}.part"
        part.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        os.replace(part, folder / NAME)


def read(path: str | os.PathLike[str], allow: tuple[str, ...] = (CHECKED,)) -> tuple[Contract, Path]:
    """The contract of an exported folder (or of the graph's file in it) and that folder.

    Args:
        path: the folder, its contract.json or its graph.
        allow: the statuses accepted.

    Raises:
        CheckpointError: no artifact there, of another format, rejected, or its file isn't the one described.
    """
    given = Path(path)
    folder = given if given.is_dir() else given.parent
    if not (folder / NAME).is_file():
        raise CheckpointError(
            f"{given} is no exported model: there is no {NAME}. Type the folder that python -m echofree.export wrote"
        )
    try:
        content = json.loads((folder / NAME).read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise CheckpointError(f"{folder / NAME} has another format than {FORMAT}: export the checkpoint again")
        content["states"] = [State(**state) for state in content["states"]]
        contract = Contract(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / NAME} can't be read: {error}. Export the checkpoint again") from error
    if contract.status not in allow:
        why = {
            REJECTED: "was rejected: it doesn't agree with its model, see alignment.json beside it",
            UNCHECKED: "was never compared with its model",
        }.get(contract.status, f"has the unknown status {contract.status!r}")
        raise CheckpointError(f"{folder} {why}. Export again: python -m echofree.export checkpoint={contract.source}")
    if contract.file:
        file = folder / contract.file
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, although {NAME} names it")
        if digest(file) != contract.sha256:
            raise CheckpointError(f"{file} isn't the file that was exported and checked: its checksum is another")
    return contract, folder


def digest(file: Path) -> str:
    """sha256 of a file."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
