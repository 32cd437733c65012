"""Progress of a start and warnings of this package, from any process of a machine to the start command's console.

Processes append lines of JSON to a file that the start command reads; without such a file nothing is written.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rayserve_moe.config.load import variable

PROGRESS_VARIABLE = "RAYSERVE_MOE_PROGRESS"
"""Environment variable of all processes of a start with the file's path."""
MAX_LINE_LENGTH = 2000
"""Maximum characters of a text, so that a line is appended in a single write."""
MAX_BYTES = 4 << 20
"""Size in bytes above which the reader truncates a file that it has read completely."""


@dataclass(frozen=True)
class Progress:
    """Progress of a stage of a start."""

    stage: str
    done: int = 0
    total: int = 0
    """0 if unknown."""
    detail: str = ""


@dataclass(frozen=True)
class Warned:
    """A warning or an error that this package has logged, with its level's name."""

    level: str
    message: str


def report(stage: str, done: int = 0, *, total: int = 0, detail: str = "") -> None:
    """Report the progress of a stage of the start; a detail such as `0 found on disk` follows the numbers.

    A call costs a short write. If the write fails, the console shows less.
    """
    _append({"stage": stage, "done": done, "total": total, "detail": detail[:MAX_LINE_LENGTH]})


class ConsoleWarnings(logging.Handler):
    """Sends warnings and errors to the console of the start command."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        _append({"level": record.levelname, "message": record.getMessage()[:MAX_LINE_LENGTH]})


class ProgressReader:
    """Reads the lines that were appended since the last call."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> Iterator[Progress | Warned]:
        """Yield the contents of complete lines; skip malformed lines."""
        try:
            with self._path.open("r+b") as file:
                file.seek(self._offset)
                written = file.read()
                lines = written[: written.rfind(b"\n") + 1]
                self._offset += len(lines)
                if MAX_BYTES < self._offset == os.fstat(file.fileno()).st_size:
                    file.truncate(0)
                    self._offset = 0
        except OSError:
            return
        for line in lines.splitlines():
            try:
                fields = json.loads(line)
                yield Progress(**fields) if "stage" in fields else Warned(**fields)
            except (ValueError, TypeError):
                continue


class Counter:
    """Reports a sum from any thread at every increase by `step`, and at its end."""

    def __init__(self, stage: str, total: int, *, step: int, detail: str = "") -> None:
        self._stage, self._total, self._step, self._detail = stage, total, step, detail
        self._lock = threading.Lock()
        self._done = self._reported = 0

    def add(self, amount: int) -> None:
        """Add an amount of work."""
        with self._lock:
            self._done += amount
            if self._done - self._reported < self._step and self._done < self._total:
                return
            self._reported = self._done
            report(self._stage, self._done, total=self._total, detail=self._detail)  # under the lock: in order


def _append(fields: dict[str, object]) -> None:
    path = variable(PROGRESS_VARIABLE)
    if not path:
        return
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(file, json.dumps(fields).encode() + b"\n")
        finally:
            os.close(file)
    except OSError:
        return
