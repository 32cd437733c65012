"""Shapes that the native CPU kernels take, and the memory layout of their weights.

[K, N] lies as panels of 32 columns, in each the pairs of neighbouring k; weights of 8 bits lie by halves of the
columns. `products.h` explains it. A packed array keeps its shape, so code that moves, shards or counts weights by their
leading dimensions is not concerned.
"""

# K depth   N columns   V vocabulary   D model width   T tokens

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.kernels.narrow_weights import SCALE_BLOCK

PANEL = 32
"""Columns of a packed matrix that lie together."""
DEFINITIONS = (f"-DNATIVE_PANEL={PANEL}", f"-DNATIVE_SCALE_BLOCK={SCALE_BLOCK}")
"""The same for the compiler."""


def shape_problem(depths: Mapping[str, int]) -> str | None:
    """Return why products of these `depths`, by name, are not supported; None if they are.

    Numbers of tokens, heads, KV heads that divide them, experts, assignments, layers, pages and places in a page are
    free; widths of experts, of dense MLPs and the vocabulary are padded.
    """
    return next((f"{name} {depth} is odd" for name, depth in depths.items() if depth % 2), None)


def pack(weights_KN: jax.Array) -> jax.Array:
    """Lay out [..., K, N] for the kernels; K has to be even. The shape stays.

    If N is no multiple of 32 the last panel is narrower. Arrays of numpy become such, here and in `pack_columns`.
    """
    columns = weights_KN.shape[-1]
    whole = columns - columns % PANEL
    if whole == columns:
        return _panels(weights_KN, PANEL).reshape(weights_KN.shape)
    parts = _panels(weights_KN[..., :whole], PANEL), _panels(weights_KN[..., whole:], columns - whole)
    join: Any = np.concatenate if isinstance(weights_KN, np.ndarray) else jnp.concatenate
    return join(parts, axis=-1).reshape(weights_KN.shape)


def _panels(weights_KN: jax.Array, width: int) -> jax.Array:
    """Return the panels of `width` columns in sequence, [..., K * N]."""
    *outer, depth, columns = weights_KN.shape
    places = len(outer)
    if weights_KN.dtype.itemsize == 1 and width == PANEL:
        cut = weights_KN.reshape(*outer, depth // 2, 2, columns // width, 2, width // 2)
        order = (places + 2, places, places + 3, places + 1, places + 4)
        return cut.transpose(*range(places), *order).reshape(*outer, depth * columns)
    cut = weights_KN.reshape(*outer, depth // 2, 2, columns // width, width)
    return cut.transpose(*range(places), places + 2, places, places + 3, places + 1).reshape(*outer, depth * columns)


def unpack(packed_KN: np.ndarray) -> np.ndarray:
    """Undo `pack`: [..., K, N]."""
    *outer, depth, columns = packed_KN.shape
    whole = columns - columns % PANEL
    flat = packed_KN.reshape(*outer, depth * columns)
    parts = [
        _from_panels(flat[..., begin * depth : end * depth], depth, width=width)
        for begin, end, width in ((0, whole, PANEL), (whole, columns, columns - whole))
        if end > begin
    ]
    return np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]


def _from_panels(panels: np.ndarray, depth: int, *, width: int) -> np.ndarray:
    """Return [..., K, N] from panels of `width` columns, [..., K * N]."""
    outer, places = panels.shape[:-1], panels.ndim - 1
    columns = panels.shape[-1] // depth
    if panels.dtype.itemsize == 1 and width == PANEL:
        cut = panels.reshape(*outer, columns // width, depth // 2, 2, 2, width // 2)
        order = (places + 1, places + 3, places, places + 2, places + 4)
    else:
        cut = panels.reshape(*outer, columns // width, depth // 2, width, 2)
        order = (places + 1, places + 3, places, places + 2)
    return cut.transpose(*range(places), *order).reshape(*outer, depth, columns)


def unpack_columns(packed_VD: np.ndarray) -> np.ndarray:
    """Undo `pack_columns`: [..., V, D]."""
    *outer, words, width = packed_VD.shape
    return unpack(packed_VD.reshape(*outer, width, words)).swapaxes(-1, -2)


def pack_columns(table_VD: jax.Array) -> jax.Array:
    """Lay out [..., V, D], the rows of a table that are columns of a product; the shape does not change."""
    return pack(table_VD.swapaxes(-1, -2)).reshape(table_VD.shape)


def _plain(array: jax.Array) -> jax.Array:
    return array


LAYOUTS: dict[str, Callable[[Any], Any]] = {"": _plain, "packed": pack, "packed_columns": pack_columns}
"""Functions that lay out a device's share of a parameter, by `ParamSpec.layout`."""
INVERSES: dict[str, Callable[[Any], Any]] = {"": _plain, "packed": unpack, "packed_columns": unpack_columns}
"""Functions that undo a layout, for arrays of numpy."""


def take_columns(packed_VD: jax.Array, ids_T: jax.Array) -> jax.Array:
    """Return rows [T, D] of a table that `pack_columns` has laid out."""
    num_words, width = packed_VD.shape
    panels = packed_VD.reshape(num_words // PANEL, width // 2, PANEL, 2)
    return jnp.asarray(panels[ids_T // PANEL, :, ids_T % PANEL, :]).reshape(len(ids_T), width)
