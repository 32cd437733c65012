"""Safe access to files written by others: opening and parsing them cannot stop or block the process.

Only regular files are opened, and opening never waits for a writer. Bytes are copied, never mapped, so that a shrinking
file raises an error instead of a signal. JSON is strict: finite numbers, unique keys, bounded length and depth.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

MAX_JSON_BYTES = 32 << 20
"""Maximum size of parsed JSON: far above a checkpoint of a hundred thousand tensors."""
MAX_BYTES_AT_ONCE = 16 << 20
"""Bytes copied between two checks for cancellation."""
MAX_MESSAGE_LENGTH = 300
TRAINED = "trained"
TRAINED_NAMES = ("calculator",)
"""Checkpoints in the package, named as in `trained:calculator`."""

_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_CLIMBS = re.compile(r"/\.{1,2}(/|$)|%|\\")
"""Matches path parts that may lead out of a URL's folder."""
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def is_url(path: str) -> bool:
    """Return True for a URL such as `gs://bucket/folder`."""
    return _URL.match(path) is not None


class GivenFileError(ValueError):
    """Error for an unusable file; its message omits the file's name."""


@dataclass(frozen=True)
class Reach:
    """Files that may be opened."""

    roots: tuple[str, ...] = ()
    """Permitted folders and URLs after following links; empty permits everything."""
    given_up: threading.Event = field(default_factory=threading.Event)
    """Cancellation flag: once set, reads raise."""

    def covers(self, path: str | Path) -> bool:
        """Return True if a path or URL lies below a root, or if `roots` is empty."""
        if is_url(str(path)):
            below = any(str(path).startswith((f"{root.rstrip('/')}/", f"{root}@")) for root in self.roots)
            return not self.roots or (below and not _CLIMBS.search(str(path)))
        real = Path(os.path.realpath(path))
        roots = (os.path.realpath(root) for root in self.roots if not is_url(root))
        return not self.roots or any(real.is_relative_to(root) for root in roots)

    def check_wanted(self) -> None:
        """Raise GivenFileError if reading is cancelled."""
        if self.given_up.is_set():
            raise GivenFileError("reading was given up")


@dataclass(frozen=True)
class FileStamp:
    """Identity of a file's content: it differs after a write, and for another file under the same name."""

    device: int
    inode: int
    num_bytes: int
    changed_ns: int


@dataclass(frozen=True)
class GivenFile:
    """Open regular file."""

    descriptor: int
    stamp: FileStamp
    """Stamp at the time of opening."""
    reach: Reach

    @property
    def num_bytes(self) -> int:
        return self.stamp.num_bytes

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer from `offset`.

        Raises: GivenFileError if the file is too short.
        """
        done = 0
        while done < len(buffer):
            self.reach.check_wanted()
            copied = os.preadv(self.descriptor, [buffer[done : done + MAX_BYTES_AT_ONCE]], offset + done)
            if copied == 0:
                raise GivenFileError(f"truncated: it ends at byte {offset + done} of {offset + len(buffer)}")
            done += copied

    def read(self, num_bytes: int, offset: int = 0) -> bytes:
        """Return `num_bytes` bytes from `offset`."""
        content = bytearray(num_bytes)
        self.read_into(memoryview(content), offset)
        return bytes(content)


class ReadableFile(Protocol):
    """Open file of known size, local or remote."""

    @property
    def num_bytes(self) -> int: ...

    def read(self, num_bytes: int, offset: int = 0) -> bytes:
        """Return `num_bytes` bytes from `offset`; raise GivenFileError if the file is too short."""
        ...

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer from `offset`; raise GivenFileError if the file is too short."""
        ...


ANYWHERE = Reach()


@contextmanager
def opened(file: Path, reach: Reach = ANYWHERE) -> Generator[GivenFile]:
    """Open a regular file for the block.

    Raises: GivenFileError if it is missing or unreadable, and for any OSError in the block.
    """
    try:
        descriptor = os.open(file, _FLAGS)
    except FileNotFoundError as error:
        raise GivenFileError("file is missing") from error
    except (OSError, ValueError) as error:
        raise GivenFileError(f"not readable: {_reason(error)}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise GivenFileError("not a regular file")
        if reach.roots and not reach.covers(f"/proc/self/fd/{descriptor}"):
            raise GivenFileError("a link leads out of weight_roots")
        yield GivenFile(descriptor, FileStamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns), reach)
    except OSError as error:
        raise GivenFileError(f"not readable: {_reason(error)}") from error
    finally:
        os.close(descriptor)


def read_json_object(file: Path, reach: Reach = ANYWHERE, *, allows_infinity: bool = False) -> dict[str, Any]:
    """Parse a file that holds a JSON object; see `parse_json_object`.

    Raises: GivenFileError if the file is unreadable or is not a strict JSON object.
    """
    with opened(file, reach) as given:
        return json_object_of(given, allows_infinity=allows_infinity)


def json_object_of(given: ReadableFile, *, allows_infinity: bool = False) -> dict[str, Any]:
    """Parse an open file that holds a JSON object; see `parse_json_object`.

    Raises: GivenFileError if it is too large or is not a strict JSON object.
    """
    if given.num_bytes > MAX_JSON_BYTES:
        raise GivenFileError(f"{given.num_bytes} bytes of JSON are more than {MAX_JSON_BYTES}")
    return parse_json_object(given.read(given.num_bytes), allows_infinity=allows_infinity)


def parse_json_object(raw: bytes, *, allows_infinity: bool = False) -> dict[str, Any]:
    """Parse a JSON object; `allows_infinity` also reads `Infinity`, which published configs of Nemotron-3 have.

    Raises: GivenFileError if the bytes are not a strict JSON object.
    """
    try:
        constant = _infinity_alone if allows_infinity else _refuse_constant
        parsed = json.loads(
            raw, parse_constant=constant, parse_float=_finite_number, object_pairs_hook=_object_of_pairs
        )
    except RecursionError as error:
        raise GivenFileError("not readable as JSON: nested too deeply") from error
    except ValueError as error:
        raise GivenFileError(f"not readable as JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise GivenFileError(f"holds a JSON {type(parsed).__name__}, not an object")
    return parsed


def one_line(message: str) -> str:
    """Return a message as a single line of bounded length; unprintable characters become `?`."""
    plain = "".join(character if character.isprintable() else "?" for character in message[: 4 * MAX_MESSAGE_LENGTH])
    return plain if len(plain) <= MAX_MESSAGE_LENGTH else plain[:MAX_MESSAGE_LENGTH] + " ..."


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _infinity_alone(name: str) -> float:
    return math.inf if name == "Infinity" else _refuse_constant(name)


def _finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number in it is too large")
    return number


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise ValueError("an object in it has the same key twice")
    return parsed
