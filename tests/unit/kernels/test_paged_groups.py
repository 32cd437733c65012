"""Single tokens of one sequence are attended together: as the reference has them, whose rows are written first."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.reference.attention import FULL_CAUSAL, ScoreConfig
from rayserve_moe.kernels.tpu.paged_groups import GroupVisits, groups_of
from tests.support.kernels.interpreter import run_cases
from tests.support.kernels.paged_groups import CASES, CHAINS, ENGINES, FAULTS, LONG, GroupArrays, GroupCase

SUMS_IN_FLOAT32, ROUNDING = 3e-6, 2**-7
"""Largest differences of products in float32, and in bfloat16: weights and results are rounded."""
MODULE = "tests.support.kernels.paged_groups"


def described(arrays: GroupArrays, case: GroupCase, part: slice) -> GroupVisits:
    """The groups of a case that begin in a part of its tokens, as numpy has them."""
    tokens = jnp.asarray(arrays.positions), jnp.asarray(arrays.sequences)
    found = groups_of(*tokens, case.config, part=part, num_cores=2)
    return GroupVisits(*map(np.asarray, found))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("config", [FULL_CAUSAL, ScoreConfig(window=7)])
@pytest.mark.parametrize("case", [CHAINS, LONG], ids=["chains", "long chains"])
@pytest.mark.parametrize("size", [100, 5, 1])
def test_a_group_sees_what_any_of_its_tokens_sees(case, config, size):
    """In parts of the tokens too: each group is in that in which it begins, whole."""
    arrays = GroupArrays(case := replace(case, config=config))
    num_tokens, found = len(arrays.positions), []
    own = np.zeros(num_tokens, int)
    for first in range(0, num_tokens, size):
        part = slice(first, min(first + size, num_tokens))
        visits = described(arrays, case, part)
        num_groups = int(visits.counts_G.astype(bool).sum())
        assert visits.filled_X[:num_groups].tolist() == list(range(num_groups))
        assert (visits.filled_X[num_groups:] >= num_groups).all() and not visits.end_G[num_groups:].any()
        assert (visits.tables_G[:num_groups] == visits.starts_G[:num_groups] - first).all()
        of_groups = visits.first_G, visits.end_G, visits.starts_G, visits.counts_G
        found += list(zip(*(of[:num_groups].tolist() for of in of_groups), strict=True))
        own += visits.is_own_U
    assert (own == (arrays.positions >= 0)).all()
    expected, at = [], 0
    for first, count in case.groups:
        if count:
            least = first - config.window + 1 if config.window else 0
            expected.append((max(least, 0), first + count, at, count))
        at += max(1, count)
    assert found == expected


@pytest.mark.slow
def test_groups_are_the_reference_and_leave_the_pool_as_it_does():
    """Whatever stands out of sight is NaN; no copy races with what reads it, and no row is written but the new ones."""
    for name, found in run_cases(MODULE, *CASES).items():
        bound = ROUNDING * found.largest if CASES[name].dtype == "bfloat16" else SUMS_IN_FLOAT32
        assert found.difference <= bound and not (found.has_races or found.has_rest), (name, found)
        assert bound < found.largest or not any(count for _, count in CASES[name].groups)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_drafts_change_nothing_where_groups_are_attended(name):
    """Ids, and log-probs of the reference without drafts: of an oracle's chains, and of a draft model's."""
    (found,) = run_cases(MODULE, name).values()
    assert found.difference <= SUMS_IN_FLOAT32 and not (found.has_races or found.has_rest)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    """A race, or a number that is none or wrong, here or in the pool."""
    (found,) = run_cases(MODULE, fault).values()
    assert found.error or found.has_races or not found.difference <= SUMS_IN_FLOAT32
