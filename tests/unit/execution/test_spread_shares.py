"""Shares of a group serve one of more or fewer hosts: every value comes to where a checkpoint would have it."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.checkpoints.open_shares import WeightShare
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.execution.weights import share as weight_share
from rayserve_moe.execution.weights.placing import load_weights
from rayserve_moe.execution.weights.share import ShareError, write_share
from tests.support.experts.placements import random_placement
from tests.unit.execution.test_staged_weights import loaded


def shares_of(writer: HostRunner, monkeypatch: pytest.MonkeyPatch, *, num_hosts: int) -> list[WeightShare]:
    """As many shares as hosts: every one has what lies on its devices, and some of it others have too."""
    blocks = list(weight_share._blocks(writer.weights, {}))
    whole = {path for path, region, _ in blocks if sum(each[0] == path for each in blocks) == 1}
    shares = []
    for host in range(num_hosts):
        own = [each for number, each in enumerate(blocks) if number % num_hosts == host or each[0] in whole]
        monkeypatch.setattr(weight_share, "_blocks", lambda *_, own=own: iter(own))
        shares.append(write_share("a", writer.weights, staged={}))
    return shares


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("before", "now"),
    [((4, 1), (3, 1)), ((3, 1), (4, 1)), ((4, 1), (1, 1)), ((1, 1), (2, 1)), ((4, 2), (3, 2)), ((2, 2), (1, 2))],
)
@pytest.mark.parametrize("is_moved", [False, True])
def test_what_a_group_of_another_size_has_read_is_what_a_checkpoint_holds(
    before: tuple[int, int],
    now: tuple[int, int],
    is_moved: bool,
    core_checkpoint: Path,
    other_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Experts that had moved, and have several slots, are found where they lay; padding stays zero."""

    def sized(mesh: tuple[int, int]) -> HostRunner:
        num_experts, num_ranks = 8, mesh[0] * mesh[1]
        more = num_ranks if is_moved and num_ranks > 1 else 0
        return loaded(core_checkpoint, mesh=mesh, num_redundant=-num_experts % num_ranks + more)

    writer, reader = sized(before), sized(now)
    assert writer.served.config.spec.router.num_experts == 8
    placement = random_placement(writer.placement, 5) if is_moved else writer.placement
    files = open_checkpoint(other_checkpoint)
    writer.weights = load_weights(
        files, writer.config, dtype=writer.served.dtype, placement=placement, may_change=is_moved
    )
    shares = shares_of(writer, monkeypatch, num_hosts=before[0])
    reader.load(spread=shares)
    wanted = load_weights(files, reader.config, dtype=reader.served.dtype, placement=reader.placement)
    for found, expected in zip(*map(jax.tree.leaves, (reader.weights, wanted)), strict=True):
        assert (found.shape, found.dtype, found.sharding) == (expected.shape, expected.dtype, expected.sharding)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    with pytest.raises(ShareError, match="no share has all of"):
        reader.load(spread=shares[1:] if len(shares) > 1 else [nothing_of(monkeypatch, writer)])
    for share in shares:
        share.close()


def nothing_of(monkeypatch: pytest.MonkeyPatch, writer: HostRunner) -> WeightShare:
    monkeypatch.setattr(weight_share, "_blocks", lambda *_: iter(()))
    return write_share("a", writer.weights, staged={})
