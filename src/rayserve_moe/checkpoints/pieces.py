"""Reads of tensor pieces for many threads: once if several devices hold a piece, and ahead if it is remote.

The number of bytes in flight is bounded.
"""

from __future__ import annotations

import math
import os
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np

from rayserve_moe.checkpoints.casting import cast
from rayserve_moe.checkpoints.files import CheckpointFiles
from rayserve_moe.checkpoints.header import DTYPES
from rayserve_moe.checkpoints.remote import NUM_CONNECTIONS, RANGE_BYTES

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class ReadAhead(Generic[Key, Value]):
    """Background reads of keys, in their order, on `num_threads` threads.

    Any thread may call `take`, in about that order, once per listing of a key. Values that were read and not taken hold
    at most `max_bytes` plus one key. Leaving the context cancels all reads that have not begun.
    """

    def __init__(
        self,
        read: Callable[[Key], Value],
        keys: Iterable[tuple[Key, int]],
        *,
        num_threads: int,
        max_bytes: int,
    ) -> None:
        self._read, self._keys, self._max_bytes = read, iter(keys), max_bytes
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="read-ahead")
        self._begun: dict[Key, deque[tuple[Future[Value], int]]] = defaultdict(deque)
        self._changed = threading.Condition()
        self._num_bytes = 0
        self.max_bytes_seen = 0

    def take(self, key: Key) -> Value:
        """Return the value of a key once it is read; an error of its read is raised here."""
        with self._changed:
            while not self._begun[key]:
                self._begin_more(at_least_one=True)
            future, num_bytes = self._begun[key].popleft()
        try:
            return future.result()
        finally:
            with self._changed:
                self._num_bytes -= num_bytes
                self._begin_more()

    def _begin_more(self, *, at_least_one: bool = False) -> None:
        """Start reads within the bound, and a single read beyond it with `at_least_one`. The caller holds the lock.

        Raises KeyError if `at_least_one` and no key is left.
        """
        while self._num_bytes < self._max_bytes or at_least_one:
            key, num_bytes = next(self._keys, (None, 0))
            if key is None:
                if at_least_one:
                    raise KeyError("a piece that was not listed")
                return
            at_least_one = False
            self._num_bytes += num_bytes
            self.max_bytes_seen = max(self.max_bytes_seen, self._num_bytes)
            self._begun[key].append((self._pool.submit(self._read, key), num_bytes))

    def __enter__(self) -> Self:
        with self._changed, ExitStack() as undo:
            undo.callback(self._pool.shutdown, cancel_futures=True)
            self._begin_more()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)


KEPT_BYTES = 4 << 30
"""Maximum bytes kept for later devices; beyond that a slice is read again, most likely from the page cache."""
AHEAD_BYTES = NUM_CONNECTIONS * RANGE_BYTES
"""Maximum bytes of a remote checkpoint that are read and not taken yet."""

MAX_WAITING = 256
"""Maximum number of parts that wait for a thread."""

Range = tuple[int, int]
Region = tuple[Range, ...]
Piece = tuple[str, Region]
"""A tensor's name, and `[from, to)` for each of its dimensions in the file."""
Ahead = ReadAhead[Piece, np.ndarray]


def as_read(files: CheckpointFiles, piece: Piece) -> Piece:
    """Return the piece to read for `piece`: whole rows of a remote tensor, which are contiguous and read once."""
    name, region = piece
    if not files.is_remote or name in files.quantized or not region:
        return piece
    return name, (*region[:-1], (0, files.tensors[name].shape[-1]))


def _fail(future: Future[np.ndarray], _: Any, error: BaseException | None, *__: object) -> None:
    if error is not None:
        future.set_exception(error)


def _num_values(piece: Piece) -> int:
    return math.prod(stop - start for start, stop in piece[1])


def read_piece(files: CheckpointFiles, piece: Piece) -> np.ndarray:
    """Read a piece in the file's orientation and dtype."""
    name, region = piece
    return files.read(name, tuple(slice(*bounds) for bounds in region))


