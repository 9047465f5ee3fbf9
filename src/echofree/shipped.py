"""Trained models that come with the package, by name: folders like run directories, under echofree/weights.

Wherever a verb takes a run directory it takes such a name too. Nothing is ever written into the package: what a verb
makes of a shipped model goes below `outputs/` where the user stands.
"""

from __future__ import annotations

import os
from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
CARD = "MODEL_CARD.md"


def names() -> list[str]:
    """What there is."""
    return sorted(path.parent.name for path in WEIGHTS.glob(f"*/{CARD}"))


def named(path: str | os.PathLike[str]) -> Path | None:
    """The folder of the model of that name; None: it's no such name, or something of the user's has it."""
    text = os.fspath(path)
    return WEIGHTS / text if not Path(text).exists() and text in names() else None


def place(run: Path) -> Path:
    """Where a verb puts what it makes of a run's weights: into the run directory, unless that is the package's."""
    return Path("outputs") / run.name if WEIGHTS in run.parents else run
