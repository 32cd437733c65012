"""One simulated device: the devices of a group without a model, with as many layers of checks as a test needs.

- `sample` alone: tokens follow from a rule, rows remember what they sampled, drafts count while they are right.
- `limits`: tokens are written to slots of pages. A slot stands for the tokens before it, so a page that was given away
  too early, shared wrongly, overwritten or never announced is found as soon as it is read.
- `pasts` of a run: every sequence is known beforehand, and reads nothing but its own past.
- `drafts`: a draft model drafts behind each sample, and plans may be awaited.
- `routing_of`: rows of routing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from rayserve_moe.scheduling import sequence as sequences
from rayserve_moe.scheduling.scheduler import StepLimits
from rayserve_moe.scheduling.step_plan import (
    AWAITED,
    DRAFTED,
    LAST_SAMPLED,
    NO_SLOT,
    PageMoves,
    PageTableChanges,
    StepPlan,
    StepResult,
)
from rayserve_moe.state.entries import ENTRY_COLUMNS
from rayserve_moe.state.groups import PageGroup

VOCABULARY = 1000
STOP_TOKEN_ID = 0
WRONG = VOCABULARY + 7
"""Samples of drafts that do not count: a device may say anything there."""
POISON = 0
"""What a slot stands for whose logits were not finite, or whose token was a wrong draft."""
NUM_MIXED = 50
"""Token ids that `of_all_keys` samples."""


class Spot(NamedTuple):
    """A place where a token is sampled."""

    row: int
    position: int
    """Position of the last token that is written."""
    token: int
    """That token."""
    drafted: tuple[int, ...] = ()
    """Tokens behind it that are written nowhere."""


Sample = Callable[["SimulatedDevice", Spot], tuple[int, bool]]
"""From a place to the token sampled there, and whether its logits are finite."""


def count_on(device: SimulatedDevice, spot: Spot) -> tuple[int, bool]:
    """Sample the last token + 1."""
    return ((*spot.drafted, spot.token)[-1] + 1) % VOCABULARY, True


def of_all_keys(device: SimulatedDevice, spot: Spot) -> tuple[int, bool]:
    """Sample by all that stands in the row's pages: a wrong slot anywhere shows in what comes out."""
    assert device.memory is not None, "keys stand in pages"
    keys, mixed = device.memory.keys(spot.row, 0, spot.position + 1).tolist(), 17
    for key in (*keys, *chained(keys[-1], spot.drafted)):
        mixed = (mixed * 31 + key + 1) % 1_000_003
    return mixed % NUM_MIXED, True


def drawn(device: SimulatedDevice, spot: Spot) -> tuple[int, bool]:
    """Sample by the row's seed and choice and the position, as the real sampler does of these and the past."""
    return draw(*device.seeds[spot.row], spot.position + 1)


def draw(seed: int, choice: int, position: int) -> tuple[int, bool]:
    """Return the token at a position and whether its logits are finite; those of a prompt are all its choices'."""
    number = hash((seed, choice, position)) >> 7
    token = STOP_TOKEN_ID if number % 17 == 0 else 1 + number % (VOCABULARY - 1)
    return token, (hash((seed, position)) >> 7) % 97 != 0


def chained(before: int, tokens: Sequence[int]) -> list[int]:
    """Return what the slots of `tokens` stand for, after a slot that stands for `before`."""
    return list(accumulate(tokens, lambda past, token: hash((past, token)), initial=before))[1:]


class Past:
    """What a drawn sequence comes to, whatever happens to it: its tokens, and what the slot of each stands for.

    Sequences with different `namespace`s must not share slots.
    """

    def __init__(self, sequence: sequences.Sequence, *, namespace: str) -> None:
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
        self.max_computed = max(len(prompt), len(prompt) + wanted - 1)
        self.root = hash(namespace)
        self.stands_for = np.array(chained(self.root, self.tokens), np.int64)


