"""A row for each token and device: sums are those of the dense layer, whatever the load, the chunks and the company."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from rayserve_moe.experts import backends, device_sums
from rayserve_moe.experts.addition_order import unsupported_kind
from rayserve_moe.experts.backends import EXPERT_BACKENDS, choose_backend
from rayserve_moe.experts.slot_mapping import CHOSEN_BEFORE, PlacedExperts
from rayserve_moe.experts.tokens import RoutedTokens
from rayserve_moe.kernels.reference import device_sums as reference
from tests.support.experts.moe_layer import MoeCase, MoeRun, all_to, dense, placements_for, plan_of

CASE = MoeCase(num_tokens=37, width=128, inner=48)
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def run_of(mesh: tuple[int, int] = (2, 2), **config) -> MoeRun:
    return MoeRun(CASE, plan_of(*mesh), backend="device_sums", **config)


@cache
def compiled(mesh: tuple[int, int] = (2, 2)) -> MoeRun:
    return run_of(mesh)


@pytest.mark.parametrize("mesh", [(2, 2), *(pytest.param(m, marks=pytest.mark.slow) for m in ((1, 2), (4, 1), (8, 1)))])
def test_it_is_the_dense_layer(mesh):
    for layer in (0, 1):
        found, expected = compiled(mesh)(layer=layer), dense(CASE, mesh[0], layer=layer)
        np.testing.assert_allclose(found.out, expected.out, **CLOSE)
        np.testing.assert_array_equal(found.ids, expected.ids)


def test_a_rank_may_get_everything_and_nobody_may_have_anything():
    changes = all_to(range(4), CASE, 2) | {"valid": np.ones(74, bool)}
    np.testing.assert_allclose(compiled()(**changes).out, dense(CASE, 2, **changes).out, **CLOSE)
    assert (compiled()(valid=np.zeros(74, bool)).out == 0).all()


@pytest.mark.parametrize("max_tokens", [16, pytest.param(32, marks=pytest.mark.slow)])
def test_neither_chunks_nor_other_tokens_show_in_a_single_bit(max_tokens, monkeypatch):
    """Three chunks are exchanged beside each other, two in another order, and one alone."""
    whole = compiled((2, 1))()
    monkeypatch.setattr(reference, "MAX_ROWS", 2 * max_tokens)
    run = run_of((2, 1))
    np.testing.assert_array_equal(run().out, whole.out)
    half = CASE.valid(2) & (np.arange(74) % 3 > 0)
    np.testing.assert_array_equal(run(valid=half).out, np.where(half[:, None], whole.out, 0))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_an_exchange_of_results_adds_up_to_the_same_bits(dtype, monkeypatch):
    """As a step with fewer tokens of a device takes: bits do not depend on the size of a step."""
    case, plan = replace(CASE, num_tokens=48, dtype=dtype), plan_of(4, 1)
    exchange = next(each for each in EXPERT_BACKENDS if each.name == "all_to_all")
    expected = MoeRun(case, plan, backend="device_sums")()
    in_router_order = MoeRun(case, plan, backend="all_to_all")()
    monkeypatch.setattr(backends, "EXPERT_BACKENDS", (exchange,))
    found = MoeRun(case, plan, backend="auto")()
    np.testing.assert_array_equal(found.out, expected.out)
    assert (in_router_order.out != expected.out).any()


def test_a_planted_fault_is_found(monkeypatch):
    """Sums that come back to the rows of another rank."""
    right = device_sums.runs_between

    def wrong(sent_RR, me):
        sent, received = right(sent_RR, me)
        return sent._replace(at_sender_R=sent.at_sender_R[::-1]), received

    monkeypatch.setattr(device_sums, "runs_between", wrong)
    assert np.abs(run_of((2, 1))().out - dense(CASE, 2).out).max() > 0.1


def test_chunks_cover_all_tokens_and_are_no_larger_than_allowed():
    for num_tokens in (1, 37, 511, 512, 8208):
        for most in (16, 250, 853):
            chunk = device_sums.chunk_tokens(num_tokens, most)
            assert chunk % 16 == 0 and chunk <= max(16, most)
            assert (-(-num_tokens // chunk)) * chunk - num_tokens < 16 * -(-num_tokens // chunk)
    assert device_sums.chunk_tokens(512, 4000) == 256


def test_experts_that_may_move_go_another_way():
    run = run_of()
    tokens = RoutedTokens(np.zeros((2048, 128)), None, None, None)
    fixed = PlacedExperts(None, 0, None)
    moving = fixed._replace(maps=placements_for(CASE, run.plan, 0)[0])
    for experts, config in ((moving, run.config), (fixed, replace(run.config, slot_choice=CHOSEN_BEFORE))):
        assert "experts may move" in unsupported_kind(tokens, experts, config=config)
    slices = replace(run.config, plan=replace(run.plan, num_slices=2))
    assert unsupported_kind(tokens, fixed, config=slices) == "devices lie on 2 slices"
    assert choose_backend(tokens, moving, config=run.config).name == "all_to_all"
