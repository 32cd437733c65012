"""A token's row goes once to each rank of its experts: fewer rows travel, and no bit of a sum changes."""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.balancing.placement import placement_from
from rayserve_moe.experts import all_to_all
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.rank_rows import plan_rank_rows, sends_once
from rayserve_moe.experts.router_spec import RouterSpec
from rayserve_moe.kernels.table import CPU
from tests.support.experts.moe_layer import MoeCase, MoeRun, all_to, placements_for, plan_of

CASE = MoeCase(num_tokens=37, width=128, inner=48)


def run_of(
    monkeypatch: pytest.MonkeyPatch, mesh: tuple[int, int], *, once: bool, sent: Counter | None = None
) -> MoeRun:
    """Return a layer whose rows go once to each rank, or once for each expert; `sent` counts the rows that leave."""
    monkeypatch.setattr(all_to_all, "sends_once", lambda *_, **__: once)
    original, kinds = all_to_all.ragged_all_to_all, iter(("rows", "results"))

    def counted(operand, output, slices, **options):
        num_rows = jnp.sum(slices.send_sizes_R) - slices.send_sizes_R[jax.lax.axis_index(options["axis_name"])]
        if sent is not None:
            kind = next(kinds)
            jax.debug.callback(lambda rows: sent.update({kind: int(rows)}), num_rows)
        return original(operand, output, slices, **options)

    monkeypatch.setattr(all_to_all, "ragged_all_to_all", counted)
    redundant = 0 if sent is not None else 8
    run = MoeRun(CASE, plan_of(*mesh), backend="all_to_all", num_redundant=redundant, optimized=sent is None)
    run(None if sent is not None else placements_for(CASE, run.plan, 8)[0])  # traces it
    monkeypatch.undo()
    return run


@pytest.mark.parametrize("mesh", [(2, 2), pytest.param((8, 1), marks=pytest.mark.slow)])
def test_no_bit_shows_how_rows_travel_or_where_experts_lie(mesh, monkeypatch):
    once, each = (run_of(monkeypatch, mesh, once=value) for value in (True, False))
    expected = each(placements_for(CASE, each.plan, 8)[0]).out
    for placement in placements_for(CASE, once.plan, 8):
        for run in (once, each):
            np.testing.assert_array_equal(run(placement).out, expected)


def test_a_rank_that_gets_everything_multiplies_the_rows_in_several_rounds(monkeypatch):
    once, each = (run_of(monkeypatch, (2, 2), once=value) for value in (True, False))
    placement = placements_for(CASE, once.plan, 8)[0]
    shares = placement.share_of_slot.copy()
    shares[:, :8], shares[:, 16:] = 1, 0
    on_first_rank = placement_from(placement.expert_of_slot, shares, num_experts=16, ep_size=4)
    changes = all_to(range(4), CASE, 2) | {"valid": np.ones(74, bool)}
    np.testing.assert_array_equal(once(on_first_rank, **changes).out, each(on_first_rank, **changes).out)


def test_rows_leave_for_distinct_ranks_and_results_for_experts(monkeypatch):
    """Of the 37 tokens of a data rank, its two tensor ranks send 19 and 18."""
    sent: Counter = Counter()
    run = run_of(monkeypatch, (2, 2), once=True, sent=sent)
    sent.clear()
    ids = run().ids
    jax.effects_barrier()
    valid, ranks = CASE.valid(2), ids // 4
    sources = np.tile(np.arange(37) // 19, 2) + 2 * (np.arange(74) // 37)
    remote = [set(of_token) - {source} for of_token, source in zip(ranks[valid], sources[valid], strict=True)]
    num_results = int((ranks[valid] != sources[valid][:, None]).sum())
    assert sent["rows"] == sum(map(len, remote)) < sent["results"] == num_results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "tokens", "top_k", "local"), [(4, 5, 3, 2), (8, 3, 8, 4), (2, 7, 4, 5), (3, 1, 1, 1)]
)
def test_every_assignment_finds_its_token_among_the_received_rows(ranks, tokens, top_k, local):
    generator = np.random.default_rng(ranks)
    slots = np.argsort(generator.random((ranks, tokens, ranks * local)), axis=2)[..., :top_k]
    slots = np.where(generator.random(slots.shape) < 0.2, ranks * local, slots).astype(np.int32)
    plans = [plan_rank_rows(jnp.asarray(slots), jnp.int32(me), num_slots=ranks * local) for me in range(ranks)]
    for receiver, own in enumerate(plans):
        received = np.full(ranks * tokens, -1)
        for sender, other in enumerate(plans):
            count, begin, at = (int(part[receiver]) for part in other.sent)
            assert (count, begin, at) == tuple(int(part[sender]) for part in own.received)
            received[at : at + count] = sender * tokens + np.asarray(other.token_B)[begin : begin + count]
        wanted = [
            sender * tokens + token
            for sender in range(ranks)
            for slot in range(receiver * local, (receiver + 1) * local)
            for token, _ in np.argwhere(slots[sender] == slot)
        ]
        np.testing.assert_array_equal(received[np.asarray(own.row_A)[: len(wanted)]], wanted)


def config_of(ranks: int, *, slices: int = 1, top_k: int = 8) -> ExpertConfig:
    return ExpertConfig(RouterSpec(128, top_k, True), CPU, SimpleNamespace(num_expert_ranks=ranks, num_slices=slices))


def test_a_row_goes_once_to_a_rank_where_that_sends_fewer_bytes():
    """Between slices, up to 4,096 tokens of all ranks; not where experts hardly share a rank."""
    decides = partial(sends_once, row_bytes=4096)
    assert all(decides(chunk, config=config_of(8, slices=2)) for chunk in (1, 4, 16, 512))
    assert not decides(513, config=config_of(8, slices=2)) and not decides(1, config=config_of(8))
    assert decides(1, config=config_of(32, slices=2)) and decides(4, config=config_of(32, slices=2))
    many = config_of(64, slices=4)
    assert decides(64, config=many) and not decides(128, config=many)
    assert not sends_once(64, 2048, config=many), "gathered slots outweigh such short rows"
    assert not decides(1, config=config_of(8, slices=2, top_k=1))
