"""Drafts as trees: which follow which, cut to what a step can verify, and laid out as its tokens.

Drafts of a sequence are int32 [N], a chain, or int32 [N, 2], a tree: tokens, and what each follows, 0 for the last
token of the sequence and i for the draft before place i. The best come first, none before what it follows, so that the
first drafts of a tree are a tree.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

MOST_NODES = 32
"""Of a tree, the last token of the sequence among them: bits of a mask."""

CHAIN = (np.uint32(0xFFFFFFFF) >> np.arange(MOST_NODES - 1, -1, -1, dtype=np.uint32)).view(np.int32)
"""The masks of the nodes of a chain."""
ROOT, DEPTHS = np.zeros(1, np.int32), np.arange(MOST_NODES)


class LaidOut(NamedTuple):
    """The last token of a sequence and the drafts after it as nodes of a tree, int [1 + N]: tokens (0 for the first),
    how many others are on the path to each, and those and itself as bits, int32 (`kernels.ancestors`)."""

    token_ids: np.ndarray
    depths: np.ndarray
    ancestors: np.ndarray


def lay_out(drafts: np.ndarray, *, count: int, levels: int) -> LaidOut:
    """Lay out the first `count` drafts, but those deeper than `levels`; the same draft twice is one.

    Nodes come in depth first order, best first: while the best drafts are right, keys lie where those of a chain would.
    """
    if drafts.ndim == 1:
        num_nodes = 1 + max(0, min(len(drafts), count, levels))
        token_ids = np.concatenate((ROOT, drafts[: num_nodes - 1]), dtype=np.int32, casting="same_kind")
        return LaidOut(token_ids, DEPTHS[:num_nodes], CHAIN[:num_nodes])
    tokens, below, depths, nodes = [0], [{}], [0], [0]
    for token, follows in drafts[:count].tolist():
        above = nodes[follows]
        if above < 0 or depths[above] == levels:
            nodes.append(-1)
            continue
        nodes.append(below[above].setdefault(token, len(tokens)))
        if nodes[-1] == len(tokens):
            tokens.append(token)
            below.append({})
            depths.append(depths[above] + 1)
    order, masks, open_nodes = [], {}, [(0, 0)]
    while open_nodes:
        node, mask = open_nodes.pop()
        masks[node] = mask | 1 << len(order)
        order.append(node)
        open_nodes.extend((child, masks[node]) for child in reversed(below[node].values()))
    ancestors = np.array([masks[node] for node in order], np.uint32).view(np.int32)
    return LaidOut(np.array(tokens, np.int32)[order], np.array(depths)[order], ancestors)


def as_tree(drafts: np.ndarray) -> np.ndarray:
    """Drafts as a tree, int32 [N, 2]."""
    return drafts if drafts.ndim == 2 else np.stack([drafts, np.arange(len(drafts), dtype=np.int32)], axis=1)


def joined(chains: Iterable[np.ndarray], *, count: int) -> np.ndarray:
    """At most `count` drafts of several chains, best first, as one tree: their common beginnings once."""
    found: dict[tuple[int, int], int] = {}
    for chain in chains:
        at = 0
        for token in chain.tolist():
            if (at, token) not in found and len(found) == count:
                break
            at = found.setdefault((at, token), len(found) + 1)
    return np.array([(token, follows) for follows, token in found], np.int32).reshape(-1, 2)


def levels_of(drafts: np.ndarray) -> int:
    """How many drafts follow each other at most."""
    if drafts.ndim == 1:
        return len(drafts)
    depths = [0]
    for _, follows in drafts.tolist():
        depths.append(depths[follows] + 1)
    return max(depths)


def right_drafts(drafts: np.ndarray, followed: np.ndarray) -> int:
    """How many of the tokens that followed a sequence were drafted, one after the other."""
    places = {(follows, token): i for i, (token, follows) in enumerate(as_tree(drafts).tolist(), 1)}
    at, count = 0, 0
    for token in followed.tolist():
        if (at := places.get((at, token), 0)) == 0:
            break
        count += 1
    return count


def parents_of(ancestors: np.ndarray) -> np.ndarray:
    """How far ahead of each node of its tree, int32, stands that which it follows; 0 for roots."""
    masks = ancestors.view(np.uint32).astype(np.int64)
    nodes = _highest(masks)
    above = masks ^ (1 << nodes)
    return np.where(above > 0, nodes - _highest(np.maximum(above, 1)), 0)


def depths_of(ancestors: np.ndarray) -> np.ndarray:
    """How many nodes are on the path to each besides itself."""
    return np.bitwise_count(ancestors.view(np.uint32)).astype(np.int64) - 1


def _highest(masks: np.ndarray) -> np.ndarray:
    """The highest bit of positive numbers below 2^32."""
    return np.frexp(masks.astype(np.float64))[1].astype(np.int64) - 1
