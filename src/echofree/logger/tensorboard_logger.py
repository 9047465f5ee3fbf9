"""Scalars for TensorBoard in `tensorboard/` of the run directory; look at them with `tensorboard --logdir outputs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echofree.errors import MissingExtra
from echofree.logger.record import scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger:
    """Writes every number of every record at the record's step.

    The files open with the first record: after a resume that is where the curve goes on, and what an earlier attempt
    had written at or beyond that step is marked as superseded (`purge_step`), so no step is drawn twice.

    Args:
        run_dir: the run directory.

    Raises:
        MissingExtra: TensorBoard isn't installed.
    """

    def __init__(self, run_dir: Path):
        if find_spec("tensorboard") is None:
            raise MissingExtra("tensorboard", "tensorboard", "logger=tensorboard")
        self.folder = run_dir / "tensorboard"
        self.config = ""
        self.writer: SummaryWriter | None = None

    def start(self, run: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self.config = json.dumps(config, indent=2, default=str)

    def log(self, record: Mapping[str, Any]) -> None:
        step = int(record["step"])
        if self.writer is None:
            self.writer = self._open(step)
        for name, value in scalars(record).items():
            self.writer.add_scalar(name, value, step)

    def finish(self, status: str) -> None:
        if self.writer is not None:
            self.writer.close()

    def _open(self, step: int) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        earlier = self.folder.is_dir() and any(self.folder.glob("events.out.*"))
        writer = SummaryWriter(str(self.folder), purge_step=step if earlier else None, flush_secs=30)
        if not earlier:
            writer.add_text("config", "\n".join("    " + text for text in self.config.splitlines()), step)
        return writer
