"""Sketches of the residual stream: projections that a server and a trainer compare layer by layer.

A sketch of a state x [D] is x @ M in float32. The entries of M [D, P] are +1 or -1 over sqrt(D), which keeps the mean
square. Entry (d, p) is negative if output SEED + d * P + p of splitmix64 has its top bit set. Outputs are counted from
0, and the generator starts in state 0 (https://prng.di.unimi.it/splitmix64.c).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SEED = 20260901
NUM_PROJECTIONS = 8


def sketch_matrix(width: int, *, num_projections: int = NUM_PROJECTIONS, seed: int = SEED) -> np.ndarray:
    """Return the projections M, float32 [width, num_projections]."""
    counters = np.arange(width * num_projections, dtype=np.uint64) + np.uint64(seed)
    signs = 1.0 - 2.0 * (splitmix64(counters) >> np.uint64(63)).astype(np.float32)
    return (signs.reshape(width, num_projections) / np.sqrt(np.float32(width))).astype(np.float32)


def sketches_of(states: np.ndarray) -> np.ndarray:
    """Return the sketches of states [..., D], float32 [..., P]."""
    return np.asarray(states, np.float32) @ sketch_matrix(states.shape[-1])


def splitmix64(counters: np.ndarray) -> np.ndarray:
    """Return outputs of splitmix64 by their numbers, uint64."""
    mixed = counters * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True)
class SketchDistance:
    """Distance of two forward passes over the same tokens."""

    by_layer: list[float]
    """Relative distance |ours - theirs| / |ours| of the sketches, by layer input, then for the last output."""
    first: tuple[int, int] | None
    """(token, layer) at which the passes diverge (`compare_sketches`); None if they do not."""


def compare_sketches(
    ours: np.ndarray, theirs: np.ndarray, *, noise: float = 2.0**-7, factor: float = 8.0
) -> SketchDistance:
    """Compare sketches [T, layers + 1, P] of two passes.

    Passes diverge at the first layer with a distance above `noise` (relative; bfloat16 rounds by 2^-9) and above
    `factor` times the maximum distance of earlier layers. The token is the first one beyond the same bound there.

    Raises: ValueError for sketches of different shapes.
    """
    if ours.shape != theirs.shape or ours.ndim != 3:
        raise ValueError(f"sketches of shapes {ours.shape} and {theirs.shape} do not belong to the same pass")
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    apart_TL = np.linalg.norm(ours - theirs, axis=2)
    scale_L = np.sqrt(np.mean(np.square(np.linalg.norm(ours, axis=2)), axis=0)) + np.finfo(np.float32).tiny
    by_layer = np.sqrt(np.mean(np.square(apart_TL), axis=0)) / scale_L
    before = np.concatenate([[0.0], np.maximum.accumulate(by_layer)[:-1]])
    bound = np.maximum(noise, factor * before)
    layers = np.flatnonzero(~(by_layer <= bound))
    if not len(layers):
        return SketchDistance(by_layer.tolist(), None)
    layer = int(layers[0])
    token = int(np.argmax(~(apart_TL[:, layer] / scale_L[layer] <= bound[layer])))
    return SketchDistance(by_layer.tolist(), (token, layer))
