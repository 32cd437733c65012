"""Sketches of the residual stream: projections that a server and a trainer compare layer by layer.

A sketch of a state x [D] is x @ M in float32. M [D, P] has entries of +1 and -1 over sqrt(D), so that the mean square
of a sketch is near that of x. Entry (d, p) is negative if the top bit of splitmix64(SEED + d * P + p) is set.
"""

from __future__ import annotations

import numpy as np

SEED = 20260901
NUM_PROJECTIONS = 8


def sketch_matrix(width: int, *, num_projections: int = NUM_PROJECTIONS, seed: int = SEED) -> np.ndarray:
    """Return the projections M, float32 [width, num_projections]."""
    counters = np.arange(width * num_projections, dtype=np.uint64) + np.uint64(seed)
    signs = 1.0 - 2.0 * (_splitmix64(counters) >> np.uint64(63)).astype(np.float32)
    return (signs.reshape(width, num_projections) / np.sqrt(np.float32(width))).astype(np.float32)


def sketches_of(states: np.ndarray) -> np.ndarray:
    """Return the sketches of states [..., D], float32 [..., P]."""
    return np.asarray(states, np.float32) @ sketch_matrix(states.shape[-1])


def _splitmix64(counters: np.ndarray) -> np.ndarray:
    """Return the outputs of splitmix64 (https://prng.di.unimi.it/splitmix64.c) with these states, uint64."""
    mixed = counters * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
