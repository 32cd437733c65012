"""Compilation of request constraints. Each thread has a process that tries a grammar before the thread compiles it.

A trial that exceeds its timeout ends its process, not the server.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from queue import SimpleQueue
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from rayserve_moe.config.settings import StructuredSettings
from rayserve_moe.constraints.matchers import Vocabulary, built_matcher, fault_of
from rayserve_moe.constraints.optional_properties import excess_of
from rayserve_moe.constraints.refusals import refusal
from rayserve_moe.constraints.tag_formats import TagGrammar, triggered
from rayserve_moe.constraints.token_guide import AfterText, TokenGuide, end_rules
from rayserve_moe.requests.records import Constraint, RequestError, SamplingParams

MAX_KEPT, MAX_KEPT_BYTES = 256, 16 << 20
"""Maximum number and total length of compiled constraints that are kept for later requests."""
START_S = 60.0
"""Timeout of a trial process's start: it imports the grammar engine and reads a tokenizer."""
WHITESPACE = "( |\\n {0,32})"
"""Default whitespace between JSON tokens: a space, or a line break and an indent. It is bounded because a model could
otherwise emit whitespace up to its token limit."""
MAX_DEPTH = 64
"""Maximum nesting depth of a schema."""
NOTHING_FORCED = '%llguidance {"no_forcing": true}\n'
"""Grammar option by which the model samples every token, fixed text included."""
ENGINE_OPTIONS = "x-guidance"
"""Schema key that sets options of the grammar engine."""


@dataclass(frozen=True)
class CompiledConstraint:
    """Compiled constraint, verified to allow an answer to begin; `guide` builds a guide per choice."""

    matcher: LLMatcher
    vocabulary: Vocabulary
    max_mask_ms: float
    first_ms: float
    after: str = ""

    def guide(self, sampling: SamplingParams) -> TokenGuide:
        """Return a guide for the start of an answer."""
        rules = end_rules(sampling, eos_ids=self.vocabulary.eos_ids, num_ids=self.vocabulary.num_ids)
        after = AfterText(self.after.encode(), self.vocabulary.token_bytes) if self.after else None
        return TokenGuide(
            self.matcher.deep_copy(), rules, max_mask_ms=self.max_mask_ms, after=after, first_ms=self.first_ms
        )


class ConstraintCompiler:
    """Thread-safe compiler of constraints with a cache."""

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
        """Compile a constraint on a thread; the future raises RequestError on failure or timeout."""
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
            raise RequestError("its first token takes too long to compute and would block others", constraint.param)
        matcher = built_matcher(self._tokens, grammar)
        # Guides copy the first mask from this matcher, so that the engine thread does not compute it.
        assert not fault_of(matcher, mask_words=self.vocabulary.mask_words)[0], "a tried constraint can begin an answer"
        return CompiledConstraint(matcher, self.vocabulary, self._settings.max_mask_ms, milliseconds, constraint.after)

    def _drop_failed(self, constraint: Constraint, done: Future[CompiledConstraint]) -> None:
        """Remove a failed compilation from the cache: the cause may have been the timeout."""
        if done.cancelled() or done.exception() is not None:
            with self._lock:
                if self._kept.get(constraint) is done:
                    self._forget(constraint)

    def _forget(self, constraint: Constraint) -> None:
        del self._kept[constraint]
        self._num_bytes -= len(constraint.text)


class TrialTimeoutError(Exception):
    """Error for a grammar that was not tried before its deadline."""


class TrialProcess:
    """Process that tries grammars, one at a time, for a single thread. It starts with the first grammar."""

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


def grammar_of(constraint: Constraint, *, limits: StructuredSettings) -> str:
    """Return the grammar of a constraint in the engine's format.

    Raises: RequestError if the constraint exceeds the limits or cannot be parsed.
    """
    if len(constraint.text.encode()) > limits.max_bytes:
        raise RequestError(f"it is longer than {limits.max_bytes} bytes", constraint.param)
    try:
        grammar = _GRAMMARS[constraint.kind](constraint, limits)
    except RecursionError as error:
        raise RequestError("it is nested too deeply", constraint.param) from error
    first, *others = _parts(grammar)
    whole = NOTHING_FORCED + (constraint.within or "start: @content\n")
    return json.dumps({"grammars": [{"lark_grammar": whole}, {**first, "name": "content"}, *others]})


def _parts(grammar: str) -> list[dict[str, Any]]:
    """Return a grammar and the grammars to which it refers; the engine takes Lark text or a JSON list of grammars."""
    return json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]


