"""Rows that a draft model drafts for after a step, and the drafts of a step."""

# N data ranks   S rows, padded   K drafts

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from rayserve_moe.execution.served_model import ServedModel, draft_sizes
from rayserve_moe.execution.step.pytrees import StepOutput
from rayserve_moe.scheduling.step_plan import StepPlan, StepResult


class DraftRows(NamedTuple):
    """Rows that a draft model drafts for after a step."""

    rows_NS: np.ndarray
    """Rows of each data rank, int32 [data ranks, rows], padded by the first row id beyond the table."""
    places: np.ndarray
    """Index in the flattened `rows_NS` of each row that the plan samples, in the order of the plan."""


def drafting_of(plan: StepPlan, served: ServedModel) -> DraftRows | None:
    """Return the rows that a plan of a served model wants drafts for, or None without any."""
    rows, ranks = served.num_rows, served.config.plan.data_size
    return draft_rows(plan, sizes=draft_sizes(served), rows_per_rank=rows, num_ranks=ranks)


def with_drafts(result: StepResult, output: StepOutput, *, drafting: DraftRows) -> StepResult:
    """Wait for the drafts of a step and return its result with them."""
    assert output.drafts_NSK is not None, "drafts were requested"
    begun = time.perf_counter()
    return replace(result, drafts=drafts_of(output.drafts_NSK, drafting.places), draft_s=time.perf_counter() - begun)


def draft_rows(plan: StepPlan, *, sizes: tuple[int, ...], rows_per_rank: int, num_ranks: int) -> DraftRows | None:
    """Return the rows that a plan wants drafts for, padded to the smallest fitting of `sizes`, or None without any.

    A plan with deferred sampling has no drafts, because its samples do not exist yet.
    """
    sampled = plan.chunks.rows[plan.chunks.samples]
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


def drafts_of(drafts_NSK: jax.Array, locations: np.ndarray) -> np.ndarray:
    """Return the drafts of the rows at `locations` among all data ranks, int32 [rows, K]."""
    of_all = np.asarray(drafts_NSK)
    return np.ascontiguousarray(of_all.reshape(-1, of_all.shape[2])[locations])
