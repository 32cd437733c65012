"""A transfer plan, carried out on any weights, lays them out as the new placement says."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.balancing.migration import transfer_sources
from rayserve_moe.balancing.planner import plan
from tests.support.experts.eplb_planner import planner_cases, random_load
from tests.support.session.hypothesis_examples import examples

FEW = examples(30)  # each example is several searches


@FEW
@given(case=planner_cases(), seed=st.integers(0, 1 << 30), num_hosts=st.sampled_from([1, 2, 3]))
def test_weights_end_up_where_the_new_placement_has_them(case, seed, num_hosts):
    generator = np.random.default_rng(seed)
    old = plan(case.load, **case.sizes)
    new = plan(random_load(generator, "lognormal", case.load.shape), **case.sizes)
    hosts = num_hosts if case.ep_size % num_hosts == 0 else 1
    sources = transfer_sources(old, new, hosts=hosts)
    of_expert = generator.integers(0, 1 << 30, (*case.load.shape, 3))
    layers = np.arange(len(of_expert))[:, None]
    weights = of_expert[layers, old.expert_of_slot][layers, sources]
    np.testing.assert_array_equal(weights, of_expert[layers, new.expert_of_slot])
    _assert_nearest(sources, old.expert_of_slot, new.expert_of_slot, ep_size=case.ep_size, hosts=hosts)


def _assert_nearest(source_of_slot, old, new, *, ep_size, hosts):
    """Whatever stays stays; then the same rank, then the same host comes first."""
    slots_per_rank = old.shape[1] // ep_size
    ranks_per_host = ep_size // hosts
    for layer, sources in enumerate(source_of_slot.tolist()):
        for target, source in enumerate(sources):
            if old[layer, target] == new[layer, target]:
                assert source == target
                continue
            holders = np.flatnonzero(old[layer] == new[layer, target]) // slots_per_rank
            rank, source_rank = target // slots_per_rank, source // slots_per_rank
            assert source_rank == rank or rank not in holders
            same_host = holders // ranks_per_host == rank // ranks_per_host
            assert source_rank // ranks_per_host == rank // ranks_per_host or not same_host.any()
