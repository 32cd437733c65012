"""Choices with the same prompt: they fork off the computed prompt of the first, or wait until it is cached."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import takewhile

import numpy as np

from rayserve_moe.scheduling.data_rank import DataRank
from rayserve_moe.scheduling.rank_step import ChunkRun, RankStep
from rayserve_moe.scheduling.sequence import NO_ROW, Sequence
from rayserve_moe.scheduling.waiting_queue import WaitingQueue


def fork_followers(step: RankStep, *, page_size: int) -> None:
    """Fork the followers of prompts that end in this step, so that they also sample after the prompt.

    A fork needs a free row, and a page if the prompt ends inside a page. The other followers remain.
    """
    rank = step.rank
    for leader, _ in list(step.completed):
        group = leader.group
        while rank.free_rows and any(follower.finish is None for follower in group.followers):
            pages = rank.take_pages(1 if leader.num_prompt_tokens % page_size else 0)
            if pages is None:
                return
            group.followers = [follower for follower in group.followers if follower.finish is None]
            _fork(step, group.followers.pop(0), leader=leader, own_pages=pages)


def _fork(step: RankStep, sequence: Sequence, *, leader: Sequence, own_pages: np.ndarray) -> None:
    """Start a choice after the leader's prompt; `own_pages` is for the last, partial page of the prompt."""
    _take_row(step.rank, sequence, leader=leader, own_pages=own_pages)
    sequence.cache.transferred = leader.cache.transferred
    sequence.record_start(leader.num_prompt_tokens)
    step.new_sequences.append(sequence)
    row, pages = sequence.row, sequence.pages.copy()
    step.set_pages(np.full(len(pages), row), np.arange(len(pages)), page_ids=pages)
    fork = ChunkRun(
        np.array([row]),
        np.array([sequence.num_computed]),
        lengths=np.array([0]),
        token_ids=np.zeros(0, np.int32),
        samples=np.array([leader.num_prompt_tokens < leader.limit]),
    )
    place = next(i for i, run in enumerate(step.runs) if run.rows[0] == leader.row)
    step.runs.insert(place + 1, fork)
    step.num_forks += 1
    step.completed.append((sequence, int(step.rank.table.generations[row])))


def _take_row(rank: DataRank, sequence: Sequence, *, leader: Sequence, own_pages: np.ndarray) -> None:
    """Make a sequence the youngest running sequence of a rank, with the leader's prompt pages and `own_pages`.

    Shared pages that are not cached yet have no lock until they are.
    """
    table, position = rank.table, leader.num_prompt_tokens
    row, shared = rank.free_rows.pop(), leader.pages[: position // table.page_size]
    table.take(row, sequence)
    prefix = leader.cache.prefix
    assert prefix is not None, "a leader runs"
    rank.tree.lock(prefix)
    sequence.data_rank, cache = rank.index, sequence.cache
    cache.prefix, cache.num_flushes = prefix, leader.cache.num_flushes
    rank.allocator.share(shared)
    first_row = rank.rows.start
    for state in rank.states:
        state.fork(row - first_row, shared, position=position, leader=leader.row - first_row)
    pages = np.concatenate([shared, own_pages])
    table.extend(row, pages, generations=rank.allocator.generations[pages])
    table.num_computed[row] = position
    rank.running.append(sequence)
    rank.prefilling.append(sequence)


def release_followers(leader: Sequence, waiting: WaitingQueue) -> None:
    """Queue the other choices of a request, which then find the prompt cached. Preempted sequences stay ahead."""
    group = leader.group
    followers, group.followers = [f for f in group.followers if f.finish is None], []
    if followers:
        num_preempted = sum(1 for _ in takewhile(lambda s: s.queue.num_to_recompute > 0, waiting))
        for place, follower in enumerate(followers, num_preempted):
            waiting.insert(place, follower)


def cache_with_forks(rank: DataRank, sequence: Sequence, *, num_tokens: int) -> None:
    """Add the whole pages of the first `num_tokens` of a sequence to the prefix cache.

    This is also done for choices that share the pages without a lock, because they forked off in a step that is not
    committed yet.
    """
    rank.cache_computed(sequence, num_tokens)
    for other in sequence.group.choices:
        if other is not sequence and other.row != NO_ROW and other.data_rank == rank.index:
            rank.cache_computed(other, min(num_tokens, other.num_prompt_tokens, other.num_computed))


class PromptPins:
    """Pins on cached prompts that waiting choices need, of one request or of several requests.

    The choices of a rollout group thus find their prompt, however the group is sent. Pins change the order of eviction
    only, within the share of pages that may be protected.
    """

    def __init__(self, ranks: list[DataRank]) -> None:
        self._ranks = ranks
        self._waiting: dict[Hashable, set[Sequence]] = {}
        """Choices without a row so far, by key of namespace and prompt."""
        self._pinning: dict[Hashable, set[int]] = {}
        """Ranks with a pin on a prompt."""

    def add(self, choices: list[Sequence]) -> None:
        """Record new choices of a prompt."""
        leader = choices[0]
        key = hash((leader.cache.namespace, leader.token_ids[: leader.num_prompt_tokens].tobytes()))
        for choice in choices:
            choice.group.prompt = key
        self._waiting.setdefault(key, set()).update(choices)

    def pin(self, sequence: Sequence) -> None:
        """Pin the prompt of a sequence that is about to release its pages, if other choices wait for it."""
        key = sequence.group.prompt
        if key in self._waiting:
            tree, prompt_ids = self._ranks[sequence.data_rank].tree, sequence.request.prompt_ids
            tree.protect(sequence.cache.namespace, prompt_ids, holder=key)
            self._pinning.setdefault(key, set()).add(sequence.data_rank)

    def start(self, choice: Sequence) -> None:
        """Record that a choice has got a row, or has ended, and unpin its prompt if it was the last to wait."""
        key = choice.group.prompt
        waiting = self._waiting.get(key, set())
        waiting.discard(choice)
        if key in self._waiting and not waiting:
            del self._waiting[key]
            for index in self._pinning.pop(key, ()):
                tree, cache = self._ranks[index].tree, choice.cache
                prompt = tree.match(cache.namespace, choice.request.prompt_ids, owner=cache.owner)
                tree.order.unpin(prompt.path_up(), key)

    def check_integrity(self) -> None:
        """Assert that all choices on record wait, and that only their prompts are pinned."""
        waiting = [choice for choices in self._waiting.values() for choice in choices]
        assert all(choice.row == NO_ROW and choice.finish is None for choice in waiting), "a choice waits no more"
        assert all(self._waiting.values()) and self._pinning.keys() <= self._waiting.keys(), "a pin is left"