class _Pool:
    """The pages of layers that see `window` positions (0: all): page table by row, and what each slot stands for."""

    def __init__(self, limits: StepLimits, *, window: int, num_pages: int) -> None:
        self.window = window
        self._limits, self._num_slots = limits, num_pages * limits.page_size
        self.pages = np.zeros((limits.num_rows * limits.num_data_ranks, limits.num_pages), np.int64)
        self.stands_for = np.zeros(limits.num_data_ranks * self._num_slots, np.int64)

    def slots(self, row: int, start: int, stop: int) -> np.ndarray:
        """Return where positions of a row lie."""
        indices, offsets = np.divmod(np.arange(start, stop), self._limits.page_size)
        page_ids = self.pages[row, indices]
        assert (page_ids != 0).all(), "page 0 belongs to nobody"
        return row // self._limits.num_rows * self._num_slots + page_ids * self._limits.page_size + offsets

    def of_page(self, data_rank: int, page_id: int) -> np.ndarray:
        """Return what a page of a rank stands for."""
        first = data_rank * self._num_slots + int(page_id) * self._limits.page_size
        return self.stands_for[first : first + self._limits.page_size]


class EntryMemory:
    """Entries and rings of layers with entries, all ranks: what each stands for, as slots do."""

    def __init__(self, limits: StepLimits) -> None:
        (group,) = limits.entry_groups
        num_rows = limits.num_rows * limits.num_data_ranks
        self._grid, self._rows_per_rank = group.entry_tokens, limits.num_rows
        self.states = np.zeros((limits.num_data_ranks, group.num_entries), np.int64)
        self._rings = np.full((num_rows, group.entry_tokens), POISON, np.int64)
        self.columns = np.zeros((num_rows, ENTRY_COLUMNS), np.int64)
        """Own entry, source and tokens before the source of each row."""

    def run(self, plan: StepPlan, spots: Sequence[Spot], pasts: Sequence[Past], *, is_right: np.ndarray) -> None:
        """Compute a step as layers with entries do, and check that each token reads the state of its own past."""
        ends = np.cumsum(plan.chunks.lengths)
        for c, (row, _, length) in enumerate(_chunks(plan)):
            if not length:
                self._rings[row] = self._rings[plan.chunks.rows[plan.chunks.sources[c]]]
            for spot in spots[ends[c] - length : ends[c]]:
                self._advance(spot, pasts[c], is_right=bool(is_right[c]))

    def _advance(self, spot: Spot, past: Past, *, is_right: bool) -> None:
        position, grid, (own, _, source_base) = spot.position, self._grid, self.columns[spot.row].tolist()
        states, ring = self.states[spot.row // self._rows_per_rank], self._rings[spot.row]
        is_known = is_right and position <= len(past.tokens)
        base = position // grid * grid
        if position == base and position not in (0, source_base):
            assert is_right, "a draft writes an entry"
            self._check(spot.row, base - grid, past, is_known=is_known)
            if is_known:
                assert np.array_equal(ring, past.stands_for[base - grid : base]), "the tokens of an entry are lost"
            assert own, "the entry of zeros is written"
            states[own] = past.stands_for[base - 1] if is_known else POISON
        self._check(spot.row, base, past, is_known=is_known)
        ring[position - base] = past.stands_for[position] if is_known and position < len(past.tokens) else POISON

    def _check(self, row: int, base: int, past: Past, *, is_known: bool) -> None:
        own, source, source_base = self.columns[row].tolist()
        held = self.states[row // self._rows_per_rank, source if base == source_base else own]
        expected = past.stands_for[base - 1] if base and is_known else 0
        assert not is_known or held == expected, "another state is continued"


class PagedMemory:
    """Slots of all ranks, by pool; the first pool sees all positions."""

    def __init__(self, limits: StepLimits) -> None:
        self._page_size = limits.page_size
        groups = limits.page_groups or (PageGroup(0, limits.num_pages),)
        self._pools = [_Pool(limits, window=group.window, num_pages=group.num_pages) for group in groups]
        self._written_at, self._num_pages = np.zeros_like(self._pools[0].stands_for), groups[0].num_pages
        self._num_indices = -(-limits.max_tokens // limits.page_size) * len(self._pools)
        """Entries of the page tables of a row."""
        self.entries = EntryMemory(limits) if limits.entry_groups else None
        self.num_flushes = 0
        self._hosted: dict[tuple[int, int], list[np.ndarray]] = {}
        """Pages in host memory by rank and slot: their content for each pool, and the time of their writing."""
        self._hosted_entries: dict[tuple[int, int], int] = {}
        self._arriving: list[tuple[int, list[int], list[np.ndarray], int | None]] = []
        """Rank, places, page and entry of each copy that the next plan receives."""

    def move(self, moves: PageMoves | None) -> None:
        """Copy pages as hosts do: those of the plan before arrive, then others leave, then slots are read."""
        for rank, places, page, entry in self._arriving:
            for held, stands_for in zip(self._of_page(rank, places), page, strict=True):
                if held is not None:
                    held[:] = stands_for
            if self.entries is not None and entry is not None and places[-1]:
                self.entries.states[rank, places[-1]] = entry
        self._arriving.clear()
        if moves is None:
            return
        for rank, slot, entry_slot, *places in moves.offloads.tolist():
            nothing = np.full(self._page_size, POISON)
            self._hosted[rank, slot] = [
                (nothing if held is None else held).copy() for held in self._of_page(rank, places)
            ]
            if self.entries is not None and entry_slot != NO_SLOT:
                self._hosted_entries[rank, entry_slot] = int(self.entries.states[rank, places[-1]])
        for rank, slot, entry_slot, *places in moves.restores.tolist():
            page = [stands_for.copy() for stands_for in self._hosted[rank, slot]]
            self._arriving.append((rank, places, page, self._hosted_entries.get((rank, entry_slot))))

    def _of_page(self, rank: int, places: list[int]) -> list[np.ndarray | None]:
        """Return the content of a page for each pool, None for a pool without it, and the time of its writing."""
        held = [pool.of_page(rank, page) if page else None for pool, page in zip(self._pools, places, strict=False)]
        written = self._written_at.reshape(-1, self._page_size)
        return [*held, written[rank * self._num_pages + places[0]]]

    def announce(self, pages: PageTableChanges) -> None:
        """Set entries of page tables, and the values of states behind them."""
        entries = np.stack([pages.rows, pages.indices])
        assert np.unique(entries, axis=1).shape == entries.shape, "an entry of a page table is set twice in a step"
        is_page = pages.indices < self._num_indices
        if self.entries is not None:
            columns = pages.indices[~is_page] - self._num_indices
            self.entries.columns[pages.rows[~is_page], columns] = pages.page_ids[~is_page]
        else:
            assert is_page.all(), "rows have no values behind their page tables"
        for place, pool in enumerate(self._pools):
            own = is_page & (pages.indices % len(self._pools) == place)
            pool.pages[pages.rows[own], pages.indices[own] // len(self._pools)] = pages.page_ids[own]

    def write(self, plan: StepPlan, spots: Sequence[Spot], *, roots: Sequence[int]) -> None:
        """Write the tokens of a step, each behind what its row has before it; `roots[c]` is before chunk c's first."""
        for pool in self._pools:
            together = np.concatenate([pool.slots(spot.row, spot.position, spot.position + 1) for spot in spots])
            assert len(np.unique(together)) == len(together), "two tokens of one step share a slot"
        ends = np.cumsum(plan.chunks.lengths)
        for c, (end, length) in enumerate(zip(ends.tolist(), plan.chunks.lengths.tolist(), strict=True)):
            if not length:
                continue
            row, start, _, _ = spots[end - length]
            before = int(self.keys(row, start - 1, start)[0]) if start else roots[c] if roots else 0
            keys = chained(before, [spot.token for spot in spots[end - length : end]])
            for pool in self._pools:
                pool.stands_for[pool.slots(row, start, start + length)] = keys
            self._written_at[self._pools[0].slots(row, start, start + length)] = self.num_flushes

    def keys(self, row: int, start: int, stop: int) -> np.ndarray:
        """Return what the slots of positions of a row stand for."""
        return self._pools[0].stands_for[self._pools[0].slots(row, start, stop)]

    def copy_page(self, source: int, row: int, *, end: int) -> None:
        """Copy the page in which a prompt ends to that of a row that forks off it."""
        first = end // self._page_size * self._page_size
        for pool in self._pools:
            pool.stands_for[pool.slots(row, first, end)] = pool.stands_for[pool.slots(source, first, end)]
        whole = self._pools[0]
        self._written_at[whole.slots(row, first, end)] = self._written_at[whole.slots(source, first, end)]

    def check(self, plan: StepPlan, pasts: Sequence[Past], *, is_right: np.ndarray) -> None:
        """Check that every chunk that counts reads its own past, and no sequence goes on after its end."""
        for (row, start, length), past, counts in zip(_chunks(plan), pasts, is_right.tolist(), strict=True):
            if not counts:
                continue
            # After logits that were not finite, a step may go on from a token that nobody will ever see.
            fails, stop = past.finish == "error", start + length
            last = min(stop, len(past.tokens) - (fails and stop > len(past.tokens)))
            for pool in self._pools:
                first_seen = max(0, start + 1 - pool.window) if pool.window else 0
                held = pool.stands_for[pool.slots(row, first_seen, max(first_seen, last))]
                assert np.array_equal(held, past.stands_for[first_seen:last]), "keys, values are lost"
            assert stop <= min(len(past.tokens) + fails, past.max_computed), "it has ended"

    def poison(self, plan: StepPlan, chunks: np.ndarray) -> None:
        """Spoil the last slot of some chunks, bool [chunks]."""
        ends = (plan.chunks.starts + plan.chunks.lengths)[chunks]
        for row, end in zip(plan.chunks.rows[chunks].tolist(), ends.tolist(), strict=True):
            for pool in self._pools:
                pool.stands_for[pool.slots(row, end - 1, end)] = POISON

    def holds(self, data_rank: int, page_ids: np.ndarray, past: np.ndarray, *, place: int = 0) -> bool:
        """Return True if pages of a rank hold the keys and values that `past` stands for, where they are not 0."""
        pool, size = self._pools[place], self._page_size
        return all(
            np.array_equal(pool.of_page(data_rank, page), past[i * size : (i + 1) * size])
            for i, page in enumerate(page_ids.tolist())
            if page
        )

    def end_of_page(self, page_id: int, *, data_rank: int) -> int:
        """Return what the last slot of a page of a rank stands for."""
        return int(self._pools[0].of_page(data_rank, page_id)[-1])

    def oldest(self, row: int, count: int) -> int:
        """Return after how many flushes the oldest of the first `count` positions of a row was computed."""
        return int(self._written_at[self._pools[0].slots(row, 0, count)].min())


@dataclass
class ModelDrafts:
    """A draft model whose drafts are what will be sampled, each with probability `share`."""

    count: int
    share: float
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))


@dataclass
class Row:
    """What a device remembers of a row."""

    last: int
    """Token sampled last that counts."""
    at: int
    """Position of the token before it."""
    drafts: list[int] = field(default_factory=list)
    """Drafts of what follows `last`."""


class SimulatedDevice:
    """All data ranks of a group: rows, and slots by rank if it has `limits`.

    As an executor it returns the result of the step before; `run` computes one step at once.
    """

    def __init__(
        self,
        sample: Sample,
        *,
        limits: StepLimits | None = None,
        drafts: ModelDrafts | None = None,
        routing_of: Callable[[StepPlan, np.ndarray], np.ndarray] | None = None,
    ) -> None:
        self._sample, self._limits, self._drafts, self._routing_of = sample, limits, drafts, routing_of
        self.memory = None if limits is None else PagedMemory(limits)
        self.seeds: dict[int, tuple[int, int]] = {}
        """Seed and choice of each row."""
        self.steps: dict[int, list[Spot]] = {}
        """Tokens of each step as they were computed, if drafts may be awaited."""
        self.num_awaited = 0
        """Chunks that were awaited."""
        self.in_flight: StepResult | None = None
        self.rows: dict[int, Row] = {}

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Run a step, and return the result of the one before."""
        before, self.in_flight = self.in_flight, self.run(plan) if plan.num_chunks else None
        return before

    def reset(self) -> None:
        """Lose all that is there."""
        self.rows, self.in_flight = {}, None
        self.memory = None if self._limits is None else PagedMemory(self._limits)

    def run(self, plan: StepPlan, pasts: Sequence[Past] = ()) -> StepResult:
        """Compute a step; `pasts[c]` is that of the sequence of chunk c, if they are known."""
        self.seeds |= {int(row): tuple(seed) for row, seed in zip(plan.sampling.rows, _seeds(plan), strict=True)}
        spots = list(self._spots(plan))
        if self.memory is not None:
            self.memory.announce(plan.pages)
            self.memory.write(plan, spots, roots=[past.root for past in pasts])
        ids, finite, is_right = self._samples(plan, spots)
        if pasts:
            assert self.memory is not None, "pasts stand in pages"
            self.memory.check(plan, pasts, is_right=is_right)
            if self.memory.entries is not None:
                self.memory.entries.run(plan, spots, pasts, is_right=is_right)
            self.memory.poison(plan, ~is_right)
        if self.memory is not None and not finite.all():
            self.memory.poison(plan, np.isin(np.arange(plan.num_chunks), np.flatnonzero(plan.chunks.samples)[~finite]))
        drafts = None
        if self._drafts is not None:
            self.steps[plan.step_id] = spots
            sampled = dict.fromkeys(plan.chunks.rows[plan.chunks.samples].tolist())
            if plan.wants_drafts and sampled:
                drafts = np.array([self._draft(row, self._drafts) for row in sampled], np.int32)
        positions = np.array([spot.position for spot in spots])
        routing = self._routing_of(plan, positions) if self._routing_of and plan.wants_routing else None
        return StepResult(plan.step_id, ids, -ids.astype(np.float32), finite.astype(np.int32), routing, drafts=drafts)

    def accept(self, row: int, found: list[tuple[int, int]]) -> None:
        """Have the last of a row's right samples count; each is its token behind a position."""
        position, sampled = found[-1]
        self.rows[row] = Row(sampled, position)

    def _spots(self, plan: StepPlan) -> Iterator[Spot]:
        """Yield every token of a plan, as the devices know it."""
        ids = iter(plan.chunks.token_ids.tolist())
        for row, start, length in _chunks(plan):
            if start <= AWAITED:
                self.num_awaited += 1
                start = self.rows[row].at + 1 + AWAITED - start
            for position in range(start, start + length):
                token = next(ids)
                assert token >= 0 or row in self.rows, "nothing was sampled in this row"
                if token == LAST_SAMPLED:
                    token = self.rows[row].last
                elif token == DRAFTED:
                    token = self.rows[row].drafts[position - self.rows[row].at - 2]
                yield Spot(row, position, token)

    def _samples(self, plan: StepPlan, spots: list[Spot]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return token and finiteness of each sample, and for each chunk whether it is no wrong draft.

        A draft is right if its token is what was sampled before it.
        """
        chunks, ends = plan.chunks, np.cumsum(plan.chunks.lengths)
        is_right, found, sampled = np.ones(plan.num_chunks, np.bool_), [], WRONG
        accepted: dict[int, list[tuple[int, int]]] = {}
        for c, row in enumerate(chunks.rows.tolist()):
            spot = spots[ends[c] - 1]
            if c and row == chunks.rows[c - 1]:
                assert spot.position == spots[ends[c - 1] - 1].position + 1, "a draft stands behind the token before it"
                is_right[c] = is_right[c - 1] and spot.token == sampled
            if not chunks.lengths[c] and self.memory is not None:
                self.memory.copy_page(spot.row, row, end=int(chunks.starts[c]))
            if not chunks.samples[c]:
                continue
            sampled, is_finite = self._sample(self, spot._replace(row=row)) if is_right[c] else (WRONG, True)
            found.append((sampled, is_finite))
            if is_right[c]:
                accepted.setdefault(row, []).append((spot.position, sampled))
        for row, samples in accepted.items():
            self.accept(row, samples)
        ids, finite = zip(*found, strict=True) if found else ((), ())
        return np.array(ids, np.int32), np.array(finite, np.bool_), is_right

    def _draft(self, row: int, drafts: ModelDrafts) -> list[int]:
        state, follows = self.rows[row], ()
        for _ in range(drafts.count):
            spot = Spot(row, state.at, WRONG, (state.last, *follows))
            follows = (*follows, self._sample(self, spot)[0])
        wrong = drafts.generator.random(drafts.count) >= drafts.share
        state.drafts = [token + bool(is_wrong) for token, is_wrong in zip(follows, wrong, strict=True)]
        return state.drafts


def _chunks(plan: StepPlan) -> Iterator[tuple[int, int, int]]:
    """Iterate over row, start and length of each chunk."""
    chunks = plan.chunks
    return zip(chunks.rows.tolist(), chunks.starts.tolist(), chunks.lengths.tolist(), strict=True)


def _seeds(plan: StepPlan) -> list[list[int]]:
    return plan.sampling.integers[:, 1:3].tolist()