class PieceSource(Protocol):
    """Source of the pieces of parameters."""

    def take(self, piece: Piece) -> np.ndarray:
        """Return a piece in the file's orientation."""
        ...


class PieceReader:
    """Reader of pieces in any order, from any thread. It keeps pieces needed again, in the smaller of two dtypes.

    `wanted` lists results of `as_read`, once per later `take`.
    """

    def __init__(
        self, files: CheckpointFiles, wanted: Iterable[Piece], *, dtype: np.dtype, ahead: Ahead | None = None
    ) -> None:
        self._files, self._dtype, self._ahead = files, dtype, ahead
        self._times_wanted = Counter(wanted)
        self._kept: dict[Piece, Future[np.ndarray]] = {}
        self._were_read: set[Piece] = set()
        self._changing = threading.Lock()
        self.kept_bytes = 0

    def take(self, piece: Piece) -> np.ndarray:
        """Return a piece in the file's orientation, in the smaller of the file's and the parameter's dtypes."""
        whole = as_read(self._files, piece)
        values = self._take(whole)
        if whole == piece:
            return values
        (first, last), (start, _) = piece[1][-1], whole[1][-1]
        return values[..., first - start : last - start]

    def _take(self, piece: Piece) -> np.ndarray:
        with self._changing:
            self._times_wanted[piece] -= 1
            is_wanted = self._times_wanted[piece] > 0
            kept = self._kept.get(piece)
            mine: Future[np.ndarray] | None = None
            if kept is None and is_wanted and self.kept_bytes + self._num_bytes(piece) <= KEPT_BYTES:
                mine = self._kept[piece] = Future()
                self.kept_bytes += self._num_bytes(piece)
            elif kept is not None and not is_wanted:
                del self._kept[piece]
                self.kept_bytes -= self._num_bytes(piece)
            is_first = piece not in self._were_read
            self._were_read.add(piece)
        if kept is not None:
            return kept.result()
        with ExitStack() as undo:
            if mine is not None:
                undo.push(partial(_fail, mine))
            values = self._read(piece, is_first=is_first)
        if mine is not None:
            mine.set_result(values)
        return values

    def _read(self, piece: Piece, *, is_first: bool) -> np.ndarray:
        values = self._ahead.take(piece) if self._ahead and is_first else read_piece(self._files, piece)
        return cast(values, self._dtype) if values.itemsize > self._dtype.itemsize else values

    def _num_bytes(self, piece: Piece) -> int:
        return _num_values(piece) * self._dtype.itemsize


@dataclass(frozen=True)
class OpenedPieces:
    """The threads that fill shards, and the read-ahead of a remote checkpoint."""

    pool: ThreadPoolExecutor
    ahead: Ahead | None


@contextmanager
def opened_pieces(files: CheckpointFiles, pieces: Iterable[Piece], *, num_threads: int) -> Generator[OpenedPieces]:
    """Open the threads of a load that takes `pieces`, and begin to read the pieces of a remote checkpoint.

    A `num_threads` of 0 is a thread per core.
    """
    with ThreadPoolExecutor(num_threads or len(os.sched_getaffinity(0)), thread_name_prefix="shards") as pool:
        if not files.is_remote:
            yield OpenedPieces(pool, None)
            return
        sized = ((piece, _num_values(piece) * DTYPES[files.tensors[piece[0]].dtype].itemsize) for piece in pieces)
        with ReadAhead(
            lambda piece: read_piece(files, piece), sized, num_threads=NUM_CONNECTIONS, max_bytes=AHEAD_BYTES
        ) as ahead:
            yield OpenedPieces(pool, ahead)


def fill_all(pool: ThreadPoolExecutor, parts: Iterable[Region], *, fill: Callable[[Region], None]) -> None:
    """Fill parts in their order on all threads. The first error is raised once no part is being filled."""
    begun: deque[Future[None]] = deque()
    try:
        for part in parts:
            begun.append(pool.submit(fill, part))
            if len(begun) > MAX_WAITING:
                begun.popleft().result()
        while begun:
            begun.popleft().result()
    finally:
        for future in begun:
            future.cancel()
        for future in begun:
            if not future.cancelled():
                future.exception()
