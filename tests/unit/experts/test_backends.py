"""Every backend is the dense MoE layer, on any mesh, for any placement, however uneven the load."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from rayserve_moe.balancing.placement import placement_from
from rayserve_moe.experts.backends import EXPERT_BACKENDS
from tests.support.experts.moe_layer import MoeCase, MoeRun, all_to, dense, placements_for, plan_of
from tests.support.experts.placements import SIZES

SAMPLED = [
    ("local", (1, 1), 8),
    ("replicated", (2, 2), 8),
    ("all_to_all", (2, 2), 8),
    ("all_to_all", (8, 1), 0),
    ("fused", (2, 2), 8),
]
SHARED = pytest.mark.parametrize("backend", ["replicated", "all_to_all", "fused"])
EXCHANGES = pytest.mark.parametrize("backend", ["all_to_all", pytest.param("fused", marks=pytest.mark.slow)])

# Four ranks of two data ranks: with 37 tokens, one rank's worst case is more than it takes in a round.
CASE = MoeCase(num_tokens=37, width=128, inner=48)


@cache
def compiled(backend: str, mesh: tuple[int, int] = (2, 2), num_redundant: int = 8, **config) -> MoeRun:
    plan, optimized = plan_of(*mesh), mesh == (2, 2) and backend != "replicated"
    return MoeRun(CASE, plan, backend=backend, num_redundant=num_redundant, optimized=optimized, **config)


def matrix():
    for backend in (each.name for each in EXPERT_BACKENDS):
        for mesh in SIZES:
            for num_redundant in (0, 8, 16):
                if backend == "local" and mesh != (1, 1):
                    continue
                marks = () if (backend, mesh, num_redundant) in SAMPLED else pytest.mark.slow
                yield pytest.param(backend, mesh, num_redundant, marks=marks)


def assert_close(found, expected, **tolerance) -> None:
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.counts, expected.counts)
    np.testing.assert_allclose(found.out, expected.out, **({"atol": 1e-5, "rtol": 1e-5} | tolerance))


@pytest.mark.parametrize(("backend", "mesh", "num_redundant"), list(matrix()))
def test_it_is_the_dense_layer_for_any_placement(backend, mesh, num_redundant):
    """With one program for all of them."""
    run = compiled(backend, mesh, num_redundant)
    for placement in placements_for(CASE, run.plan, num_redundant):
        assert_close(run(placement), dense(CASE, mesh[0]))
        assert_close(run(placement, layer=0), dense(CASE, mesh[0], layer=0))
    assert run.compiled._cache_size() == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", ["all_to_all", "fused", "auto"])
def test_where_experts_lie_does_not_show_in_a_single_bit(backend):
    """Not in another placement, and not with other replicas."""
    runs = [compiled(backend), *[compiled(backend, num_redundant=0)] * (backend == "all_to_all")]
    results = [run(placement) for run in runs for placement in placements_for(CASE, run.plan, run.config.num_redundant)]
    for result in results[1:]:
        np.testing.assert_array_equal(result.out, results[0].out)
        np.testing.assert_array_equal(result.ids, results[0].ids)


@pytest.mark.slow
@EXCHANGES
@pytest.mark.parametrize("num_redundant", [0, 8])
def test_where_experts_lie_does_not_show_in_bfloat16_either(backend, num_redundant):
    case = replace(CASE, dtype="bfloat16")
    run = MoeRun(case, plan_of(2, 2), backend=backend, num_redundant=num_redundant, optimized=True)
    first, *others = (run(placement) for placement in placements_for(CASE, run.plan, num_redundant))
    for result in others:
        np.testing.assert_array_equal(result.out, first.out)


@EXCHANGES
def test_a_rank_may_get_everything_and_another_nothing(backend):
    """The worst case takes several rounds, and nothing is dropped."""
    run = compiled(backend)
    placement = placements_for(CASE, run.plan, 8)[0]
    shares = placement.share_of_slot.copy()
    shares[:, :8], shares[:, 16:] = 1, 0
    on_first_rank = placement_from(placement.expert_of_slot, shares, num_experts=16, ep_size=4)
    changes = all_to(range(4), CASE, 2) | {"valid": np.ones(74, bool)}
    assert_close(run(on_first_rank, **changes), dense(CASE, 2, **changes))


@SHARED
def test_an_idle_data_rank_costs_nothing_and_changes_nothing(backend):
    run, valid = compiled(backend), CASE.valid(2)
    placement = placements_for(CASE, run.plan, 8)[1]
    half = valid & (np.arange(74) < 37)
    idle = run(placement, valid=half)
    assert_close(idle, dense(CASE, 2, valid=half))
    assert (idle.out[37:] == 0).all() and (idle.counts[1] == 0).all()
    nobody = run(placement, valid=np.zeros(74, bool))
    assert (nobody.out == 0).all() and (nobody.counts == 0).all()


@pytest.mark.parametrize(
    "backend", ["all_to_all", *(pytest.param(b, marks=pytest.mark.slow) for b in ("replicated", "fused"))]
)
def test_slices_do_not_show(backend):
    """Odd numbers of tokens too: of 37, a device of a tensor group gathers 19 or 18."""
    run = MoeRun(CASE, replace(plan_of(2, 2), num_slices=2), backend=backend, num_redundant=8)
    for placement in placements_for(CASE, run.plan, 8)[1:]:
        assert_close(run(placement), dense(CASE, 2))


@SHARED
def test_data_ranks_do_not_see_each_other(backend):
    run, hidden = compiled(backend), CASE.hidden(2)
    placement = placements_for(CASE, run.plan, 8)[1]
    other = np.concatenate([hidden[:37], hidden[37:] * np.float32(np.nan)])
    np.testing.assert_allclose(run(placement, hidden=other).out[:37], run(placement).out[:37], atol=1e-6)


@pytest.mark.parametrize(
    ("backend", "slot_choice"),
    [
        ("replicated", "static"),
        ("all_to_all", "first"),
        pytest.param("replicated", "first", marks=pytest.mark.slow),
        pytest.param("all_to_all", "static", marks=pytest.mark.slow),
        pytest.param("fused", "static", marks=pytest.mark.slow),
    ],
)
def test_any_choice_among_replicas_gives_the_same_sums(backend, slot_choice):
    run = compiled(backend, (2, 1), slot_choice=slot_choice)
    for placement in placements_for(CASE, run.plan, 8)[1:]:
        assert_close(run(placement), dense(CASE, 2))


@pytest.mark.parametrize(
    "backend", ["all_to_all", *(pytest.param(b, marks=pytest.mark.slow) for b in ("replicated", "fused"))]
)
def test_the_grouped_product_of_another_platform_gives_the_same_sums(backend):
    run = compiled(backend, (2, 1), 0, kernels="tpu")
    assert_close(run(None), dense(CASE, 2))


@pytest.mark.parametrize(
    ("backend", "most_tokens"),
    [
        ("all_to_all", 9),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("replicated", 9), ("fused", 9), ("fused", 13), ("fused", 19))
        ),
    ],
)
def test_cutting_into_chunks_does_not_show(backend, most_tokens, monkeypatch):
    """Four chunks, each with a choice of slots of its own; stages of three and of two overlap in other ways."""
    token_bytes = CASE.top_k * CASE.width * 4
    monkeypatch.setattr("rayserve_moe.experts.tokens.SEND_BYTES", most_tokens * token_bytes)
    monkeypatch.setattr("rayserve_moe.experts.backends.RESULT_BYTES", 18 * token_bytes)
    run = MoeRun(CASE, plan_of(2, 1), backend=backend, num_redundant=8)
    for placement in placements_for(CASE, run.plan, 8):
        assert_close(run(placement), dense(CASE, 2))


def test_local_is_refused_on_several_devices():
    with pytest.raises(ValueError, match="local is for one device, and experts lie over 2: choose auto"):
        compiled("local", (2, 1))(placements_for(CASE, plan_of(2, 1), 8)[0])


def test_redundant_slots_need_a_placement():
    """Weights of any number of slots will do: it is refused before they are looked at."""
    with pytest.raises(ValueError, match="16 redundant expert slots are of no use without a placement"):
        compiled("local", (1, 1), 16)(None)


def test_a_backend_that_does_not_exist_is_refused():
    with pytest.raises(KeyError, match="nothing"):
        compiled("nothing", (1, 1), 0)(None)