def _schema_grammar(constraint: Constraint, limits: StructuredSettings) -> str:
    schema = checked_schema(json.loads(constraint.text), limits, param=constraint.param)
    schema[ENGINE_OPTIONS] = json_options(constraint)
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def json_options(constraint: Constraint) -> dict[str, Any]:
    """Return the engine's JSON options.

    An empty whitespace pattern of the request forbids whitespace; None selects the default.
    """
    pattern = WHITESPACE if constraint.whitespace is None else constraint.whitespace
    return {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}


def checked_schema(schema: Any, limits: StructuredSettings, *, param: str) -> dict[str, Any]:
    """Return a schema as an object without engine options.

    Raises: RequestError if it exceeds the limits or is not a schema.
    """
    if schema is False:
        raise RequestError("the schema `false` allows nothing", param)
    num_values = 0
    for depth, values in _levels(schema):
        if depth > MAX_DEPTH:
            raise RequestError(f"the schema is nested deeper than {MAX_DEPTH}", param)
        num_values += values
        if num_values > limits.max_alternatives:
            raise RequestError(f"`enum` has more than {limits.max_alternatives} values", param)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise RequestError("a schema should be an object, true or false", param)
    if excess := excess_of(schema):
        raise RequestError(excess, param)
    return {key: value for key, value in schema.items() if key != ENGINE_OPTIONS}


def _levels(value: Any) -> Iterator[tuple[int, int]]:
    """Yield, for every object and list inside a value, its depth and the number of `enum` values."""
    open_values = [(value, 1)]
    while open_values:
        one, depth = open_values.pop()
        if isinstance(one, dict):
            enumerated = one.get("enum")
            yield depth, len(enumerated) if isinstance(enumerated, list) else 0
            open_values += [(inner, depth + 1) for inner in one.values()]
        elif isinstance(one, list):
            yield depth, 0
            open_values += [(inner, depth + 1) for inner in one]


def _regex_grammar(constraint: Constraint, limits: StructuredSettings) -> str:
    if "\0" in constraint.text:
        raise RequestError("an expression may not hold NUL", constraint.param)
    return LLMatcher.grammar_from_regex(constraint.text)


def _choice_grammar(constraint: Constraint, limits: StructuredSettings) -> str:
    """Return a regular expression over the choices; strings in a grammar would need other escapes."""
    choices = json.loads(constraint.text)
    if len(choices) > limits.max_alternatives:
        raise RequestError(f"there are more than {limits.max_alternatives} choices", constraint.param)
    return LLMatcher.grammar_from_regex("|".join(map(escaped, choices)))


def escaped(text: str) -> str:
    """Return a regular expression that matches exactly this text."""
    return re.sub(r"[\\^$.|?*+()\[\]{}/&~#-]", lambda found: "\\" + found.group(), text)


def _written_grammar(constraint: Constraint, limits: StructuredSettings) -> str:
    """Parse GBNF as in llama.cpp, or Lark."""
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(constraint.text))
    except Exception as error:  # it raises plain Exception for missing or duplicate rules
        raise RequestError("it is neither a GBNF nor a Lark grammar", constraint.param) from error


def _tag_grammar(constraint: Constraint, limits: StructuredSettings) -> str:
    """Return the grammar of a `format`, or of the legacy form with `structures` and `triggers`."""
    given, param = json.loads(constraint.text), constraint.param

    def schema_of(schema: Any) -> str:
        checked = checked_schema(schema, limits, param=param)
        return json.dumps(checked | {ENGINE_OPTIONS: json_options(constraint)})

    def grammars_of(text: str) -> list[dict[str, Any]]:
        return _parts(_written_grammar(constraint._replace(text=text), limits))

    if any(depth > MAX_DEPTH for depth, _ in _levels(given)):
        raise RequestError(f"it is nested deeper than {MAX_DEPTH}", param)
    wanted = given["format"] if "format" in given else triggered(given["structures"], given["triggers"])
    writer = TagGrammar(param=param, schema_of=schema_of, grammars_of=grammars_of)
    return json.dumps({"grammars": writer.grammars(wanted)})


def _calls_grammar(constraint: Constraint, limits: StructuredSettings) -> str:
    """Return the grammar of tool calls, whose arguments follow their functions' schemas."""
    given = json.loads(constraint.text)
    lines = [given["lark"]]
    for i, schema in enumerate(given["schemas"]):
        checked = checked_schema(schema, limits, param=constraint.param) | {ENGINE_OPTIONS: json_options(constraint)}
        lines.append(f"args_{i}: %json {json.dumps(checked)}\n")
    return LLMatcher.grammar_from_lark("".join(lines))


_GRAMMARS: Mapping[str, Callable[[Constraint, StructuredSettings], str]] = {
    "json_schema": _schema_grammar,
    "regex": _regex_grammar,
    "choice": _choice_grammar,
    "grammar": _written_grammar,
    "structural_tag": _tag_grammar,
    "calls": _calls_grammar,
}
