"""What mkdocs calls while it builds: writes the generated pages first."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import generate


def on_pre_build(config: Any) -> None:
    """Pages that are made from the source; written only when they change, so that `mkdocs serve` comes to rest."""
    generate.write(Path(config["docs_dir"]))
