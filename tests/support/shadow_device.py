"""A device that computes nothing but what each KV slot stands for: the tokens before it, in their namespace.

A chunk may only attend to slots that stand for its own past, so a page that was given away too early, shared wrongly,
overwritten, or never announced is found as soon as it is read. Tokens are a function of seed, choice and position
alone, as those of the real sampler are of these and the past.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from rayserve_moe.scheduling.scheduler import StepLimits
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import LAST_SAMPLED, StepPlan, StepResult

STOP_TOKEN_ID = 0
VOCABULARY = 1000
POISON = 0
"""What the slot stands for after which logits were not finite."""


def draw(seed: int, choice: int, position: int) -> tuple[int, bool]:
    """The token that a sequence samples at a position, and whether its logits are finite."""
    number = hash((seed, choice, position)) >> 7
    return (STOP_TOKEN_ID if number % 17 == 0 else 1 + number % (VOCABULARY - 1)), number % 97 != 0


class Past:
    """What a sequence comes to, whatever happens to it: its tokens, and what the slot of each position stands for.

    Sequences with different `namespace`s must not share slots.
    """

    def __init__(self, sequence: Sequence, *, namespace: str) -> None:
        prompt, wanted = sequence.request.prompt_ids.tolist(), sequence.request.sampling.max_new_tokens
        self.tokens, self.finish = list(prompt), "length"
        for position in range(len(prompt), len(prompt) + wanted):
            token, is_finite = draw(sequence.seed, sequence.choice_index, position)
            if not is_finite:
                self.finish = "error"
                break
            self.tokens.append(token)
            if token in sequence.stop_token_ids:
                self.finish = "stop"
                break
        self.num_computed_at_most = max(len(prompt), len(prompt) + wanted - 1)
        self.root = hash(namespace)
        self.stands_for = np.array(stand_for(self.root, self.tokens), np.int64)


def stand_for(before: int, tokens: list[int]) -> list[int]:
    """What the slots of `tokens` stand for, after what `before` stands for."""
    return list(accumulate(tokens, lambda past, token: hash((past, token)), initial=before))[1:]


class ShadowDevice:
    """All data ranks of a group: pages and last tokens by row, and slots by rank."""

    def __init__(self, limits: StepLimits) -> None:
        self._limits = limits
        num_rows = limits.num_rows * limits.num_data_ranks
        self._num_slots = limits.num_pages * limits.page_size
        self._pages = np.zeros((num_rows, limits.num_pages), np.int64)
        self._last_tokens = np.zeros(num_rows, np.int64)
        self._sampling = np.zeros((num_rows, 2), np.int64)
        self._stands_for = np.zeros(limits.num_data_ranks * self._num_slots, np.int64)
        self._written_at = np.zeros_like(self._stands_for)
        self.num_flushes = 0

    def run(self, plan: StepPlan, pasts: list[Past]) -> StepResult:
        """Compute a step; `pasts[c]` is that of the sequence of chunk c."""
        assert (plan.pages.page_ids != 0).all(), "page 0 belongs to nobody"
        entries = np.stack([plan.pages.rows, plan.pages.indices])
        assert np.unique(entries, axis=1).shape == entries.shape, "an entry of a page table is set twice in a step"
        self._pages[plan.pages.rows, plan.pages.indices] = plan.pages.page_ids
        self._sampling[plan.sampling.rows] = plan.sampling.integers[:, 1:3]
        first_tokens = np.cumsum(plan.chunk_lengths) - plan.chunk_lengths
        chunks = list(
            zip(plan.chunk_rows.tolist(), plan.chunk_starts.tolist(), plan.chunk_lengths.tolist(), strict=True)
        )
        written = [self._slots(row, start, start + length) for row, start, length in chunks]
        together = np.concatenate([np.zeros(0, np.int64), *written])
        assert len(np.unique(together)) == len(together), "two tokens of one step share a slot"
        for (row, start, length), first, slots, past in zip(chunks, first_tokens, written, pasts, strict=True):
            tokens = plan.token_ids[first : first + length].tolist()
            tokens = [self._last_tokens[row] if token == LAST_SAMPLED else token for token in tokens]
            before = self._stands_for[self._slots(row, start - 1, start)[0]] if start else None
            self._stands_for[slots] = self._continued(before, tokens, past)
            self._written_at[slots] = self.num_flushes
        for (row, start, length), past in zip(chunks, pasts, strict=True):
            held = self._stands_for[self._slots(row, 0, start + length)]
            # After logits that were not finite, a step may go on from a token that nobody will ever see.
            fails = past.finish == "error"
            num_right = len(past.tokens) - (fails and len(held) > len(past.tokens))
            assert np.array_equal(held[:num_right], past.stands_for[: len(held)][:num_right]), "keys, values are lost"
            assert len(held) <= min(len(past.tokens) + fails, past.num_computed_at_most), "it has ended"
        result = self._sample(plan)
        last_slots = np.array([slots[-1] for slots in written])[plan.chunk_samples]
        self._stands_for[last_slots[~result.finite]] = POISON
        return result

    def holds(self, data_rank: int, page_ids: np.ndarray, past: np.ndarray) -> bool:
        """Whether pages of a rank hold the keys and values that `past` stands for."""
        slots = (
            page_ids.astype(np.int64)[:, None] * self._limits.page_size + np.arange(self._limits.page_size)
        ).ravel()
        return np.array_equal(self._stands_for[data_rank * self._num_slots + slots], past[: len(slots)])

    def oldest(self, row: int, count: int) -> int:
        """After how many flushes the oldest of the first `count` positions of a row was computed."""
        return int(self._written_at[self._slots(row, 0, count)].min())

    def _slots(self, row: int, start: int, stop: int) -> np.ndarray:
        indices, offsets = np.divmod(np.arange(start, stop), self._limits.page_size)
        first = row // self._limits.num_rows * self._num_slots
        return first + self._pages[row, indices] * self._limits.page_size + offsets

    def _continued(self, before: np.int64 | None, tokens: list[int], past: Past) -> list[int]:
        return stand_for(past.root if before is None else int(before), [int(token) for token in tokens])

    def _sample(self, plan: StepPlan) -> StepResult:
        rows = plan.chunk_rows[plan.chunk_samples]
        positions = (plan.chunk_starts + plan.chunk_lengths)[plan.chunk_samples]
        drawn = [draw(*self._sampling[row].tolist(), int(at)) for row, at in zip(rows, positions, strict=True)]
        ids = np.array([token for token, _ in drawn], np.int32)
        self._last_tokens[rows] = ids
        finite = np.array([is_finite for _, is_finite in drawn], np.bool_)
        return StepResult(plan.step_id, ids, (ids / VOCABULARY).astype(np.float32), finite)
