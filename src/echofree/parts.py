"""What a config names, built: the corpus, the model, the task; and whether the ranks can share the model out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from echofree.errors import ConfigError, DataError

if TYPE_CHECKING:
    import torch


@dataclass
class Parts:
    """What a config names: the corpus, the model and the task."""

    source: Any
    model: torch.nn.Module
    task: Any
    parent: dict[str, Any] | None = None  # whose weights the model has
    frozen: list[str] = field(default_factory=list)  # names of the weights that stay


def build(config: Any, again: bool = False) -> Parts:
    """Builds the open groups.

    Args:
        again: a checkpoint of this run will be loaded, so that those of its parent aren't needed any more.

    Raises:
        UserError: a missing folder, no clips, arguments that don't fit together.
    """
    import torch

    from echofree.config.build import build_data, build_model, build_task
    from echofree.inherit import freeze, load_parent, unused

    torch.manual_seed(config.seed)  # the same weights on every rank
    source = build_data(config, training=True)
    train = source.split("train")
    if train is None or len(train) == 0:
        raise DataError(
            "the data has no clips to train on; left out: "
            + "; ".join(f"{what}: {value}" for what, value in source.survey())
            + ". Name another data.root"
        )
    model = build_model(config)
    parent = load_parent(config.init_from, model) if config.init_from and not again else None
    frozen = freeze(model, config.optim.freeze)
    names = [name for name, _ in model.named_parameters()]
    unused([word.rpartition(":")[0] for word in config.optim.lr_by_part], names, "optim.lr_by_part")
    if config.export.targets:
        from echofree.export.after import check_model

        check_model(model)
    task = build_task(config)
    if hasattr(task, "check_model"):
        task.check_model(model)
    return Parts(source, model, task, parent, frozen)


def check_fit(config: Any, model: torch.nn.Module, size: int) -> None:
    """Whether `size` ranks can share the model out as `dist` asks.

    Raises:
        ConfigError: all reasons why not.
    """
    from echofree import recompute
    from echofree.dist import fit

    found = fit.problems(config.dist, model, size)
    if config.train.activation_checkpointing:
        found += recompute.problems(model)
    if found:
        raise ConfigError(found)
