"""One readable line per record. The prefix of the log says rank, epoch and step already, so the line doesn't."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from echofree.logger.record import PLACE
from echofree.progress import number

# What a train record shows, in this order: key, format of the value. Keys that aren't here follow by name.
TRAIN = {
    "loss": "loss {:.4g}",
    "lr": "lr {:.3g}",
    "grad_norm": "grad norm {:.3g}",
    "step_s": "{:.3g} s/step",
    "samples_per_s": "{:.3g} clips/s",
    "audio_s_per_s": "{:.3g} s audio/s",
    "data_wait_share": "waiting for data {:.0%}",
    "peak_mem_mb": "peak {:.0f} MB",
}


class ConsoleLogger:
    """Writes a line for every record.

    Args:
        write: takes one line without its end. `print` passes through the streams of the rank's log.
    """

    def __init__(self, write: Callable[[str], None] = print):
        self.write = write

    def start(self, run: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Nothing to say: the banner and the config are printed by those who know them."""

    def log(self, record: Mapping[str, Any]) -> None:
        self.write(line(record))

    def finish(self, status: str) -> None:
        """Nothing to close."""


def line(record: Mapping[str, Any]) -> str:
    """A record as text. Missing values are left out, undefined ones (None) shown as "-"; mappings are left out."""
    head = " ".join(str(record[key]) for key in ("kind", "split") if record.get(key))
    formats = TRAIN if record.get("kind") == "train" else {}
    first = [form.format(record[key]) for key, form in formats.items() if record.get(key) is not None]
    rest = [
        f"{key} {number(value)}"
        for key, value in record.items()
        if key not in PLACE and key not in formats and not isinstance(value, (Mapping, list, tuple))
    ]
    return "  ".join([head, *first, *rest])
