"""The ranks as a grid: torch's device mesh for the axes of `config.layout`, and this rank's place in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from echofree.config import layout
from echofree.config.schema import DistConfig
from echofree.dist.world import World


@dataclass(frozen=True)
class Grid:
    """This rank among the others.

    Attributes:
        mesh: torch's mesh, its dimensions named by the axes.
        axes: ranks along each axis, outermost first.
        place: this rank's coordinate along each axis.
        device: of the collectives.
    """

    mesh: DeviceMesh
    axes: Mapping[str, int]
    place: Mapping[str, int]
    device: torch.device

    @property
    def data_size(self) -> int:
        return layout.data_size(self.axes)

    @property
    def data_rank(self) -> int:
        return self.place.get("replicate", 0) * self.axes.get("data", 1) + self.place.get("data", 0)

    def along(self, *names: str) -> DeviceMesh:
        """The part of the mesh with these axes, or as many of them as there are."""
        there = tuple(name for name in names if name in self.axes)
        if there == tuple(self.axes):
            return self.mesh
        part: DeviceMesh = self.mesh[there if len(there) > 1 else there[0]]
        return part

    def group(self, axis: str) -> Any:
        """The process group of the ranks that differ from this one along `axis` alone; None without such an axis."""
        return self.mesh.get_group(axis) if axis in self.axes else None


def build_grid(config: DistConfig, world: World, device: torch.device) -> Grid:
    """The grid that `dist.name` and `dist.mesh` ask for; every rank calls it, since it makes process groups.

    Raises:
        ConfigError: the axes don't fit the number of ranks.
    """
    axes = layout.axes(config.name.value, layout.asked(config.mesh), world.size)
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every rank has its place"
    return Grid(mesh, axes, dict(zip(axes, coordinate, strict=True)), device)
