"""Curves as an SVG file, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#8d6a9f", "#edae49", "#00798c", "#6b4226", "#444444")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 760, 240, 78, 34, 34, 18
Points = Sequence[tuple[float, float | None]]


def svg(panels: Sequence[tuple[str, Mapping[str, Points], bool]], footer: str = "") -> str:
    """Panels below each other.

    Args:
        panels: (title, curve by name, whether the values' axis is logarithmic). A value of None, or one that the axis
            can't show, leaves a gap.
        footer: a line at the end.
    """
    names = list(dict.fromkeys(name for _, curves, _ in panels for name in curves))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    legend_rows = -(-len(names) // 3)
    total = len(panels) * (HEIGHT + GAP) + 18 * legend_rows + 40
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" font-family="sans-serif" '
            f'font-size="11"><rect width="{WIDTH}" height="{total}" fill="white"/>'
        )
    ]
    for number, (title, curves, log) in enumerate(panels):
        parts.append(f'<g transform="translate(0 {number * (HEIGHT + GAP)})">{_panel(title, curves, log, colours)}</g>')
    top = len(panels) * (HEIGHT + GAP)
    for i, name in enumerate(names):
        x, y = LEFT + (i % 3) * 220, top + 18 * (i // 3) + 6
        parts.append(
            f'<line x1="{x}" x2="{x + 18}" y1="{y}" y2="{y}" stroke="{colours[name]}" stroke-width="2"/>'
            f'<text x="{x + 24}" y="{y + 4}">{escape(name)}</text>'
        )
    parts.append(f'<text x="{LEFT}" y="{total - 10}" fill="#555">{escape(footer)}</text></svg>')
    return "\n".join(parts)


def _panel(title: str, curves: Mapping[str, Points], log: bool, colours: Mapping[str, str]) -> str:
    shown = {name: [(x, _scale(y, log)) for x, y in points] for name, points in curves.items()}
    xs = [x for points in shown.values() for x, _ in points] or [0.0, 1.0]
    ys = [y for points in shown.values() for _, y in points if y is not None] or [0.0, 1.0]
    low, high = min(ys), max(ys)
    pad = 0.06 * (high - low) or 0.5
    low, high = low - pad, high + pad
    first, last = min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - 20) * (x - first) / (last - first)
        return across, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - low) / (high - low)

    parts = [f'<text x="{LEFT}" y="20" font-size="13">{escape(title)}</text>']
    for i in range(5):
        value = low + (high - low) * i / 4
        y = at(first, value)[1]
        label = f"{10**value:.1e}" if log else f"{value:.4g}"
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        )
    for x in sorted(set(xs)):
        parts.append(f'<text x="{at(x, low)[0]:.1f}" y="{HEIGHT - 14}" text-anchor="middle">{x:g}</text>')
    for name, points in shown.items():
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (at(x, y) for x, y in points if y is not None))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="1.8"/>')
    return "".join(parts)


def _scale(value: float | None, log: bool) -> float | None:
    if value is None or not math.isfinite(value) or (log and value <= 0):
        return None
    return math.log10(value) if log else value
