"""Exchanges of replicas between pairs of ranks, all pairs of all layers at once: coarse, and fast."""

from __future__ import annotations

import numpy as np

from rayserve_moe.balancing.layout import Layout


def level_pairs(layout: Layout, load: np.ndarray, *, rounds: int) -> None:
    """Let hot and cold ranks exchange one replica in pairs, `rounds` times, wherever that brings the two closer.

    In the first round the coldest meets the hottest, the next the next, and so on; in the next round all hot ranks move
    one on. `load` is [layers, experts]; replicas share evenly.
    """
    num_layers, num_ranks, num_slots = layout.experts.shape
    half = num_ranks // 2
    items = layout.even_amounts(load).reshape(layout.experts.shape)
    layers = np.arange(num_layers)[:, None]
    for turn in range(rounds):
        order = np.argsort(items.sum(axis=2), axis=1, kind="stable")
        cold, hot = order[:, :half], np.roll(order[:, num_ranks - half :][:, ::-1], turn, axis=1)
        cold_items, hot_items = items[layers, cold], items[layers, hot]
        gap = (hot_items.sum(axis=2) - cold_items.sum(axis=2)) / 2
        left = abs(gap[..., None, None] - (hot_items[..., :, None] - cold_items[..., None, :]))
        left[layout.held[layers[..., None], cold[..., None], layout.experts[layers, hot]]] = np.inf
        taken = layout.held[layers[..., None], hot[..., None], layout.experts[layers, cold]]
        np.swapaxes(left, 2, 3)[taken] = np.inf
        flat = left.reshape(num_layers, half, -1)
        best = flat.argmin(axis=2)
        layer, pair = np.nonzero(np.take_along_axis(flat, best[..., None], axis=2)[..., 0] < gap * (1 - 1e-9))
        i, j = np.divmod(best[layer, pair], num_slots)
        hot_slot, cold_slot = (hot[layer, pair], i), (cold[layer, pair], j)
        layout.exchange(layer, hot_slot, other=cold_slot)
        items[layer, *hot_slot] = cold_items[layer, pair, j]
        items[layer, *cold_slot] = hot_items[layer, pair, i]
