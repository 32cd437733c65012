"""The output directory of a job: Parquet shards that appear whole or not at all, and an index of their samples.

    DIR/job.json              settings that all samples depend on
    DIR/rollouts/*.parquet    samples, rows of `SCHEMA`
    DIR/errors/*.parquet      prompts that were given up, rows of `ERRORS_SCHEMA`
    DIR/damaged/*.parquet     shards that were set aside because their bytes do not match the checksum in their names
    DIR/summary.json          of the last run

A shard is written under a dotted name, synced, and renamed. Its name has the CRC-32 of its bytes, so that damage is
detected. Only unfinished files of a killed job are ever changed or removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from rayserve_moe.rollouts.schema import (
    ERRORS_SCHEMA,
    SCHEMA,
    UNCOMPRESSED,
    Failure,
    Rollout,
    failure_table,
    rollout_table,
)

ROLLOUTS, ERRORS, DAMAGED = "rollouts", "errors", "damaged"
_CHECKSUM = re.compile(r"-crc32-([0-9a-f]{8})\.parquet$")
_BLOCK_BYTES = 1 << 20
GROUP_BYTES = 8 << 20
"""Size of row groups, the smallest part of a shard that is read."""
_SUFFIX, _UNFINISHED = ".parquet", ".unfinished-"
_COMPRESSION = {name: "NONE" if name in UNCOMPRESSED else "ZSTD" for name in (*SCHEMA.names, *ERRORS_SCHEMA.names)}
_REPETITIVE = ["weight_version", "finish_reason", "routing_dtype"]


class ShardError(ValueError):
    """A directory that this job must not write to, or shards that cannot be read."""


def shard_files(directory: Path) -> list[Path]:
    """Return finished shards in the order they were written."""
    return sorted(file for file in directory.glob(f"*{_SUFFIX}") if not file.name.startswith("."))


class RolloutDirectory:
    """The only writer of a directory. Enter it to lock it; a lock ends with its process.

    `done` has the indices of existing samples by prompt and weight version; `failed` the prompts that were given up.
    A damaged shard raises ShardError, or with `sets_aside` is moved to `damaged`, and its samples are not done.
    """

    def __init__(self, directory: Path, *, sets_aside: bool = False) -> None:
        self.directory = directory
        self.sets_aside = sets_aside
        self.done: dict[str, dict[str, set[int]]] = {}
        self.failed: set[str] = set()
        self.num_shards = {ROLLOUTS: 0, ERRORS: 0}
        self._lock = FileLock(directory / ".lock")

    def __enter__(self) -> Self:
        for part in (ROLLOUTS, ERRORS):
            (self.directory / part).mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ShardError(f"{self.directory}: another job writes here") from error
        with contextlib.ExitStack() as undo:
            undo.callback(self._lock.release)
            self._take_stock()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Record the settings that all samples depend on. Raises ShardError if they differ from an earlier run's."""
        file = self.directory / "job.json"
        if not file.exists():
            self.write_json(file.name, facts)
            return
        try:
            recorded = json.loads(file.read_bytes())
        except ValueError as error:
            raise ShardError(f"{file}: not JSON") from error
        differing = [name for name in facts if not isinstance(recorded, dict) or recorded.get(name) != facts[name]]
        if differing:
            raise ShardError(
                f"{self.directory}: an earlier run has written samples with another {', '.join(differing)} "
                "(see job.json): use another directory"
            )

    def samples_of(self, prompt_id: str, version: str | None) -> set[int]:
        """Return the existing sample indices of a prompt under a weight version, or under any if None."""
        by_version = self.done.get(prompt_id, {})
        return set().union(*by_version.values()) if version is None else set(by_version.get(version, ()))

    def write_rollouts(self, rollouts: list[Rollout]) -> None:
        """Add a shard; on return it is on disk and its samples are done."""
        self._write(ROLLOUTS, rollout_table(rollouts))
        for rollout in rollouts:
            is_new = self._record(rollout.prompt_id, rollout.weight_version, rollout.sample_index)
            assert is_new, "a sample was written twice"

    def write_failures(self, failures: list[Failure]) -> None:
        """Add a shard of prompts that were given up."""
        self._write(ERRORS, failure_table(failures))
        self.failed.update(failure.prompt_id for failure in failures)

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a small file of the directory, whole or not at all."""
        text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        _put(self.directory, lambda file: file.write_text(text, encoding="utf-8"), name_of=lambda _: name)

    def _record(self, prompt_id: str, version: str, sample: int) -> bool:
        """Record a sample as done. Return False if it was done already."""
        samples = self.done.setdefault(prompt_id, {}).setdefault(version, set())
        is_new = sample not in samples
        samples.add(sample)
        return is_new

    def _take_stock(self) -> None:
        for part in (ROLLOUTS, ERRORS):
            for leftover in (self.directory / part).glob(f"{_UNFINISHED}*"):
                leftover.unlink()
        shards = {part: shard_files(self.directory / part) for part in (ROLLOUTS, ERRORS)}
        self.num_shards = {part: len(files) for part, files in shards.items()}
        if damaged := damaged_shards([*shards[ROLLOUTS], *shards[ERRORS]]):
            self._set_aside(damaged)
            shards = {part: [file for file in files if file not in damaged] for part, files in shards.items()}
        for file in shards[ROLLOUTS]:
            keys = _read(file, ["prompt_id", "weight_version", "sample_index"])
            for key in zip(*(column.to_pylist() for column in keys.columns), strict=True):
                if not self._record(*key):
                    raise ShardError(f"{file}: holds a sample that another shard also has: remove one of them")
        for file in shards[ERRORS]:
            self.failed.update(_read(file, ["prompt_id"])["prompt_id"].to_pylist())

    def _set_aside(self, damaged: Sequence[Path]) -> None:
        if not self.sets_aside:
            names = ", ".join(map(str, damaged))
            raise ShardError(f"damaged shards: {names}; --resample-damaged sets them aside and resamples them")
        (self.directory / DAMAGED).mkdir(exist_ok=True)
        for file in damaged:
            file.rename(self.directory / DAMAGED / file.name)

    def _write(self, part: str, table: pa.Table) -> None:
        """Write a shard. Its name has a number, so that names sort, and the checksum."""
        stem = f"{part}-{self.num_shards[part]:06d}"
        _put(
            self.directory / part,
            lambda file: pq.write_table(
                table,
                file,
                compression={column: _COMPRESSION[column] for column in table.column_names},
                use_dictionary=[column for column in _REPETITIVE if column in table.column_names],
                row_group_size=max(1, table.num_rows * GROUP_BYTES // max(table.nbytes, GROUP_BYTES)),
            ),
            name_of=lambda file: f"{stem}-crc32-{_crc32_of(file):08x}{_SUFFIX}",
        )
        self.num_shards[part] += 1


def altered_shards(files: Sequence[Path]) -> list[Path]:
    """Return the files that do not match the checksum in their names or cannot be read; read on several threads."""
    with ThreadPoolExecutor() as threads:
        return [file for file, intact in zip(files, threads.map(_is_intact, files), strict=True) if not intact]


def damaged_shards(files: Sequence[Path]) -> list[Path]:
    """Return the files that `altered_shards` finds or that are not Parquet files, in order."""
    wrong = set(altered_shards(files))
    return [file for file in files if file in wrong or not _is_parquet(file)]


def _is_intact(file: Path) -> bool:
    """Return True if the bytes match the checksum in the name, or a readable file has no checksum."""
    named = _CHECKSUM.search(file.name)
    try:
        return named is None or _crc32_of(file) == int(named[1], 16)
    except OSError:
        return False


def _crc32_of(file: Path) -> int:
    crc32 = 0
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK_BYTES):
            crc32 = zlib.crc32(block, crc32)
    return crc32


def _put(directory: Path, write: Callable[[Path], Any], *, name_of: Callable[[Path], str]) -> None:
    """Create a file in `directory` with `write`, sync it, and rename it to the name that `name_of` returns."""
    unfinished = directory / f"{_UNFINISHED}{uuid.uuid4().hex}"
    try:
        write(unfinished)
        with unfinished.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(unfinished, directory / name_of(unfinished))
    finally:
        unfinished.unlink(missing_ok=True)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_parquet(file: Path) -> bool:
    try:
        pq.read_metadata(file)
    except (pa.ArrowException, OSError):
        return False
    return True


def _read(file: Path, columns: list[str]) -> pa.Table:
    try:
        with pq.ParquetFile(file) as opened:
            table = opened.read(columns)
    except (pa.ArrowException, OSError) as error:
        raise ShardError(f"{file}: not a readable shard: {error}") from error
    if missing := set(columns) - set(table.column_names):
        raise ShardError(f"{file}: not a shard: it has no {', '.join(sorted(missing))}")
    return table
