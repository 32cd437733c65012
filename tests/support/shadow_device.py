"""A device that computes nothing but what each KV slot stands for: the tokens before it, in their namespace.

A chunk may only attend to slots that stand for its own past, so a page that was given away too early, shared wrongly,
overwritten, or never announced is found as soon as it is read. Tokens are a function of seed, choice and position
alone, as those of the real sampler are of these and the past.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np

from rayserve_moe.scheduling.scheduler import StepLimits
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import LAST_SAMPLED, StepPlan, StepResult
from rayserve_moe.state.groups import PageGroup

STOP_TOKEN_ID = 0
VOCABULARY = 1000
POISON = 0
"""What the slot stands for after which logits were not finite."""


def draw(seed: int, choice: int, position: int) -> tuple[int, bool]:
    """The token that a sequence samples at a position, and whether its logits are finite: after a prompt they are those
    of all its choices."""
    number = hash((seed, choice, position)) >> 7
    return (STOP_TOKEN_ID if number % 17 == 0 else 1 + number % (VOCABULARY - 1)), (
        hash((seed, position)) >> 7
    ) % 97 != 0


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
            if token in sequence.rules.stop_token_ids:
                self.finish = "stop"
                break
        self.num_computed_at_most = max(len(prompt), len(prompt) + wanted - 1)
        self.root = hash(namespace)
        self.stands_for = np.array(stand_for(self.root, self.tokens), np.int64)


def stand_for(before: int, tokens: list[int]) -> list[int]:
    """What the slots of `tokens` stand for, after what `before` stands for."""
    return list(accumulate(tokens, lambda past, token: hash((past, token)), initial=before))[1:]


class _Pool:
    """The pages of layers that see `window` positions (0: all): page table by row, and what each slot stands for."""

    def __init__(self, limits: StepLimits, *, window: int, num_pages: int) -> None:
        self.window = window
        self._limits, self._num_slots = limits, num_pages * limits.page_size
        self.pages = np.zeros((limits.num_rows * limits.num_data_ranks, limits.num_pages), np.int64)
        self.stands_for = np.zeros(limits.num_data_ranks * self._num_slots, np.int64)

    def slots(self, row: int, start: int, stop: int) -> np.ndarray:
        """Where positions of a row lie."""
        indices, offsets = np.divmod(np.arange(start, stop), self._limits.page_size)
        page_ids = self.pages[row, indices]
        assert (page_ids != 0).all(), "page 0 belongs to nobody"
        return row // self._limits.num_rows * self._num_slots + page_ids * self._limits.page_size + offsets

    def of_page(self, data_rank: int, page_id: int) -> np.ndarray:
        """What a page of a rank stands for."""
        first = data_rank * self._num_slots + int(page_id) * self._limits.page_size
        return self.stands_for[first : first + self._limits.page_size]


class ShadowDevice:
    """All data ranks of a group: pages and last tokens by row, and slots by rank. The first pool sees all positions."""

    def __init__(self, limits: StepLimits) -> None:
        self._limits = limits
        num_rows = limits.num_rows * limits.num_data_ranks
        groups = limits.page_groups or (PageGroup("kv", 0, limits.num_pages),)
        self._pools = [_Pool(limits, window=group.window, num_pages=group.num_pages) for group in groups]
        self._last_tokens = np.zeros(num_rows, np.int64)
        self._sampling = np.zeros((num_rows, 2), np.int64)
        self._written_at = np.zeros_like(self._pools[0].stands_for)
        self.num_flushes = 0

    def run(self, plan: StepPlan, pasts: list[Past]) -> StepResult:
        """Compute a step; `pasts[c]` is that of the sequence of chunk c."""
        entries = np.stack([plan.pages.rows, plan.pages.indices])
        assert np.unique(entries, axis=1).shape == entries.shape, "an entry of a page table is set twice in a step"
        whole, num_pools = self._pools[0], len(self._pools)
        for place, pool in enumerate(self._pools):
            own = plan.pages.indices % num_pools == place
            pool.pages[plan.pages.rows[own], plan.pages.indices[own] // num_pools] = plan.pages.page_ids[own]
        self._sampling[plan.sampling.rows] = plan.sampling.integers[:, 1:3]
        first_tokens = np.cumsum(plan.chunks.lengths) - plan.chunks.lengths
        chunks = list(
            zip(plan.chunks.rows.tolist(), plan.chunks.starts.tolist(), plan.chunks.lengths.tolist(), strict=True)
        )
        for pool in self._pools:
            written = [pool.slots(row, start, start + length) for row, start, length in chunks]
            together = np.concatenate([np.zeros(0, np.int64), *written])
            assert len(np.unique(together)) == len(together), "two tokens of one step share a slot"
        for (row, start, length), first, past in zip(chunks, first_tokens, pasts, strict=True):
            if not length:
                continue
            tokens = plan.chunks.token_ids[first : first + length].tolist()
            tokens = [self._last_tokens[row] if token == LAST_SAMPLED else token for token in tokens]
            before = whole.stands_for[whole.slots(row, start - 1, start)[0]] if start else None
            for pool in self._pools:
                pool.stands_for[pool.slots(row, start, start + length)] = self._continued(before, tokens, past)
            self._written_at[whole.slots(row, start, start + length)] = self.num_flushes
        self._copy_to_forks(plan)
        for (row, start, length), past in zip(chunks, pasts, strict=True):
            # After logits that were not finite, a step may go on from a token that nobody will ever see.
            fails, stop = past.finish == "error", start + length
            last = min(stop, len(past.tokens) - (fails and stop > len(past.tokens)))
            for pool in self._pools:
                first_seen = max(0, start + 1 - pool.window) if pool.window else 0
                held = pool.stands_for[pool.slots(row, first_seen, max(first_seen, last))]
                assert np.array_equal(held, past.stands_for[first_seen:last]), "keys, values are lost"
            assert stop <= min(len(past.tokens) + fails, past.num_computed_at_most), "it has ended"
        result = self._sample(plan)
        for row, position in zip(
            plan.chunks.rows[plan.chunks.samples][~result.finite].tolist(),
            (plan.chunks.starts + plan.chunks.lengths - 1)[plan.chunks.samples][~result.finite].tolist(),
            strict=True,
        ):
            for pool in self._pools:
                pool.stands_for[pool.slots(row, position, position + 1)] = POISON
        return result

    def _copy_to_forks(self, plan: StepPlan) -> None:
        """What lies in the page in which a prompt ends, to the pages of those that fork off it."""
        for chunk in np.flatnonzero(plan.chunks.lengths == 0).tolist():
            end, rows = int(plan.chunks.starts[chunk]), plan.chunks.rows[[plan.chunks.sources[chunk], chunk]]
            first = end // self._limits.page_size * self._limits.page_size
            for pool in self._pools:
                source, own = (pool.slots(int(row), first, end) for row in rows)
                pool.stands_for[own] = pool.stands_for[source]
            source, own = (self._pools[0].slots(int(row), first, end) for row in rows)
            self._written_at[own] = self._written_at[source]

    def run_drafts(self, plan: StepPlan, pasts: list[Past]) -> StepResult:
        """The same where chunks may be drafts: wrong ones overwrite what their slots stand for, and sample anything."""
        if not plan.chunks.max_drafts:
            return self.run(plan, pasts)
        is_right = np.ones(plan.num_chunks, np.bool_)
        chunks = plan.chunks
        last_tokens = np.cumsum(chunks.lengths) - 1
        for c in range(1, plan.num_chunks):
            if chunks.rows[c] == chunks.rows[c - 1]:
                position, past = int(chunks.starts[c]), pasts[c]
                assert position == chunks.starts[c - 1] + 1, "a draft stands behind the token before it"
                known = past.tokens[position] if position < len(past.tokens) else None
                is_right[c] = is_right[c - 1] and chunks.token_ids[last_tokens[c]] == known
        kept = replace(
            chunks,
            rows=chunks.rows[is_right],
            starts=chunks.starts[is_right],
            lengths=chunks.lengths[is_right],
            samples=chunks.samples[is_right],
            token_ids=chunks.token_ids[np.repeat(is_right, chunks.lengths)],
        )
        right = replace(plan, chunks=kept)
        found = self.run(right, [past for past, keeps in zip(pasts, is_right, strict=True) if keeps])
        for row, place in zip(chunks.rows[~is_right].tolist(), chunks.starts[~is_right].tolist(), strict=True):
            for pool in self._pools:
                slots = pool.slots(row, place, place + 1)
                assert not np.isin(slots, self._written_now(right, pool)).any(), "a draft writes over another token"
                pool.stands_for[slots] = POISON
        keeps = is_right[plan.chunks.samples]
        ids, logprobs = np.full(len(keeps), VOCABULARY + 7, np.int32), np.zeros(len(keeps), np.float32)
        ids[keeps], logprobs[keeps] = found.token_ids, found.logprobs
        ranks = np.ones(len(keeps), np.int32)
        ranks[keeps] = found.ranks
        return StepResult(plan.step_id, ids, logprobs, ranks)

    def _written_now(self, plan: StepPlan, pool: _Pool) -> np.ndarray:
        chunks = plan.chunks
        each = zip(chunks.rows.tolist(), chunks.starts.tolist(), chunks.lengths.tolist(), strict=True)
        return np.concatenate([pool.slots(row, start, start + length) for row, start, length in each])

    def holds(self, data_rank: int, page_ids: np.ndarray, past: np.ndarray, *, place: int = 0) -> bool:
        """Whether pages of a rank hold the keys and values that `past` stands for, where they are not 0."""
        pool, size = self._pools[place], self._limits.page_size
        return all(
            np.array_equal(pool.of_page(data_rank, page), past[i * size : (i + 1) * size])
            for i, page in enumerate(page_ids.tolist())
            if page
        )

    def end_of_page(self, page_id: int, *, data_rank: int) -> int:
        """What the last slot of a page of a rank stands for."""
        return int(self._pools[0].of_page(data_rank, page_id)[-1])

    def oldest(self, row: int, count: int) -> int:
        """After how many flushes the oldest of the first `count` positions of a row was computed."""
        return int(self._written_at[self._pools[0].slots(row, 0, count)].min())

    def _continued(self, before: np.int64 | None, tokens: list[int], past: Past) -> list[int]:
        return stand_for(past.root if before is None else int(before), [int(token) for token in tokens])

    def _sample(self, plan: StepPlan) -> StepResult:
        chunks = plan.chunks
        rows = chunks.rows[chunks.samples]
        positions = (chunks.starts + chunks.lengths)[chunks.samples]
        drawn = [draw(*self._sampling[row].tolist(), int(at)) for row, at in zip(rows, positions, strict=True)]
        ids = np.array([token for token, _ in drawn], np.int32)
        self._last_tokens[rows] = ids
        finite = np.array([is_finite for _, is_finite in drawn], np.bool_)
        return StepResult(plan.step_id, ids, (ids / VOCABULARY).astype(np.float32), finite)
