"""Parts of routing rows: further decisions of the model at the same positions, as arrays with an entry per row.

    index   packed index rows of sparse attention (`replay.index_rows`), object; None for an entry that is not known
    gates   weights of the row's experts in the row's order, float32 [MoE layers, k]; NaN if they are not known

An entry is known only if its row is. Rows without a part were not captured with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rayserve_moe.requests.records import RoutedExperts


def unknown_entries(like: np.ndarray, count: int) -> np.ndarray:
    """Return `count` entries of a part that are not known; `like` holds other entries of it."""
    return np.full((count, *like.shape[1:]), unknown_of(like), like.dtype)


def unknown_of(values: np.ndarray) -> float | None:
    """Return the value of an entry that is not known."""
    return None if values.dtype == object else np.nan


def are_known(values: np.ndarray) -> np.ndarray:
    """Return the mask of known entries, bool [N]."""
    if values.dtype == object:
        return np.array([entry is not None for entry in values], np.bool_)
    return np.logical_not(np.isnan(values).any(axis=tuple(range(1, values.ndim))))


def known_part(routing: RoutedExperts, name: str) -> np.ndarray | None:
    """Return the entries of a part, unknown for missing rows; None if it was not captured."""
    values = routing.parts.get(name)
    if values is None or not routing.missing:
        return values
    values = values.copy()
    for first, last in routing.missing:
        values[first - routing.start : last - routing.start] = unknown_of(values)
    return values


def parts_between(routing: RoutedExperts, first: int, *, last: int) -> dict[str, np.ndarray]:
    """Return the parts of the rows of positions `[first, last)`."""
    own = slice(max(0, first - routing.start), max(0, last - routing.start))
    return {name: values[own] for name, values in routing.parts.items()}


def joined_parts(pieces: Sequence[RoutedExperts]) -> dict[str, np.ndarray]:
    """Concatenate the parts of all pieces; entries of a piece without a part are not known."""
    names = dict.fromkeys(name for piece in pieces for name in piece.parts)
    return {name: np.concatenate(_entries(name, pieces)) for name in names}


def _entries(name: str, pieces: Sequence[RoutedExperts]) -> list[np.ndarray]:
    like = next(piece.parts[name] for piece in pieces if name in piece.parts)
    return [piece.parts[name] if name in piece.parts else unknown_entries(like, len(piece.rows)) for piece in pieces]
