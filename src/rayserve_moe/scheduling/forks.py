"""The other choices of a request: they fork off its prompt once it is computed, or wait to find it cached."""

from __future__ import annotations

from collections import deque
from itertools import takewhile

from rayserve_moe.scheduling.data_rank import DataRank
from rayserve_moe.scheduling.rank_step import RankStep
from rayserve_moe.scheduling.sequence import NO_ROW, Sequence


def fork_followers(step: RankStep, *, page_size: int) -> None:
    """Let those who follow a prompt that ends in this step sample after it too, as far as there are rows, and pages for
    where it ends inside one. The others follow on."""
    rank = step.rank
    for leader, _ in list(step.completed):
        while rank.free_rows and any(follower.finish is None for follower in leader.followers):
            pages = rank.take_pages(1 if leader.num_prompt_tokens % page_size else 0)
            if pages is None:
                return
            leader.followers = [follower for follower in leader.followers if follower.finish is None]
            step.fork(leader.followers.pop(0), leader, pages=pages)


def release_followers(leader: Sequence, waiting: deque[Sequence]) -> None:
    """Queue the other choices of a request, to find its prompt cached: after those that have run before."""
    followers, leader.followers = [f for f in leader.followers if f.finish is None], []
    if followers:
        num_preempted = sum(1 for _ in takewhile(lambda s: s.num_to_recompute > 0, waiting))
        waiting.rotate(-num_preempted)
        waiting.extendleft(reversed(followers))
        waiting.rotate(num_preempted)


def cache_with_forks(rank: DataRank, sequence: Sequence, num_tokens: int) -> None:
    """Add the whole pages of the first `num_tokens` of a sequence to the prefix cache, also for the choices that share
    them without a lock: those that have forked off in a step that is not committed yet."""
    rank.cache_computed(sequence, num_tokens)
    for other in sequence.choices:
        if other is not sequence and other.row != NO_ROW and other.data_rank == rank.index:
            rank.cache_computed(other, min(num_tokens, other.num_prompt_tokens))
