"""Masks of permitted next tokens of a choice, from its grammar, its allowed ids and its stop rules."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import SamplingParams

STOP = FinishReason("stop")


def _failed(sentence: str) -> FinishReason:
    return FinishReason("error", message=sentence, source="constraint")


EMPTY = _failed("no token is left: other fields of the request forbid every token that the constraint allows")
NOT_FOLLOWED = _failed("the grammar engine could not follow the answer: its limits are exceeded")
TOO_SLOW = _failed("the constraint takes too long per token, which blocks other requests")
USUAL_SHARE = 0.1
"""Allowance regained per mask, as a fraction of `max_mask_ms`: the permitted average time."""


def id_bits(ids: Collection[int], *, num_words: int) -> np.ndarray:
    """Return the bits of ids, int32 [num_words]: id i is bit i % 32 of word i // 32."""
    bits, found = np.zeros(num_words, np.uint32), np.fromiter(ids, np.int64, len(ids))
    np.bitwise_or.at(bits, found // 32, np.uint32(1) << (found % 32).astype(np.uint32))
    return bits.view(np.int32)


@dataclass(frozen=True)
class EndRules:
    """Bit masks, int32 [W], of tokens that may end a choice in addition to the grammar's rules."""

    stops: np.ndarray
    """Stop ids; permitted if the grammar is satisfied."""
    eos: np.ndarray
    """End-of-sequence ids; permitted if the grammar is satisfied."""
    ignores_eos: bool = False
    """True permits `eos` only if no other token may follow."""
    num_withheld: int = 0
    """Number of first outputs at which `stops` and `eos` are permitted only if no other token may follow."""
    allowed: np.ndarray | None = None
    """The only permitted ids, or None for all."""


def end_rules(sampling: SamplingParams, *, eos_ids: Collection[int], num_ids: int) -> EndRules:
    """Return the rules of a request, for a model with `num_ids` ids."""
    num_words = -(-num_ids // 32)
    stops = [token_id for token_id in sampling.stop_token_ids if token_id < num_ids]
    allowed = sampling.allowed_token_ids
    return EndRules(
        id_bits(stops, num_words=num_words),
        id_bits(eos_ids, num_words=num_words),
        sampling.ignore_eos,
        sampling.min_new_tokens,
        id_bits(allowed, num_words=num_words) if allowed else None,
    )


class AfterText:
    """Search for a text in the bytes of the outputs.

    The text must end at the end of a token, except for trailing white space.
    """

    def __init__(self, text: bytes, token_bytes: Sequence[bytes]) -> None:
        self._text, self._token_bytes = text, token_bytes
        self._num_read, self._tail = 0, b""

    def find_end(self, output_ids: np.ndarray) -> int | None:
        """Return the number of outputs up to the end of the text, or None if it is not there yet.

        Each call must extend the ids of the previous call.
        """
        for token_id in output_ids[self._num_read :].tolist():
            self._num_read += 1
            self._tail += self._token_bytes[token_id]
            if self._tail.endswith(self._text) or self._tail.rstrip().endswith(self._text):
                return self._num_read
            self._tail = self._tail[-2 * len(self._text) :]
        return None


class TokenGuide:
    """Guide of a choice with a matcher of its own; implements `scheduling.sequence.Guide`.

    All other choices wait for its masks. The choice has an allowance of `max_mask_ms` of thread time. Every mask
    restores a tenth of the allowance; a choice without allowance ends with an error. `last_ms` starts at the
    compile-time measurement.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        rules: EndRules,
        *,
        max_mask_ms: float,
        after: AfterText | None = None,
        first_ms: float = 0.0,
    ) -> None:
        """Begin a choice. Outputs up to the text `after`, if given, are unconstrained but cannot end the choice."""
        self._matcher, self._rules, self._max_mask_ms = matcher, rules, max_mask_ms
        self._has_stops, self._no_eos, self._no_ends = bool(rules.stops.any()), ~rules.eos, ~(rules.eos | rules.stops)
        self._mask, self._rest = np.zeros((2, len(rules.eos)), np.int32)
        self._nothing = bytes(self._mask.nbytes)
        self._address = self._mask.ctypes.data  # looking it up costs as much as a grammar step
        self._after = after
        self._num_consumed, self.last_ms, self._allowance_ms = 0, first_ms, max_mask_ms

    def next_mask(self, output_ids: np.ndarray) -> np.ndarray | FinishReason:
        """Return the permitted next ids as bits int32 [W], valid until the next call.

        If no token is permitted, return the finish reason instead.
        """
        if self._after is not None:
            begin = self._after.find_end(output_ids)
            if begin is None:
                return self._no_ends
            self._num_consumed, self._after = begin, None
        begun = time.thread_time()
        is_followed = self._follow(output_ids)
        self.last_ms = 1e3 * (time.thread_time() - begun)
        self._allowance_ms = min(self._allowance_ms + USUAL_SHARE * self._max_mask_ms, self._max_mask_ms) - self.last_ms
        if not is_followed:
            return NOT_FOLLOWED
        return TOO_SLOW if self._allowance_ms < 0 else self._within_rules(len(output_ids))

    def _follow(self, output_ids: np.ndarray) -> bool:
        """Fill the mask by the grammar; return False if the engine fails."""
        matcher = self._matcher
        num_fresh = len(output_ids) - self._num_consumed
        self._num_consumed += num_fresh
        if num_fresh and not matcher.consume_tokens(output_ids[-num_fresh:].tolist()):
            return False
        matcher.unsafe_compute_mask_ptr(self._address, self._mask.nbytes)
        return not matcher.is_error()

    def _within_rules(self, num_outputs: int) -> np.ndarray | FinishReason:
        rules, matcher, mask = self._rules, self._matcher, self._mask
        if self._has_stops and matcher.is_accepting():
            mask |= rules.stops
        if rules.allowed is not None:
            mask &= rules.allowed
        is_withheld = num_outputs < rules.num_withheld
        if is_withheld or rules.ignores_eos:
            rest = np.bitwise_and(mask, self._no_ends if is_withheld else self._no_eos, self._rest)
            if rest.tobytes() != self._nothing:  # a fraction of the time of numpy's own tests
                return rest
        if mask.tobytes() != self._nothing:
            return mask
        return STOP if matcher.is_stopped() else EMPTY
