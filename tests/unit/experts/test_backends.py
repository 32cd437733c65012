"""Every backend is the dense MoE layer, on any mesh, for any placement, however uneven the load."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from rayserve_moe.experts.backends import EXPERT_BACKENDS, all_to_all_bytes, choose_backend, replicated_bytes
from rayserve_moe.experts.layer import backend_for
from tests.support.expert_cases import MoeCase, MoeRun, all_to, dense, placements_for, plan_of

MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (8, 1), (1, 8)]
SAMPLED = [
    ("local", (1, 1), 8),
    ("replicated", (2, 2), 8),
    ("replicated", (1, 2), 0),
    ("all_to_all", (4, 2), 8),
    ("all_to_all", (1, 1), 0),
    ("fused", (2, 2), 0),
    ("fused", (8, 1), 16),
]
EXCHANGES = pytest.mark.parametrize("backend", ["all_to_all", "fused"])
CASE = MoeCase()
BIT_CASE = MoeCase(num_tokens=64, width=256, inner=96)


def matrix():
    for backend in EXPERT_BACKENDS:
        for mesh in MESHES:
            for num_redundant in (0, 8, 16):
                if backend == "local" and mesh != (1, 1):
                    continue
                marks = () if (backend, mesh, num_redundant) in SAMPLED else pytest.mark.slow
                yield pytest.param(backend, mesh, num_redundant, marks=marks)


def assert_close(found, expected, **tolerance) -> None:
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.counts, expected.counts)
    np.testing.assert_allclose(found.out, expected.out, **({"atol": 2e-6, "rtol": 1e-5} | tolerance))


@pytest.mark.parametrize(("backend", "mesh", "num_redundant"), list(matrix()))
def test_it_is_the_dense_layer_for_any_placement(backend, mesh, num_redundant):
    plan = plan_of(*mesh)
    run = MoeRun(CASE, plan, backend=backend, num_redundant=num_redundant)
    for placement in placements_for(CASE, plan, num_redundant):
        assert_close(run(placement), dense(CASE, mesh[0]))
        assert_close(run(placement, layer=0), dense(CASE, mesh[0], layer=0))
    if num_redundant == 0:
        assert_close(run(None), dense(CASE, mesh[0]))


@pytest.mark.parametrize("backend", ["replicated", "all_to_all", "fused"])
def test_a_new_placement_fits_the_same_program(backend):
    plan = plan_of(2, 1)
    run = MoeRun(replace(CASE, num_tokens=5), plan, backend=backend, num_redundant=8)
    for placement in placements_for(CASE, plan, 8):
        run(placement)
    assert run.compiled._cache_size() == 1


@EXCHANGES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_experts_lie_does_not_show_in_a_single_bit(backend, dtype):
    case = replace(BIT_CASE, dtype=dtype)
    results = [result for redundant in (0, 8) for result in run_everywhere(case, backend, redundant)]
    for result in results[1:]:
        np.testing.assert_array_equal(result.out, results[0].out)
        np.testing.assert_array_equal(result.ids, results[0].ids)


def run_everywhere(case: MoeCase, backend: str, num_redundant: int):
    plan = plan_of(2, 2)
    run = MoeRun(case, plan, backend=backend, num_redundant=num_redundant)
    return [run(placement) for placement in placements_for(case, plan, num_redundant)]


@EXCHANGES
@pytest.mark.parametrize("mesh", [(4, 1), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_a_rank_may_get_everything_and_another_nothing(backend, mesh):
    """The worst case takes several rounds, and nothing is dropped."""
    case = replace(CASE, num_tokens=96 * mesh[1], valid_share=1.0)
    changes = all_to(range(4), case, mesh[0])
    run = MoeRun(case, plan_of(*mesh), backend=backend)
    assert_close(run(None, **changes), dense(case, mesh[0], **changes))


@pytest.mark.parametrize("backend", ["replicated", "all_to_all", "fused"])
def test_an_idle_data_rank_costs_nothing_and_changes_nothing(backend):
    case = replace(CASE, num_tokens=7)
    run = MoeRun(case, plan_of(2, 2), backend=backend)
    valid = np.arange(14) < 7
    idle = run(None, valid=valid)
    assert_close(idle, dense(case, 2, valid=valid))
    assert (idle.out[7:] == 0).all() and (idle.counts[1] == 0).all()
    nobody = run(None, valid=np.zeros(14, bool))
    assert (nobody.out == 0).all() and (nobody.counts == 0).all()


@pytest.mark.parametrize("backend", ["replicated", "all_to_all", "fused"])
def test_data_ranks_do_not_see_each_other(backend):
    case = replace(CASE, num_tokens=6)
    run = MoeRun(case, plan_of(2, 1), backend=backend)
    hidden = case.hidden(2)
    other = np.concatenate([hidden[:6], hidden[6:] * np.float32(np.nan)])
    np.testing.assert_allclose(run(None, hidden=other).out[:6], run(None).out[:6], atol=1e-6)


@pytest.mark.parametrize("slot_choice", ["static", "first"])
@pytest.mark.parametrize("backend", ["replicated", "all_to_all"])
def test_any_choice_among_replicas_gives_the_same_sums(backend, slot_choice):
    plan = plan_of(2, 1)
    run = MoeRun(CASE, plan, backend=backend, num_redundant=8, slot_choice=slot_choice)
    for placement in placements_for(CASE, plan, 8)[1:]:
        assert_close(run(placement), dense(CASE, 2))


@pytest.mark.parametrize("backend", ["replicated", "all_to_all", "fused"])
def test_the_grouped_product_of_another_platform_gives_the_same_sums(backend):
    run = MoeRun(CASE, plan_of(2, 1), backend=backend, kernel="ragged_dot")
    assert_close(run(None), dense(CASE, 2))


@pytest.mark.parametrize(("backend", "mesh"), [("fused", (2, 1)), ("all_to_all", (2, 1)), ("replicated", (2, 1))])
def test_cutting_into_chunks_does_not_show(backend, mesh, monkeypatch):
    for module in ("chunks", "replicated"):
        limit = {"chunks": "SEND_BYTES", "replicated": "RESULT_BYTES"}[module]
        monkeypatch.setattr(f"rayserve_moe.experts.{module}.{limit}", 3 * CASE.top_k * CASE.width * 4)
    run = MoeRun(CASE, plan_of(*mesh), backend=backend, num_redundant=8)
    for placement in placements_for(CASE, run.plan, 8):
        assert_close(run(placement), dense(CASE, mesh[0]))


def test_local_is_refused_on_several_devices():
    with pytest.raises(ValueError, match="local is for one device, and experts lie over 2: choose auto"):
        MoeRun(CASE, plan_of(2, 1), backend="local")(None)


def test_redundant_slots_need_a_placement():
    with pytest.raises(ValueError, match="8 redundant expert slots are of no use without a placement"):
        MoeRun(CASE, plan_of(1, 1), backend="local", num_redundant=8)._on_device(
            CASE.hidden(1), CASE.router, CASE.valid(1), [], None, 0
        )


SIZES = {"top_k": 8, "row_bytes": 4096}


def test_few_tokens_or_ranks_are_gathered_and_the_rest_exchanged():
    @cache
    def choose(tokens: int, ep_size: int, tensor_size: int = 1) -> str:
        return choose_backend(tokens, ep_size=ep_size, tensor_size=tensor_size, platform="tpu", **SIZES)

    assert choose(16, 1) == "local"
    assert choose(1, 8) == choose(512, 2) == choose(16, 2) == "replicated"
    assert choose(16, 8) == choose(16, 64) == choose(256, 8) == "all_to_all"
    assert choose(512, 8) == choose(8192, 64) == "fused"
    assert choose(8192, 8, 8) in {"fused", "replicated"}
    assert choose_backend(8192, ep_size=8, tensor_size=1, platform="cpu", **SIZES) == "replicated"


def test_the_choice_is_the_way_with_fewer_bytes():
    for tokens in (1, 4, 64, 1024):
        for ep_size, tensor_size in ((2, 1), (8, 1), (8, 8), (64, 8)):
            sizes = {"ep_size": ep_size, "tensor_size": tensor_size, "row_bytes": 4096}
            gathered, exchanged = replicated_bytes(tokens, **sizes), all_to_all_bytes(tokens, top_k=8, **sizes)
            chosen = choose_backend(tokens, platform="tpu", top_k=8, **sizes)
            assert (chosen == "replicated") == (gathered <= exchanged)


def test_auto_counts_the_tokens_of_a_device_and_a_name_is_taken_as_it_is():
    run = MoeRun(CASE, plan_of(1, 1), backend="auto")
    hidden = jax.ShapeDtypeStruct((19, 16), np.float32)
    assert backend_for(hidden, run.rule) == "local"
    assert backend_for(hidden, replace(run.rule, plan=plan_of(2, 2))) == "replicated"
    assert backend_for(hidden, replace(run.rule, plan=plan_of(2, 2), backend="fused")) == "fused"
