"""The page: a skeleton, a style sheet, a script, and what they show as JSON in one file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from html import escape
from importlib import resources
from typing import Any

SKELETON = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src \
'unsafe-inline'; img-src data:; media-src data: blob:">
<title>{title} · EchoFree</title>
<link rel="icon" href="data:,">
<style>
{style}
</style>
</head>
<body>
<noscript><p class="noscript">This page draws itself: it needs JavaScript. The numbers are in metrics.jsonl and \
evaluate/*/scores.json.</p></noscript>
<div id="page"></div>
<script type="application/json" id="data">{data}</script>
{scripts}
</body>
</html>
"""
SCRIPTS = ("chart.js", "sound.js", "view.js")


def page(contents: Mapping[str, Any]) -> str:
    """-> the whole file."""
    folder = resources.files("echofree.report")
    scripts = [f"<script>\n{(folder / name).read_text(encoding='utf-8')}</script>" for name in SCRIPTS]
    return SKELETON.format(
        title=escape(str(contents["title"])),
        style=(folder / "style.css").read_text(encoding="utf-8"),
        data=embedded(contents),
        scripts="\n".join(scripts),
    )


def embedded(contents: Mapping[str, Any]) -> str:
    """JSON that can stand inside a script element: no tag can end it, no NaN is in it."""
    text = json.dumps(plain(contents), ensure_ascii=False, separators=(",", ":"), default=str, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def plain(value: Any) -> Any:
    """Numbers that JSON doesn't have become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value
