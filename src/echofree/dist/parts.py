"""Checkpoint files of which every rank writes its own part (torch.distributed.checkpoint).

Nothing is gathered: a rank writes the shards it holds into one file of its own, of what several hold alike one rank
writes it, and a table of contents says where each piece is. Whoever reads takes the pieces it needs, however many ranks
wrote them. The exchanges are those of `World`, so that a rank that fails is told to the others rather than waited for.

The table is a pickle by torch's convention; it is read by a loader that knows the handful of classes in it and runs
nothing else.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from echofree.dist.world import World

TABLE = ".metadata"
# What torch's table of contents of tensors is made of; nothing else may be named there, BytesStorageMetadata least of
# all: what it stands for would be unpickled as well.
KNOWN = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex", "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}  # fmt: skip


def split(tree: Mapping[str, Any], path: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Nested mappings -> (place -> tensor, all the rest, with None where a tensor was)."""
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for key, value in tree.items():
        place = f"{path}/{quote(key)}" if path else quote(key)
        rest[key] = None
        if isinstance(value, Mapping):
            inner, rest[key] = split(value, place)
            tensors |= inner
        elif not isinstance(value, Tensor):
            rest[key] = value
        elif not value.is_meta:  # else another rank's
            tensors[place] = value
    return tensors, rest


def join(tensors: Mapping[str, Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    """The reverse of `split`."""
    for place, tensor in tensors.items():
        node = rest
        *path, last = (word.replace("%2F", "/").replace("%25", "%") for word in place.split("/"))
        for key in path:
            node = node.setdefault(key, {})
        node[last] = tensor
    return rest


def quote(key: str) -> str:
    """A name as one step of a place."""
    return key.replace("%", "%25").replace("/", "%2F")


class Writing:
    """One save. Every rank makes one, which shares out who writes what.

    Args:
        folder: where the files go; rank 0 has made it.
        tensors: place -> this rank's part (a DTensor), or a whole one. What several ranks have of one tensor is equal.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor], world: World):
        # plans may be cached by class, which would mix up several models in one process
        self._planner = DefaultSavePlanner(flatten_state_dict=False, enable_plan_caching=False)
        self._writer = FileSystemWriter(folder, sync_files=False)
        self._planner.set_up_planner(dict(tensors), is_coordinator=world.is_first)
        self._writer.set_up_storage_writer(world.is_first, rank=world.rank)
        plans = world.gather(self._planner.create_local_plan())
        self._table = Metadata({})
        if world.is_first:
            plans, self._table = self._planner.create_global_plan(plans)
            plans = self._writer.prepare_global_plan(plans)
        self._plan = self._planner.finish_plan(world.from_first(plans)[world.rank])
        self.file = f"__{world.rank}_0.distcp"  # named by the plan

    def write(self) -> list[WriteResult]:
        """Writes this rank's file, if it has anything to write; -> where each piece came to lie.

        Raises:
            OSError: the file system refused.
        """
        if not self._plan.items:
            return []
        try:
            return self._writer.write_data(self._plan, self._planner).wait()
        except RuntimeError as error:  # torch's zip writer stumbles over a full disk a second time, while it closes
            why = error.__context__ if isinstance(error.__context__, OSError) else error
            raise OSError(f"{self.file}: {why}") from error

    def finish(self, results: list[list[WriteResult]]) -> Path:
        """On rank 0, with what every rank's `write` returned: writes the table of contents; -> where it is."""
        self._writer.finish(self._table, results)
        return Path(self._writer.path) / TABLE


# --- reading ----------------------------------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a table of contents")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As torch's, without running what a stranger may have put there.

        Raises:
            UnpicklingError: there is something else than tensors.
        """
        table = _Unpickler(io.BytesIO((Path(self.path) / TABLE).read_bytes())).load()
        if not isinstance(table, Metadata):
            raise pickle.UnpicklingError("it is no table of contents")
        for place in table.storage_data.values():
            if Path(place.relative_path).name != place.relative_path:
                raise pickle.UnpicklingError(f"{place.relative_path} is no file of this checkpoint")
        return table


def outline(folder: Path) -> dict[str, Tensor]:
    """Place -> a tensor of the right shape and type without content, for all that `folder` holds."""
    table = _Reader(folder).read_metadata().state_dict_metadata
    return {
        name: torch.empty(facts.size, dtype=facts.properties.dtype, device="meta")
        for name, facts in table.items()
        if isinstance(facts, TensorStorageMetadata)
    }


def read(folder: Path, targets: Mapping[str, Tensor]) -> None:
    """Fills `targets` in place, each with the part that it is (a DTensor) or whole; no exchange.

    Raises:
        RuntimeError, ValueError: a name is missing or has another shape.
    """
    reader, planner = _Reader(folder), DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    table = reader.read_metadata()
    planner.set_up_planner(dict(targets), table, is_coordinator=True)
    reader.set_up_storage_reader(table, is_coordinator=True)
    plan = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])[0]
    with torch.no_grad():
        reader.read_data(planner.finish_plan(plan), planner).wait()
