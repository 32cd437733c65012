"""Shards appear whole or not at all, whenever the writer dies; what is done is read from them."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from rayserve_moe.rollouts.records import load
from rayserve_moe.rollouts.schema import Failure, Rollout
from rayserve_moe.rollouts.shards import RolloutDirectory, ShardError, shard_files

WRITER = """
import sys
from pathlib import Path
from tests.unit.rollouts.test_shards import rollout
from rayserve_moe.rollouts.shards import RolloutDirectory
with RolloutDirectory(Path(sys.argv[1])) as directory:
    first = sum(len(samples) for versions in directory.done.values() for samples in versions.values())
    for shard in range(first // 2, first // 2 + 2000):
        directory.write_rollouts([rollout(2 * shard), rollout(2 * shard + 1)])
        print(shard, flush=True)
"""


def rollout(number: int, *, version: str = "0") -> Rollout:
    ids = np.arange(number, number + 5, dtype=np.int32)
    return Rollout(
        f"p{number // 2}", number % 2, version, 0, ids, ids, ids.astype(np.float32), ((5, 10, version),), "", "stop"
    )


def test_a_killed_writer_leaves_whole_shards_only(tmp_path: Path) -> None:
    """Kill a writer at any moment, three times: what it said was written is there, whole, and once."""
    chance, num_told = random.Random(0), 0
    for _ in range(3):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            num_told = max(num_told, int(writer.stdout.readline()) + 1)
            time.sleep(chance.uniform(0.0, 0.05))
            os.kill(writer.pid, signal.SIGKILL)
            num_told = max([num_told, *(int(line) + 1 for line in writer.stdout)])
        numbers = sorted(int(prompt[1:]) * 2 + sample for prompt, sample in keys_of(tmp_path))
        assert numbers == list(range(len(numbers))) and len(numbers) in (2 * num_told, 2 * num_told + 2)
    with RolloutDirectory(tmp_path) as directory:
        assert sum(len(directory.samples_of(f"p{i}", None)) for i in range(num_told + 1)) == len(numbers)
    assert not list((tmp_path / "rollouts").glob(".*"))


def keys_of(directory: Path) -> list[tuple[str, int]]:
    loaded = load(directory)
    return list(zip(loaded.prompt_id, loaded.sample_index.tolist(), strict=True))


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Where the disk refuses, no shard appears, the samples do not count as done, and a later write succeeds."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with RolloutDirectory(tmp_path) as directory:
        with monkeypatch.context() as broken:
            broken.setattr(os, call, refuse)
            with pytest.raises(OSError, match="no space"):
                directory.write_rollouts([rollout(0)])
        assert not list((tmp_path / "rollouts").iterdir()) and not directory.samples_of("p0", None)
        directory.write_rollouts([rollout(0)])
        assert directory.samples_of("p0", None) == {0}


def test_half_written_files_are_cleared_away(tmp_path: Path) -> None:
    with RolloutDirectory(tmp_path) as directory:
        directory.write_rollouts([rollout(0)])
    leftover = tmp_path / "rollouts" / ".unfinished-1"
    leftover.write_bytes(b"PAR1 and not much more")
    assert len(load(tmp_path)) == 1
    with RolloutDirectory(tmp_path) as directory:
        assert not leftover.exists() and directory.samples_of("p0", None) == {0}


def test_done_is_told_by_prompt_sample_and_version(tmp_path: Path) -> None:
    with RolloutDirectory(tmp_path) as directory:
        directory.write_rollouts([rollout(0), rollout(1), rollout(0, version="1")])
        directory.write_failures([Failure("bad", 3, "not JSON", 1.0)])
    with RolloutDirectory(tmp_path) as directory:
        assert directory.samples_of("p0", "0") == {0, 1} and directory.samples_of("p0", "1") == {0}
        assert directory.samples_of("p0", None) == {0, 1} and directory.samples_of("p1", None) == set()
        assert directory.failed == {"bad"}
        directory.write_rollouts([rollout(1, version="1")])
    assert [file.name[:15] for file in shard_files(tmp_path / "rollouts")] == ["rollouts-000000", "rollouts-000001"]


def test_one_job_at_a_time(tmp_path: Path) -> None:
    with RolloutDirectory(tmp_path), pytest.raises(ShardError, match="another job"), RolloutDirectory(tmp_path):
        pass


def test_other_settings_are_refused(tmp_path: Path) -> None:
    with RolloutDirectory(tmp_path) as directory:
        directory.agree({"seed": 1, "sampling": {"temperature": 1.0}})
        directory.agree({"seed": 1, "sampling": {"temperature": 1.0}})
        with pytest.raises(ShardError, match="another seed"):
            directory.agree({"seed": 2, "sampling": {"temperature": 1.0}})
        (tmp_path / "job.json").write_text("{")
        with pytest.raises(ShardError, match="not JSON"):
            directory.agree({"seed": 1})


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path) -> None:
    """Wherever it is in the file: neither the reader nor the next job takes the shard, and both name it."""
    with RolloutDirectory(tmp_path) as directory:
        directory.write_rollouts([rollout(0)])
        directory.write_rollouts([rollout(2)])
    shard, _ = shard_files(tmp_path / "rollouts")
    whole = shard.read_bytes()
    for position in range(0, len(whole), 97):
        shard.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises(ShardError, match=shard.name):
            load(tmp_path)
        with pytest.raises(ShardError, match=shard.name), RolloutDirectory(tmp_path):
            pass
    with RolloutDirectory(tmp_path, sets_aside=True) as directory:
        assert not directory.samples_of("p0", None) and directory.samples_of("p1", None) == {0}
        directory.write_rollouts([rollout(0)])
    assert [file.name for file in (tmp_path / "damaged").iterdir()] == [shard.name]
    assert sorted(keys_of(tmp_path)) == [("p0", 0), ("p1", 0)]


def test_shards_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """Without a checksum in its name, and without a column that came later."""
    with RolloutDirectory(tmp_path) as directory:
        directory.write_rollouts([rollout(0)])
    (shard,) = shard_files(tmp_path / "rollouts")
    pq.write_table(
        pq.read_table(shard).drop_columns("prompt_fields"), shard.with_name("rollouts-000000-0123abcd.parquet")
    )
    shard.unlink()
    with RolloutDirectory(tmp_path) as directory:
        directory.write_rollouts([dataclasses.replace(rollout(1), prompt_fields='{"answer": 3}')])
    assert load(tmp_path).prompt_fields == [{}, {"answer": 3}]


@pytest.mark.parametrize("harm", ["truncate", "copy"])
def test_shards_that_are_not_right_are_named(tmp_path: Path, harm: str) -> None:
    """A shard cut short, or put there twice, is not gone on with: the error names it."""
    with RolloutDirectory(tmp_path) as directory:
        directory.write_rollouts([rollout(0)])
    (shard,) = shard_files(tmp_path / "rollouts")
    if harm == "truncate":
        shard.write_bytes(shard.read_bytes()[:-9])
    else:
        shard.with_name("rollouts-000001-copy.parquet").write_bytes(shard.read_bytes())
    with pytest.raises(ShardError, match=r"rollouts-00000\d"), RolloutDirectory(tmp_path):
        pass
    if harm == "truncate":
        shard.unlink()
    else:
        shard.with_name("rollouts-000001-copy.parquet").unlink()
    with RolloutDirectory(tmp_path):
        pass
