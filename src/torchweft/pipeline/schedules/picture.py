"""Draws when each action runs as a picture in SVG, written by hand."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from torchweft.pipeline.schedules.actions import KIND_NAMES, Kind
from torchweft.pipeline.schedules.execution import Span

_HUES = {  # in degrees, in the order of the legend
    Kind.FORWARD: 212,
    Kind.BACKWARD: 28,
    Kind.BACKWARD_INPUT: 345,
    Kind.BACKWARD_WEIGHT: 140,
    Kind.UPDATE: 285,
}
_SHADES = 8
"""Micro-batches 0 to 7 have different shades; micro-batch 8 has that of 0 again."""

_LEFT, _TOP, _RIGHT, _ROW, _GAP = 78.0, 66.0, 18.0, 26.0, 5.0
_BETWEEN = 36.0
"""Height between two panels, for the title of the second."""
_SHORTEST, _WIDEST = 15.0, 4000.0
"""Width of the shortest action, unless the picture were to be wider than the limit."""
_LEAST = 620.0
_FEW = 4
"""An action is as wide as its label needs if its duration is at least this part of the median."""
_DIGIT = 5.8
"""Width of a digit in a label."""

_STYLE = (
    "text{font-family:sans-serif;fill:#1f2933}"
    ".title{font-size:15px;font-weight:bold}"
    ".name,.note{font-size:12px}"
    ".label{font-size:10px;text-anchor:middle}"
    ".light{fill:#fff}"
    ".tick{font-size:11px;text-anchor:middle;fill:#52606d}"
    ".box{stroke:#fff;stroke-width:.7}"
)


class Panel(NamedTuple):
    """One timeline of a picture.

    Attributes:
        title: The title, as plain text.
        rows: For each worker its actions with their times.
    """

    title: str
    rows: Sequence[Sequence[Span]]


def draw(panels: Sequence[Panel], unit: str = "") -> str:
    """Returns the picture: a row for each worker, time from the left to the right.

    Args:
        panels: The timelines, from the top; all have one axis of time.
        unit: The unit of time, for the axis; may be empty.
    """
    rows = [row for panel in panels for row in panel.rows]
    end_s = max((span.end_s for row in rows for span in row), default=0.0)
    scale = _scale(rows, end_s)
    tops = [_TOP]
    for panel in panels:
        tops.append(tops[-1] + len(panel.rows) * (_ROW + _GAP) + _BETWEEN)
    bottom = tops.pop() - _BETWEEN
    titles = [panel.title for panel in panels]
    widest = 9.2 * max(map(len, titles))
    width = max(_LEFT + end_s * scale, _LEAST, widest) + _RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {bottom + 40:.0f}" '
        f'width="{width:.0f}" height="{bottom + 40:.0f}">',
        f"<title>{escape('; '.join(titles))}</title><style>{_STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text class="title" x="12" y="24">{escape(titles[0])}</text>',
        *_legend(rows),
    ]
    for panel, top in zip(panels, tops, strict=True):
        if top > _TOP:
            parts.append(
                f'<text class="title" x="12" y="{top - 12:.1f}">{escape(panel.title)}</text>'
            )
        for worker, row in enumerate(panel.rows):
            parts += _row(worker, row, top + worker * (_ROW + _GAP), end_s, scale)
    parts += [*_axis(end_s, scale, bottom, unit), "</svg>", ""]
    return "\n".join(parts)


def _scale(rows: Sequence[Sequence[Span]], end_s: float) -> float:
    """Returns the width of a second, at which nearly all actions have room for their labels."""
    spans = [span for row in rows for span in row if span.action.kind is not Kind.UPDATE]
    lengths = sorted(each for span in spans if (each := span.end_s - span.start_s) > 0)
    if not lengths:
        return 1.0
    # A measured timeline has actions that were much shorter than the others by chance.
    short_s = max(lengths[0], lengths[len(lengths) // 2] / _FEW)
    return max(min(_SHORTEST / short_s, _WIDEST / end_s), (_LEAST - _LEFT) / end_s)


def _row(worker: int, row: Sequence[Span], y: float, end_s: float, scale: float) -> Iterator[str]:
    stages = sorted({span.action.stage for span in row})
    yield f'<text class="name" x="12" y="{y + _ROW / 2 + 4:.1f}">worker {worker}</text>'
    yield (
        f'<rect x="{_LEFT:.1f}" y="{y:.1f}" width="{end_s * scale:.1f}" height="{_ROW:.1f}" '
        'fill="#eef0f3"/>'
    )
    for span in sorted(row, key=lambda span: span.action.kind is Kind.UPDATE):
        yield _box(span, y, scale, stages.index(span.action.stage), len(stages))


def _box(span: Span, y: float, scale: float, turn: int, n_turns: int) -> str:
    action, start_s, end_s = span
    x, width = _LEFT + start_s * scale, (end_s - start_s) * scale
    tip = f"<title>{action}: {start_s:g} to {end_s:g}</title>"
    colour, is_dark = _colour(action.kind, action.microbatch, turn, n_turns)
    if not width:  # an update that takes no time
        foot = y + _ROW + 3
        return f'<path d="M{x:.1f} {foot - 9:.1f}l4 9h-8z" fill="{colour}">{tip}</path>'
    box = (
        f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_ROW:.1f}" '
        f'fill="{colour}"/>'
    )
    label = str(action.microbatch)
    if width < _DIGIT * len(label) + 1:
        return f"<g>{tip}{box}</g>"
    tone = "label light" if is_dark else "label"
    text = (
        f'<text class="{tone}" x="{x + width / 2:.1f}" y="{y + _ROW / 2 + 3.5:.1f}">{label}</text>'
    )
    return f"<g>{tip}{box}{text}</g>"


def _colour(kind: Kind, microbatch: int, turn: int, n_turns: int) -> tuple[str, bool]:
    """Returns a colour, and whether it is dark.

    Each stage of a worker has a band of lightness, the first one the lightest; the micro-batch
    decides the place within the band.
    """
    hue = _HUES[kind]
    band = 0.86 - 0.42 * (turn / (n_turns - 1) if n_turns > 1 else 0.0)
    lightness = band - 0.16 * (microbatch % _SHADES) / (_SHADES - 1)
    if kind is Kind.UPDATE:
        lightness = 0.4
    red, green, blue = colorsys.hls_to_rgb(hue / 360, lightness, 0.62)
    return f"#{_hex(red)}{_hex(green)}{_hex(blue)}", lightness < 0.5


def _hex(part: float) -> str:
    return f"{round(255 * part):02x}"


def _legend(rows: Sequence[Sequence[Span]]) -> Iterator[str]:
    kinds = {span.action.kind for row in rows for span in row}
    x = 12.0
    for kind in _HUES:
        if kind in kinds:
            name = KIND_NAMES[kind]
            colour, _ = _colour(kind, 3, 0, 1)
            yield f'<rect x="{x:.0f}" y="38" width="13" height="13" fill="{colour}"/>'
            yield f'<text class="note" x="{x + 18:.0f}" y="49">{name}</text>'
            x += 36 + 6.6 * len(name)
    if any(len({span.action.stage for span in row}) > 1 for row in rows):
        yield f'<text class="note" x="{x:.0f}" y="49">darker: the worker’s later stages</text>'


def _axis(end_s: float, scale: float, bottom: float, unit: str) -> Iterator[str]:
    step_s = _tick_step(45 / scale)
    name = f"time, {unit}" if unit else "time"
    right = _LEFT + end_s * scale
    yield f'<path d="M{_LEFT:.1f} {bottom + 4:.1f}H{right:.1f}" stroke="#52606d"/>'
    for tick in range(math.floor(end_s / step_s + 1e-9) + 1):
        x = _LEFT + tick * step_s * scale
        yield f'<path d="M{x:.1f} {bottom + 4:.1f}v5" stroke="#52606d"/>'
        label = f"{round(tick * step_s, 9):g}"
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 21:.1f}">{label}</text>'
    yield f'<text class="name" x="12" y="{bottom + 21:.1f}">{name}</text>'


def _tick_step(least_s: float) -> float:
    """Returns the smallest of 1, 2 and 5 times a power of ten that is at least ``least_s``."""
    power = 10.0 ** math.floor(math.log10(least_s))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least_s)
