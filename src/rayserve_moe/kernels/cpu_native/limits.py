"""Which shapes the native CPU kernels take, stated once: for the choice of kernels, and for the compiler."""

from __future__ import annotations

from collections.abc import Mapping

PANEL = 32
"""Columns of a packed matrix that lie together: what widths have to divide by."""
HEAD_WIDTHS = (32, 64, 96, 128, 256)
"""Widths of a head that attention is compiled for."""
DEFINITIONS = (f"-DNATIVE_PANEL={PANEL}", f"-DNATIVE_HEAD_WIDTHS={','.join(map(str, HEAD_WIDTHS))}")


def shape_problem(head_width: int, sizes: Mapping[str, int]) -> str | None:
    """Why attention of this head width, or products of these `sizes` by name, are not taken. None: they are.

    Numbers of tokens, heads, KV heads that divide them, experts, picks, layers, pages and places in a page are free.
    """
    if head_width not in HEAD_WIDTHS:
        return f"head_dim {head_width} is none of {', '.join(map(str, HEAD_WIDTHS))}"
    wrong = [f"{name} {size}" for name, size in sizes.items() if size % PANEL]
    return f"{', '.join(wrong)} does not divide by {PANEL}" if wrong else None
