"""How the ranks of a run are laid out: along which axes, how many along each. Plain numbers, no torch.

Axes, outermost first; ranks beside each other on the innermost one talk most, so they should share a machine:
    replicate  whole copies of what `data` shares out (fsdp only)
    data       ranks that read different clips; under fsdp they share out the weights too
    pipeline   ranks that hold different layers
    tensor     ranks that hold different parts of the same layers
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from echofree.errors import ConfigError

AXES = ("replicate", "data", "pipeline", "tensor")
OWN = {"ddp": "data", "fsdp": "data", "tensor": "tensor", "pipeline": "pipeline"}  # where all ranks go by default
ALLOWED = {
    "ddp": ("data",),
    "fsdp": ("replicate", "data", "tensor"),
    "tensor": ("data", "tensor"),
    "pipeline": ("data", "pipeline"),
}


def asked(mesh: Any) -> dict[str, int]:
    """`dist.mesh` -> the axes that it names."""
    return {axis: int(count) for axis in AXES if (count := getattr(mesh, axis))}


def axes(name: str, mesh: Mapping[str, int], size: int) -> dict[str, int]:
    """`dist.name`, the axes that `dist.mesh` names and the number of ranks -> ranks along each axis, outermost first.

    Axes of one rank are left out, but for the strategy's own; one axis that isn't named (its own, or data) takes the
    rest.

    Raises:
        ConfigError: an axis that this strategy has not, or numbers whose product isn't the number of ranks.
    """
    found = problems(name, mesh)
    if found:
        raise ConfigError(found)
    own, given = OWN[name], dict(mesh)
    product = math.prod(given.values())
    opened = next((axis for axis in (own, "data") if axis not in given), None)
    if opened is not None and size % product == 0:
        given[opened] = size // product
        product = size
    shown = _show(mesh)
    if product != size:
        raise ConfigError(
            f"dist.mesh={shown} takes {product} ranks or a multiple of it, but there are {size}. "
            f"Type dist.num_procs={product * max(1, size // product)}, or another dist.mesh"
        )
    if name != "ddp" and given[own] == 1 and size > 1:
        raise ConfigError(f"dist.mesh={shown}: {own} is 1, so dist={name} would share out nothing. Type dist=ddp")
    kept = {axis: given[axis] for axis in AXES if given.get(axis, 1) > 1 or axis == own}
    if len(kept) > 2:
        raise ConfigError(f"dist.mesh={shown} has three axes; two are possible. Leave one out")
    return kept


def problems(name: str, mesh: Mapping[str, int]) -> list[str]:
    """What is wrong with `mesh` whatever the number of ranks."""
    found = []
    for axis in mesh:
        if axis not in ALLOWED.get(name, ()):
            allowed = ", ".join(ALLOWED.get(name, ())) or "none"
            why = f"dist={name} has the axes {allowed}"
            other = next((kind for kind, names in ALLOWED.items() if set(mesh) <= set(names)), None)
            remedy = f"Type dist={other}" if other else "Leave it out"
            found.append(f"dist.mesh={_show(mesh)}: there is no axis {axis!r} here; {why}. {remedy}")
    return found


def data_size(layout: Mapping[str, int]) -> int:
    """Ranks that read different clips."""
    return layout.get("replicate", 1) * layout.get("data", 1)


def _show(mesh: Mapping[str, int]) -> str:
    return "{" + ",".join(f"{axis}:{count}" for axis, count in mesh.items()) + "}"
