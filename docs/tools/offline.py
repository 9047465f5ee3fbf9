"""Exit code 1 when a built page loads something from elsewhere: scripts, styles, pictures, fonts.

python docs/tools/offline.py build/site
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# what a browser fetches by itself; links that a person may click are no loads
LOADS = re.compile(
    r"""<(?:script|img|iframe|source|audio|video|embed)\b[^>]*?\bsrc=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preload|preconnect|icon|modulepreload)\b)[^>]*?\bhref=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|url\(["']?((?:https?:)?//[^"')\s]+)""",
    re.IGNORECASE,
)


def loads(site: Path) -> list[str]:
    """`page: address` of everything that would be fetched from another host."""
    found = []
    for path in sorted([*site.rglob("*.html"), *site.rglob("*.css"), *site.rglob("*.svg")]):
        for match in LOADS.finditer(path.read_text(encoding="utf-8")):
            found.append(f"{path.relative_to(site)}: {next(filter(None, match.groups()))}")
    return found


if __name__ == "__main__":
    outside = loads(Path(sys.argv[1]))
    print("\n".join(outside) or f"{sys.argv[1]} loads nothing from elsewhere")
    sys.exit(1 if outside else 0)
