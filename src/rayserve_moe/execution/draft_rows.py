"""Which rows a draft model drafts for after a step, as its programs take them, and the way back."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from rayserve_moe.scheduling.step_plan import StepPlan


class DraftRows(NamedTuple):
    """Rows of each data rank, int32 [data ranks, rows], padded by one that does not exist, and where those that a plan
    samples for stand among them all, in its order."""

    rows_NS: np.ndarray
    places: np.ndarray


def draft_rows(plan: StepPlan, *, sizes: tuple[int, ...], rows_per_rank: int, num_ranks: int) -> DraftRows | None:
    """The rows that a plan wants drafts for, in the smallest of the `sizes` that holds them; None for none.

    Samples that wait for masks are not there yet: nothing is drafted after them.
    """
    sampled = plan.chunk_rows[plan.chunk_samples]
    if not plan.wants_drafts or plan.holds_samples or not len(sampled):
        return None
    is_first = np.concatenate([[True], sampled[1:] != sampled[:-1]])
    ranks, rows = np.divmod(sampled[is_first], rows_per_rank)
    counts = np.bincount(ranks, minlength=num_ranks)
    within = np.arange(len(ranks)) - (np.cumsum(counts) - counts)[ranks]
    size = next(size for size in sizes if size >= counts.max())
    rows_NS = np.full((num_ranks, size), rows_per_rank, np.int32)
    rows_NS[ranks, within] = rows
    return DraftRows(rows_NS, ranks * size + within)


def drafts_of(drafts_NSK: jax.Array, places: np.ndarray) -> np.ndarray:
    """Drafts int32 [rows, K], or trees [rows, K, 2], of the rows at `places` among those of all data ranks."""
    of_all = np.asarray(drafts_NSK)
    return np.ascontiguousarray(of_all.reshape(-1, *of_all.shape[2:])[places])
