"""The last thing a training does: the best weights on test clips, beside the microphone and the linear filter.

All ranks take part, each with its own share of the clips; rank 0 writes the files and the table.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from echofree import checkpoint
from echofree.contracts import Clip, Dataset, DataSource
from echofree.dist.world import World
from echofree.rundir import RunDir

log = logging.getLogger("echofree")


class Share:
    """A contiguous part of a dataset: rank `rank` of `size`."""

    def __init__(self, dataset: Dataset, rank: int, size: int):
        self.dataset, self.sample_rate = dataset, dataset.sample_rate
        total = len(dataset)
        self.first, self.stop = total * rank // size, total * (rank + 1) // size
        # the scored samples [first, stop) of a clip, where the dataset has them
        self.stretch = self._stretch if hasattr(dataset, "stretch") else None

    def __len__(self) -> int:
        return self.stop - self.first

    def item(self, index: int, epoch: int) -> Clip:
        return self.dataset.item(self.first + index, epoch)

    def _stretch(self, index: int) -> tuple[int, int]:
        first, stop = self.dataset.stretch(self.first + index)  # type: ignore[attr-defined]
        return int(first), int(stop)


def write_page(run: RunDir) -> None:
    """The run's report.html. A run isn't worse for the want of a page: what fails is told, nothing else."""
    from echofree.report import write_report

    try:
        path = write_report([run.folder])
    except Exception as error:
        log.warning("no report: %s: %s. Type: python -m echofree.report %s", type(error).__name__, error, run.folder)
    else:
        log.info("report: %s", os.path.relpath(path))


def final_scores(
    config: Any,
    model: Any,
    source: DataSource,
    run: RunDir,
    world: World,
    device: str,
    done: Callable[[int], None] = lambda n: None,
) -> None:
    """Writes evaluate/test/scores.csv and scores.json into the run directory and logs the table.

    Args:
        model: whatever the best checkpoint's weights fit; they are loaded into it.
        done: called with the number of this rank's clips scored since the last call.
    """
    from echofree.config.frozen import freeze
    from echofree.evaluate import add_speed, build_metrics, build_models, callables, protocol_of
    from echofree.listen import write_listening
    from echofree.metric import CORE
    from echofree.score import score, summarise
    from echofree.scorefile import write_scores
    from echofree.scoretable import table, tell
    from echofree.verb import Words

    split = "test"
    dataset = source.split(split)
    if dataset is None or len(dataset) == 0:
        log.info("no final scores: the data has no %s clips", split)
        return
    folder = world.from_first(str(checkpoint.find(run.folder)) if world.is_first else "")
    model.load_state_dict(checkpoint.weights(Path(folder)))
    model.eval()
    rate_hz, names = int(model.sample_rate), list(CORE)
    metrics = build_metrics(names, rate_hz, "whole")
    models = build_models("model", model, ["mic", "linear"], rate_hz, "cpu")
    systems = callables(models, device)
    mine = score(systems, Share(dataset, world.rank, world.size), metrics, done=done)
    rows = [row for part in world.gather(mine) for row in part]
    if not world.is_first:
        return
    summary = summarise(rows, names)
    add_speed(summary, models, dataset, device)
    words = Words({"split": split, "aecmos_cut": "whole", "align": "output", "checkpoint": folder}, [])
    what = {name: name for name in models}
    parts = hasattr(dataset, "stretch")
    about = protocol_of(words, what, freeze(config), source, rows, metrics, rate_hz, parts)
    out = run.folder / "evaluate" / split
    out.mkdir(parents=True, exist_ok=True)
    write_scores(out, rows, summary, about, names)
    write_listening(out, rows, systems, dataset, "model")
    log.info("test clips, the weights of %s:", os.path.basename(folder))
    for line in table(summary, names).splitlines():
        log.info("%s", line)
    tell(rows, summary, out)
