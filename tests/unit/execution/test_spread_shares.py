"""Shares of a group serve one of more or fewer hosts: every value comes to where a checkpoint would have it."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.checkpoints.names import walk
from rayserve_moe.checkpoints.open_shares import ShareBytes, WeightShare
from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.config.settings import CompileSettings
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.execution.weights import share as weight_share
from rayserve_moe.execution.weights.placing import load_weights, parameter_tree
from rayserve_moe.execution.weights.share import ShareError, write_share
from tests.support.experts.placements import random_placement
from tests.support.kernels.native_kernels import need_native_kernels
from tests.support.models.core import NATIVE_CORE_CONFIG
from tests.unit.execution.test_staged_weights import loaded


def shares_of(writer: HostRunner, monkeypatch: pytest.MonkeyPatch, *, num_hosts: int) -> list[WeightShare]:
    """As many shares as hosts: every one has what lies on its devices, and some of it others have too."""
    blocks = list(weight_share._blocks(writer.weights, {}))
    whole = {path for path, region, _ in blocks if sum(each[0] == path for each in blocks) == 1}
    shares = []
    for host in range(num_hosts):
        own = [each for number, each in enumerate(blocks) if number % num_hosts == host or each[0] in whole]
        monkeypatch.setattr(weight_share, "_blocks", lambda *_, own=own: iter(own))
        shares.append(write_share("a", writer.weights, staged={}, by_slot=slot_paths(writer)))
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


def slot_paths(runner: HostRunner) -> set[tuple[str, ...]]:
    """Return the paths of expert parameters."""
    tree = parameter_tree(runner.config, dtype=runner.served.dtype)
    return {path for path, spec in walk(tree) if spec.num_experts}


def test_of_the_experts_of_other_hosts_only_those_that_belong_here_are_read(
    core_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host of two had a quarter of all experts: it reads another quarter from the others."""
    writer = loaded(core_checkpoint, mesh=(4, 1))
    shares, counts = shares_of(writer, monkeypatch, num_hosts=4), []

    def counted(share: WeightShare) -> ShareBytes:
        def read(start: int, stop: int) -> np.ndarray:
            counts.append(stop - start)
            return share.read(start, stop)

        return ShareBytes(share.token, share.num_bytes, read)

    held = [weight_share._Held(each) for each in (shares[1], *map(counted, shares))]
    counts.clear()
    own_order = writer.placement.expert_of_slot
    tree = parameter_tree(writer.config, dtype=writer.served.dtype)
    for path, spec in [each for each in walk(tree) if each[1].num_experts]:
        whole = np.asarray(writer.weights.params[path[0]][path[1]])
        region = tuple((0, size if dim != 1 else size // 2) for dim, size in enumerate(whole.shape))
        (first, stop), num_slots = held[0].regions(path)[0][1], whole.shape[1]
        half = np.arange(first, 2 * stop - first) % num_slots
        experts = own_order[:, half], own_order
        found = weight_share._gathered_experts(held, path, spec=spec, region=region, experts_MP=experts)
        np.testing.assert_array_equal(found, whole[:, half])
        assert sum(counts) == whole.nbytes // 4
        counts.clear()
    for share in shares:
        share.close()


def test_hosts_load_experts_where_a_placement_wants_them(core_checkpoint: Path) -> None:
    """From a checkpoint and from shares of a group of another size."""
    given = loaded(core_checkpoint, mesh=(3, 1), num_redundant=4)
    placement, writer = random_placement(given.placement, 7), loaded(core_checkpoint, mesh=(2, 1))
    runner = HostRunner(given.served.settings, given.config.plan, placement=placement)
    share = write_share("a", writer.weights, staged={}, by_slot=slot_paths(writer))
    files = open_checkpoint(core_checkpoint)
    wanted = load_weights(files, runner.config, dtype=runner.served.dtype, placement=placement)
    for spread in ((), (share,)):
        runner.load(spread=spread)
        for found, expected in zip(*map(jax.tree.leaves, (runner.weights, wanted)), strict=True):
            np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    assert runner.placement is placement
    share.close()


@pytest.mark.parametrize("num_redundant", [0, 1])
def test_weights_that_native_kernels_packed_are_cut_for_no_other_group(num_redundant: int, tmp_path: Path) -> None:
    """A group with the same layout reads them. A group with another layout raises an error and keeps its weights."""
    need_native_kernels()
    path = write_checkpoint(tmp_path, NATIVE_CORE_CONFIG)
    native = CompileSettings(cpu_kernels="native")
    writer, alike, other = (
        loaded(path, mesh=mesh, compiling=native, num_redundant=num_redundant) for mesh in ((1, 1), (1, 1), (2, 1))
    )
    share = write_share("a", writer.weights, staged={}, by_slot=slot_paths(writer))
    before = jax.tree.leaves(other.weights)
    with pytest.raises(ShareError, match="is packed for the kernels of one device, and cannot be cut"):
        other.load(spread=(share,))
    assert all(found is kept for found, kept in zip(jax.tree.leaves(other.weights), before, strict=True))
    alike.load(share=share)
    for found, expected in zip(*(jax.tree.leaves(each.weights) for each in (alike, writer)), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    share.close()


def test_a_damaged_expert_is_not_taken(core_checkpoint: Path) -> None:
    writer = loaded(core_checkpoint, mesh=(2, 1))
    share = write_share("a", writer.weights, staged={}, by_slot=slot_paths(writer))
    path = min(slot_paths(writer))
    held = weight_share._Held(share)
    region = held.regions(path)[0]
    offset, checksums, _ = held._entry(path, region)
    raw = share.read(0, share.num_bytes)
    raw[offset] ^= 1
    damaged = weight_share._Held(ShareBytes("a", len(raw), lambda start, stop: raw[start:stop].copy()))
    dtype = writer.served.dtype
    at = np.array([0]), np.array([1])
    np.testing.assert_array_equal(
        damaged.take_slots(path, region, at=at, dtype=dtype), held.take_slots(path, region, at=at, dtype=dtype)
    )
    assert len(checksums) > 1
    with pytest.raises(ShareError, match="damaged"):
        damaged.take_slots(path, region, at=(np.array([0]), np.array([0])), dtype=dtype)
    share.close()


def nothing_of(monkeypatch: pytest.MonkeyPatch, writer: HostRunner) -> WeightShare:
    monkeypatch.setattr(weight_share, "_blocks", lambda *_: iter(()))
    return write_share("a", writer.weights, staged={})
