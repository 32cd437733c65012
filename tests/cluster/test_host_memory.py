"""What a replica holds in memory beside its workers: a sealed copy of what was sent, as long as that serves, and no
longer than the replica lives, whatever ends it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from safetensors.numpy import load_file

from benchmarks.host_memory import sealed_shares
from rayserve_moe.checkpoints.bucket import SentBucket, SentTensor
from rayserve_moe.cluster.replica_engine import ReplicaEngine, start_replica_engine
from rayserve_moe.config.load import settings_from
from rayserve_moe.engine.control import WeightOrder
from rayserve_moe.engine.updates.tensors import BucketOrder
from tests.cluster.conftest import SETTINGS, until
from tests.cluster.test_hosts import assert_same, complete
from tests.cluster.test_rebuild import TIMEOUT_S, pids, send_all

pytestmark = pytest.mark.slow
BOUNDS = {"max_rebuilds_in_10_minutes": 1000, "max_rebuilds_in_hour": 1000}
TEMPORARY = ("/dev/shm/", "/tmp/")
PROGRAMS = {"executables", "native"}


class HeldShares:
    """Sealed files that processes of a replica have open."""

    def __init__(self, engine: ReplicaEngine) -> None:
        self._engine = engine
        self.most = 0

    def now(self) -> set[tuple[int, int]]:
        """Device and inode of each."""
        return set(sealed_shares(self._pids()))

    def _pids(self) -> list[int]:
        """Of the workers, and of the keepers."""
        keepers = list(self._engine.executor.sources.keepers.actors.values())
        return [*pids(self._engine), *ray.get([each.__ray_call__.remote(lambda _: os.getpid()) for each in keepers])]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the most at once meanwhile, of processes that are there now."""
        watched, is_over, self.most = self._pids(), threading.Event(), 0

        def watch() -> None:
            while not is_over.wait(0.002):
                self.most = max(self.most, len(sealed_shares(watched)))

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


@pytest.mark.parametrize(("keeps", "most"), [("auto", 2), ("before_swap", 2), ("after_swap", 1)])
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_each_host_holds_one_sealed_copy_of_what_was_sent_and_a_second_before_a_swap_alone(
    num_hosts: int, keeps: str, most: int, raylets: int, checkpoint: Path, other_checkpoint: Path, tmp_path: Path
) -> None:
    """While another update comes, too. Workers that follow load it, and answer as those before them."""
    values = {"model_path": str(checkpoint), "num_hosts": num_hosts, "compile_cache": tmp_path, "devices_per_host": 2}
    engine = start_replica_engine(settings_from({**SETTINGS, **values, **BOUNDS, "keep_sent_weights": keeps}))
    held, recovery, sources = HeldShares(engine), engine.loop.recovery, engine.executor.sources
    assert recovery is not None
    try:
        assert not held.now(), "a checkpoint is on a disk"
        send_all(engine, checkpoint, "first")
        until(lambda: sources.serving.is_there, "they are not kept")
        first, answered = held.now(), complete(engine.loop, engine.tokenizer)
        assert len(first) == num_hosts
        with held.watched():
            send_all(engine, other_checkpoint, "second")
            until(lambda: sources.serving.is_there, "the others are not kept")
        assert held.most == most * num_hosts
        until(lambda: len(held.now()) == num_hosts, "copies of other weights stay")
        second = held.now()
        assert not first & second
        wanted = complete(engine.loop, engine.tokenizer)
        assert [each.token_ids for each in wanted] != [each.token_ids for each in answered]
        os.kill(pids(engine)[-1], signal.SIGKILL)
        until(lambda: recovery.num_rebuilds == 1 and recovery.progress is None, "the workers are not replaced")
        assert held.now() == second, "the keepers' own"
        assert_same(complete(engine.loop, engine.tokenizer), wanted)
        assert engine.loop.control.update_weights(WeightOrder(str(checkpoint), "0")).result(TIMEOUT_S).success
        until(lambda: not held.now(), "copies stay of weights that a disk has")
    finally:
        engine.shutdown()


def replica_class() -> Any:
    """A replica in a process of its own, as Serve has it: what it starts is owned by it."""

    class Replica:
        def __init__(self, values: dict[str, Any], path: Path) -> None:
            self.engine = start_replica_engine(settings_from(values))
            tensors = tuple(SentTensor(name, each) for name, each in load_file(path / "model.safetensors").items())
            order = BucketOrder("sent", WeightOrder("", "sent"), 0, is_last=True)
            assert self.engine.loop.control.tensors.stage(SentBucket(tensors), order).result(300.0).success

        def family(self) -> list[int]:
            """Its own process, and those of its workers, that of a standby included, and of its keepers."""
            executor = self.engine.executor
            actors = [*executor.workers, *executor.sources.keepers.actors.values()]
            actors += executor._standbys._waiting.values()
            return [os.getpid(), *ray.get([each.__ray_call__.remote(lambda _: os.getpid()) for each in actors])]

    return ray.remote(Replica)


def temporary_files(family: list[int]) -> set[Path]:
    """Return named files in temporary folders that these processes have open or mapped.

    Files of Ray, of an environment and of a checkout are ignored.
    """
    found = set()
    for pid in family:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
        mapped = [line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6]
        found |= {Path(path) for path in [*mapped, *map(os.readlink, Path(f"/proc/{pid}/fd").iterdir())]}
    named = {path for path in found if str(path).startswith(TEMPORARY) and path.exists()}
    installed = {Path(sys.prefix).resolve(), Path(__file__).resolve().parents[2]}
    return {path for path in named if "/ray/" not in str(path) and not installed & {*path.resolve().parents}}


def test_nothing_is_left_of_a_replica_that_is_killed_but_programs(
    raylets: int, checkpoint: Path, other_checkpoint: Path, tmp_path: Path
) -> None:
    temporary, cache = tmp_path / "temporary", tmp_path / "cache"
    temporary.mkdir()
    own = {"TMPDIR": str(temporary), "XDG_CACHE_HOME": str(cache)}
    values = {**SETTINGS, "model_path": str(checkpoint), "num_hosts": 1, "standby_workers": True}
    replica = replica_class().options(num_cpus=0, runtime_env={"env_vars": own}).remote(values, other_checkpoint)
    ray.get(replica.family.remote(), timeout=TIMEOUT_S)
    until(lambda: len(ray.get(replica.family.remote())) == 4, "replica, worker, keeper and standby")
    family = ray.get(replica.family.remote())
    for pid in family:
        assert f"TMPDIR={temporary}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    files, shares = temporary_files(family), set(sealed_shares(family))
    assert len(shares) == 1
    os.kill(family[0], signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family), "processes outlive their replica")
    everybody = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    assert not shares & set(sealed_shares(everybody))
    assert not [path for path in files if path.exists() and tmp_path not in path.parents]
    assert not [*temporary.rglob("*")]
    assert {path.name for path in (cache / "rayserve_moe").iterdir()} <= PROGRAMS
