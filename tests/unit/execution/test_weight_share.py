"""A share of weights outlives whoever wrote it, and is what it says that it is, or is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from rayserve_moe.checkpoints.open_shares import SharePlace, WeightShare, open_share
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.execution.weights import tensor_staging
from rayserve_moe.execution.weights.share import ShareError, read_share, write_share
from tests.unit.execution.test_staged_weights import NOTHING, PLENTY, assert_weights, loaded


@pytest.fixture(scope="module")
def runner(core_checkpoint: Path) -> HostRunner:
    return loaded(core_checkpoint)


@pytest.mark.parametrize("spare", [PLENTY, NOTHING])
@pytest.mark.parametrize(("mesh", "num_redundant"), [((1, 1), 0), ((2, 2), 4)])
def test_a_share_holds_what_is_staged_and_where_experts_lie(
    core_checkpoint: Path, other_checkpoint: Path, mesh: tuple[int, int], num_redundant: int, spare: int
) -> None:
    """Staged on the devices, or in host memory, and on several devices that hold parts of the same."""
    writer = loaded(core_checkpoint, mesh=mesh, num_redundant=num_redundant)
    writer.staged.read(str(other_checkpoint), writer.placement.expert_of_slot, spare=spare)
    share = write_share("b", writer.weights, staged=writer.staged.ready)
    reader = loaded(core_checkpoint, mesh=mesh, num_redundant=num_redundant)
    reader.load(share=open_share(share.place))
    share.close()
    assert_weights(reader, other_checkpoint, reader.placement)
    for ours, theirs in zip(*(jax.tree.leaves(each.weights.maps) for each in (reader, writer)), strict=True):
        assert ours.sharding == theirs.sharding
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_what_is_not_staged_is_shared_as_it_serves(runner: HostRunner, core_checkpoint: Path) -> None:
    share = write_share("a", runner.weights, staged={})
    runner.weights = read_share(share, runner.served)
    assert_weights(runner, core_checkpoint, runner.placement)


def test_a_share_outlives_its_writer() -> None:
    code = "import os; f = os.memfd_create('a'); os.write(f, b'kept'); print(f, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        place = SharePlace("a", process.pid, int(process.stdout.readline()))
        kept = open_share(place)
        process.kill()
    assert os.pread(kept.fd, 4, 0) == b"kept" and kept.num_bytes == 4
    with pytest.raises(OSError, match="No such file"):
        open_share(place)


def test_a_share_of_other_weights_or_a_damaged_one_is_refused(runner: HostRunner) -> None:
    share = write_share("a", runner.weights, staged={})
    with pytest.raises(ShareError, match="of the weights a, not of b"):
        read_share(WeightShare("b", share.fd), runner.served)
    held = bytearray(os.pread(share.fd, share.num_bytes, 0))
    for place, match in ((5000, "damaged in"), (len(held) - 5, "its table")):
        broken = os.memfd_create("broken")
        os.write(broken, held[:place] + bytes([held[place] ^ 255]) + held[place + 1 :])
        with pytest.raises(ShareError, match=match):
            read_share(WeightShare("a", broken), runner.served)
    with pytest.raises(PermissionError):
        os.pwrite(share.fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(share.fd, 1)


def test_a_share_of_another_layout_is_refused(runner: HostRunner, core_checkpoint: Path) -> None:
    spread = loaded(core_checkpoint, mesh=(1, 2))
    with pytest.raises(ShareError, match="has no part"):
        read_share(write_share("a", runner.weights, staged={}), spread.served)


def test_where_memory_does_not_hold_both_nothing_is_kept(
    runner: HostRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tensor_staging, "memory_available", lambda: runner.staged.bytes_per_device)
    assert runner.tensors.share("a") is None
    assert "lost with their host" in caplog.text
    monkeypatch.setattr(tensor_staging, "memory_available", lambda: PLENTY)
    assert runner.tensors.share("a") is not None
