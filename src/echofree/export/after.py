"""What `python -m echofree.train export=...` does at the end: rank 0 exports the best checkpoint, the others wait."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from echofree.errors import ConfigError, EchoFreeError, UserError
from echofree.export.golden import Tick

if TYPE_CHECKING:
    from echofree.dist.world import World
    from echofree.rundir import RunDir

log = logging.getLogger("echofree")


def check_model(model: Any) -> None:
    """Before the training, what would fail only after it.

    Raises:
        ConfigError: a model that can't stream.
    """
    missing = [name for name in ("step", "init_state", "hop_samples", "latency_samples") if not hasattr(model, name)]
    if missing:
        raise ConfigError(
            f"export: {type(model).__name__} has no {' and no '.join(missing)}, so it can't stream and can't be "
            "exported. Write them as echofree.contracts.Model says, or type export=none"
        )


def export_best(settings: Any, run: RunDir, world: World, tick: Tick) -> None:
    """All ranks call it.

    Args:
        settings: the config's `export`.
        run: whose best checkpoint is exported, into its export/.
        world: all ranks learn what came out.
        tick: says that this rank is alive.

    Raises:
        EchoFreeError: on every rank, when an artifact doesn't agree with its model. The checkpoint stays as it is.
    """
    text = world.from_first(_export(settings, run, tick) if world.is_first else "")
    if text:
        raise EchoFreeError(text)


def _export(settings: Any, run: RunDir, tick: Tick) -> str:
    """-> what went wrong, or ""."""
    from echofree import checkpoint
    from echofree.export.run import build_exporters, export

    try:
        folder = checkpoint.find(run.folder)
        model, _ = checkpoint.load_model(folder)
        exporters = build_exporters(settings.targets)
        outcomes = export(model, exporters, run.folder / "export", str(folder), settings.minutes, log.info, tick)
    except UserError as error:
        return f"nothing was exported: {error}"
    bad = [outcome for outcome in outcomes if outcome.problems]
    run.note(exports={outcome.name: "rejected" if outcome in bad else "agrees" for outcome in outcomes})
    if not bad:
        return ""
    names = ", ".join(f"{outcome.name} ({outcome.problems[0]})" for outcome in bad)
    return (
        f"the training is done and its checkpoints are whole, but these exports don't agree with the model: {names}. "
        f"See {run.folder / 'export'}"
    )
