"""Compilation of request constraints in threads, each beside a process that tries the grammar first.

A trial that takes too long ends its process, not the server.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from queue import SimpleQueue
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from rayserve_moe.config.settings import StructuredSettings
from rayserve_moe.constraints.grammar_text import grammar_of
from rayserve_moe.constraints.matchers import Vocabulary, built_matcher, fault_of
from rayserve_moe.constraints.refusals import refusal
from rayserve_moe.constraints.token_guide import AfterText, TokenGuide, end_rules
from rayserve_moe.requests.constraint_fields import Constraint
from rayserve_moe.requests.records import RequestError, SamplingParams

MAX_KEPT, MAX_KEPT_BYTES = 256, 16 << 20
"""Maximum number and total length of compiled constraints that are kept for later requests."""


@dataclass(frozen=True)
class CompiledConstraint:
    """A constraint that an answer can begin with; `guide` makes one guide per choice."""

    matcher: LLMatcher
    vocabulary: Vocabulary
    max_mask_ms: float
    first_ms: float
    after: str = ""

    def guide(self, sampling: SamplingParams) -> TokenGuide:
        """Return a guide for an answer, from its start."""
        rules = end_rules(sampling, eos_ids=self.vocabulary.eos_ids, num_ids=self.vocabulary.num_ids)
        after = AfterText(self.after.encode(), self.vocabulary.token_bytes) if self.after else None
        times = {"max_mask_ms": self.max_mask_ms, "first_ms": self.first_ms}
        return TokenGuide(self.matcher.deep_copy(), rules, after=after, **times)


class ConstraintCompiler:
    """Compiler of constraints, each once while it is kept. All methods may be called from any thread."""

    def __init__(self, vocabulary: Vocabulary, settings: StructuredSettings) -> None:
        self.vocabulary, self._settings = vocabulary, settings
        self._lock = threading.Lock()
        self._kept: OrderedDict[Constraint, Future[CompiledConstraint]] = OrderedDict()
        self._num_bytes = 0
        self._threads = ThreadPoolExecutor(settings.num_threads, thread_name_prefix="constraint")
        self._trials = [TrialProcess(vocabulary) for _ in range(settings.num_threads)]
        self._idle: SimpleQueue[TrialProcess] = SimpleQueue()
        for trial in self._trials:
            self._idle.put(trial)

    def submit(self, constraint: Constraint) -> Future[CompiledConstraint]:
        """Compile a constraint on a thread; the future raises RequestError if that fails or takes too long."""
        deadline = time.monotonic() + self._settings.timeout_s
        with self._lock:
            known = self._kept.get(constraint)
            if known is not None:
                self._kept.move_to_end(constraint)
                return known
            future = self._threads.submit(self._compiled, constraint, deadline)
            self._kept[constraint] = future
            self._num_bytes += len(constraint.text)
            while len(self._kept) > MAX_KEPT or self._num_bytes > MAX_KEPT_BYTES:
                self._forget(next(iter(self._kept)))
        future.add_done_callback(lambda done: self._drop_failed(constraint, done))
        return future

    def close(self) -> None:
        """Stop compiling. May be called twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for trial in self._trials:
            trial.close()

    @cached_property
    def _tokens(self) -> LLTokenizer:
        return self.vocabulary.tokens()

    def _compiled(self, constraint: Constraint, deadline: float) -> CompiledConstraint:
        grammar = grammar_of(constraint, limits=self._settings)
        trial = self._idle.get()
        try:
            fault, milliseconds = trial.fault_of(grammar, deadline=deadline)
        except TrialTimeoutError as error:
            message = f"it was not compiled within {self._settings.timeout_s:g} s"
            raise RequestError(message, constraint.param) from error
        finally:
            self._idle.put(trial)
        if fault:
            raise RequestError(refusal(constraint, fault), constraint.param)
        if milliseconds > self._settings.max_mask_ms:
            raise RequestError("its first token takes too long to find, which would hold others", constraint.param)
        matcher = built_matcher(self._tokens, grammar)
        # Guides copy the first mask from this matcher, so that the engine thread does not compute it.
        assert not fault_of(matcher, mask_words=self.vocabulary.mask_words)[0], "what was tried can begin an answer"
        return CompiledConstraint(matcher, self.vocabulary, self._settings.max_mask_ms, milliseconds, constraint.after)

    def _drop_failed(self, constraint: Constraint, done: Future[CompiledConstraint]) -> None:
        """Forget a failed compilation: the cause may have been the timeout."""
        if done.cancelled() or done.exception() is not None:
            with self._lock:
                if self._kept.get(constraint) is done:
                    self._forget(constraint)

    def _forget(self, constraint: Constraint) -> None:
        del self._kept[constraint]
        self._num_bytes -= len(constraint.text)


START_S = 60.0
"""Timeout of a trial process's start: it imports the grammar engine and reads a tokenizer."""


class TrialTimeoutError(Exception):
    """A grammar was not tried in time."""


class TrialProcess:
    """Process that tries grammars, one at a time, for one thread. It starts with the first grammar."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def fault_of(self, grammar: str, *, deadline: float) -> tuple[str, float]:
        """Return the result of `matchers.fault_of` for a grammar.

        Raises: TrialTimeoutError after the monotonic `deadline`, or if the process ends first, for lack of memory.
        """
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
        token_bytes, *ids = self.vocabulary
        self._send([[each.decode("latin-1") for each in token_bytes], *ids])
        self._receive(time.monotonic() + START_S)

    def _send(self, value: Any) -> None:
        assert self._process is not None and self._process.stdin is not None, "it was started"
        self._process.stdin.write(json.dumps(value).encode() + b"\n")
        self._process.stdin.flush()

    def _receive(self, deadline: float) -> Any:
        """Return the next line of JSON. Raises: TimeoutError after the deadline, EOFError if the process has ended."""
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
