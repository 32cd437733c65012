"""A peer in a process of its own, stopped while it is not asked: engines that wait by spinning cost nobody a core.

A JSON line asks for a run, a JSON line answers:

    {"prompts": [[id, ...], ...], "num_new_tokens": 8, "n": 1, "seed": 0}  ->  {"seconds": 1.2, "output_ids": [[id]]}

The first line out says what is running. A run may add `first_token_s`. llama.cpp also tells log-probs of next tokens:

    {"prompts": [[id, ...], ...], "num_log_probs": 16384}  ->  {"log_probs": [[...], ...]}
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import numpy as np

from benchmarks.engine_runs import check_complete
from benchmarks.workloads import Workload

CLOSING_S = 20.0


def exit_on_termination() -> None:
    """Make SIGTERM raise SystemExit, so that a benchmark that is cut off closes its peers.

    A stopped peer does not notice that its parent has ended. Call from the main thread.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


class PeerProcess:
    """The child process that runs a peer; `facts` is what it says of itself. RuntimeError where it ends early."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str]) -> None:
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        with ExitStack() as unless_it_answers:
            unless_it_answers.callback(self._close)
            self.facts = self._read()
            unless_it_answers.pop_all()
        self._signal(signal.SIGSTOP)

    def run(
        self, workload: Workload, prompts: list[list[int]], *, seed: int
    ) -> tuple[dict[str, float], list[list[int]]]:
        """Let it generate, and check that it did all of the work; returns the run and the ids of every choice."""
        request = {"prompts": prompts, "num_new_tokens": workload.num_new_tokens, "n": workload.n, "seed": seed}
        answer = self._ask(request)
        output_ids = answer.pop("output_ids")
        check_complete(sum(map(len, output_ids)), workload)
        return answer, output_ids

    def log_probs(self, prompts: list[list[int]], *, vocab_size: int) -> np.ndarray:
        """Return log-probs of all words after each prompt, float64 [prompts, words]; of a peer that tells them."""
        return np.array(self._ask({"prompts": prompts, "num_log_probs": vocab_size})["log_probs"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        try:
            self._child.stdin.write(json.dumps(request) + "\n")
            self._child.stdin.flush()
            return self._read()
        finally:
            self._signal(signal.SIGSTOP)

    def _read(self) -> dict[str, Any]:
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError("the peer's process has ended; its last words are above")
        return json.loads(line)

    def _signal(self, number: signal.Signals) -> None:
        if self._child.poll() is None:
            os.killpg(self._child.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._signal(signal.SIGCONT)
        self._child.stdin.close()
        try:
            self._child.wait(CLOSING_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._child.wait()
        self._child.stdout.close()
