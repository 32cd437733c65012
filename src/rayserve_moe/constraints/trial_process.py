"""Owner of a process that tries grammars (`trial`): starts it, asks it, and ends it where it takes too long."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from rayserve_moe.constraints.matchers import Vocabulary

START_S = 60.0
"""What it may take to import the grammar engine and read a tokenizer."""


class TrialTimeoutError(Exception):
    """A grammar was not tried in time."""


class TrialProcess:
    """Tries grammars, one at a time, from one thread. It starts with the first one."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def fault_of(self, grammar: str, *, deadline: float) -> tuple[str, float]:
        """Return what `matchers.fault_of` does. TrialTimeoutError after the monotonic `deadline`, or where the process
        ends over it, as it does when it finds no memory."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            self._send(grammar)
            fault, milliseconds = self._receive(deadline)
        except (BrokenPipeError, EOFError, TimeoutError) as error:
            self.close()
            raise TrialTimeoutError("a grammar was not tried in time") from error
        return str(fault), float(milliseconds)

    def close(self) -> None:
        """End the process. May be called twice."""
        process, self._process, self._unread = self._process, None, b""
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()

    def _start(self) -> None:
        self.close()
        command = [sys.executable, "-m", "rayserve_moe.constraints.trial"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        token_bytes, *ids = self._vocabulary
        self._send([[each.decode("latin-1") for each in token_bytes], *ids])
        self._receive(time.monotonic() + START_S)

    def _send(self, value: Any) -> None:
        assert self._process is not None and self._process.stdin is not None, "it was started"
        self._process.stdin.write(json.dumps(value).encode() + b"\n")
        self._process.stdin.flush()

    def _receive(self, deadline: float) -> Any:
        """The next line of JSON. TimeoutError after the deadline, EOFError where none will come."""
        assert self._process is not None and self._process.stdout is not None, "it was started"
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            read = os.read(pipe, 1 << 16)
            if not read:
                raise EOFError
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)
