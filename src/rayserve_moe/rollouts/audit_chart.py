"""Chart of an audit as SVG: differing decisions by layer and by position in their samples."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_NUM_BINS = 40
_CELL = (18, 14)
"""Width and height of a cell."""
_LEFT, _TOP = 60, 60
_STYLE = "font-family:system-ui,sans-serif;font-size:12px"
_LIGHT, _DARK = np.array([247, 247, 247]), np.array([178, 24, 43])


def chart(entries: Sequence[Mapping[str, Any]], *, layer_ids: Sequence[int], verdicts: Mapping[str, int]) -> str:
    """Return an SVG document with a cell per MoE layer and part of the samples, dark where most decisions differ."""
    counts = counts_of(entries, layer_ids=layer_ids)
    width, height = _LEFT + _NUM_BINS * _CELL[0] + 20, _TOP + len(layer_ids) * _CELL[1] + 40
    title = "Differing decisions: " + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    largest = counts.max(initial=0) or 1
    cells = [
        f'<rect x="{_LEFT + column * _CELL[0]}" y="{_TOP + row * _CELL[1]}" width="{_CELL[0]}" height="{_CELL[1]}" '
        f'fill="{_colour(counts[row, column] / largest)}"><title>layer {layer}: {counts[row, column]}</title></rect>'
        for row, layer in enumerate(layer_ids)
        for column in range(_NUM_BINS)
    ]
    labels = [
        f'<text x="{_LEFT - 8}" y="{_TOP + row * _CELL[1] + 11}" text-anchor="end" fill="#555">{layer}</text>'
        for row, layer in enumerate(layer_ids)
    ]
    bottom = _TOP + len(layer_ids) * _CELL[1] + 20
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" style="{_STYLE}" role="img">',
            f"<title>{html.escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            f'<text x="{_LEFT}" y="28" font-size="15" fill="#111">{html.escape(title)}</text>',
            f'<text x="{_LEFT}" y="{_TOP - 10}" fill="#555">layer by part of the sample; {largest} at most</text>',
            *labels,
            *cells,
            f'<text x="{_LEFT}" y="{bottom}" fill="#555">first token</text>',
            f'<text x="{width - 20}" y="{bottom}" text-anchor="end" fill="#555">last token</text>',
            "</svg>",
            "",
        ]
    )


def counts_of(entries: Sequence[Mapping[str, Any]], *, layer_ids: Sequence[int]) -> np.ndarray:
    """Return the differing decisions that reports list, int [MoE layers, parts of a sample]."""
    counts = np.zeros((len(layer_ids), _NUM_BINS), np.int64)
    row_of = {layer: row for row, layer in enumerate(layer_ids)}
    for entry in entries:
        for token, layer in entry["places"]:
            counts[row_of[layer], token * _NUM_BINS // entry["num_tokens"]] += 1
    return counts


def _colour(share: float) -> str:
    red, green, blue = (_LIGHT + (_DARK - _LIGHT) * share).round().astype(int)
    return f"#{red:02x}{green:02x}{blue:02x}"
