"""A fleet on a computed clock: conversations arrive, a policy sends each turn to a replica, replicas take steps."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np

from benchmarks.simulation.replica import ANSWER_ID, KEY, SimulatedReplica
from benchmarks.simulation.workloads import Conversation, token_ids
from rayserve_moe.engine.output_dispatch import GROUPING_S_PER_SEQUENCE, MAX_GROUPING_S
from rayserve_moe.fleet.choosing import Choosing, Prompt
from rayserve_moe.fleet.load_average import LoadAverage, Report
from rayserve_moe.fleet.page_feed import REPORT_S
from rayserve_moe.fleet.prefix_index import PrefixIndex
from rayserve_moe.scheduling.page_digests import prompt_digests
from rayserve_moe.scheduling.sequence import Sequence

NUM_ROUTERS = 2
"""As a server has; each books what it sends for itself."""
POLICIES = ("round robin", "two choices", "load", "prefix")


@dataclass
class Asked:
    """A turn on its way: where its conversation is, and when what happened to it."""

    conversation: Conversation
    turn: int
    prompt: np.ndarray
    arrived_at: float
    first_at: float = 0.0
    told_at: float = 0.0
    last_at: float = 0.0
    num_given: int = 0
    num_cached: int = 0


@dataclass
class Seen:
    """What a simulation, or a run, has shown: all requests that ended, and the seconds between two events of one."""

    asked: list[Asked] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    num_replicas: int = 0
    began_at: float = 0.0
    ended_at: float = 0.0

    @property
    def last_start_s(self) -> float:
        """Return the start of the last conversation."""
        return max(one.arrived_at for one in self.asked if not one.turn)

    def steady(self) -> Seen:
        """Return the requests of the second half of the starts: caches are warm, and load is even."""
        last = self.last_start_s
        kept = [one for one in self.asked if last / 2 <= one.arrived_at <= last]
        return replace(self, asked=kept, began_at=last / 2, ended_at=last)

    def figures(self, *, ttft_s: float, tpot_s: float) -> dict[str, float]:
        """Return rates by second and replica; a good request has its first token and its mean gap within bounds."""
        ttft = np.array([one.first_at - one.arrived_at for one in self.asked])
        tokens = np.array([one.conversation.turns[one.turn].num_answer for one in self.asked])
        spans = np.array([one.last_at - one.first_at for one in self.asked])
        tpot = spans / np.maximum(tokens - 1, 1)
        given = sum(one.num_given for one in self.asked)
        cached = sum(one.num_cached for one in self.asked)
        whole = (self.ended_at - self.began_at) * self.num_replicas
        good = (ttft <= ttft_s) & (tpot <= tpot_s)
        gaps = np.array(self.gaps or [0.0])
        return {
            "requests": float(len(self.asked)),
            "requests_s": len(self.asked) / whole,
            "goodput_s": float(good.sum()) / whole,
            "good_share": float(good.mean()),
            "tokens_s": float(tokens.sum()) / whole,
            "ttft_p50_s": float(np.quantile(ttft, 0.5)),
            "ttft_p99_s": float(np.quantile(ttft, 0.99)),
            "tpot_p50_s": float(np.quantile(tpot, 0.5)),
            "tpot_p99_s": float(np.quantile(tpot, 0.99)),
            "gap_p50_s": float(np.quantile(gaps, 0.5)),
            "gap_p99_s": float(np.quantile(gaps, 0.99)),
            "hits": cached / given,
            "computed": float(given - cached),
        }


class Routing:
    """A policy: `choose` names a replica, `follow` is told what has changed in one."""

    def __init__(self, policy: str, replicas: dict[str, SimulatedReplica], *, page_size: int, seed: int) -> None:
        assert policy in POLICIES, policy
        self._policy, self._replicas, self._page_size = policy, replicas, page_size
        self.needs_reports = policy in ("load", "prefix")
        self._names, self._now, self._draw = list(replicas), 0.0, random.Random(seed)
        self._turn, self._index = count(), PrefixIndex()
        self._index.follow(self._names)
        how = {"draw": self._draw, "clock": lambda: self._now}
        self._routers = [Choosing(self._index, **how) for _ in range(NUM_ROUTERS)]
        self._averages = {name: LoadAverage(0.0) for name in replicas}
        if policy == "prefix":
            for name, replica in replicas.items():
                for part in replica.watch():
                    self._index.apply(name, part)

    def choose(self, token_ids: np.ndarray, now: float) -> str:
        """Return the replica that a prompt goes to."""
        self._now = now
        if self._policy == "round robin":
            return self._names[next(self._turn) % len(self._names)]
        if self._policy == "two choices":
            some = self._draw.sample(self._names, min(2, len(self._names)))
            return min(some, key=lambda name: self._replicas[name].load().num_choices)
        digests = []
        if self._policy == "prefix":
            digests = prompt_digests(KEY, "", token_ids=token_ids, page_size=self._page_size)
        router = self._draw.choice(self._routers)
        return router.choose(Prompt(len(token_ids), digests, self._page_size), self._names)

    def report(self, name: str, now: float) -> None:
        """Have the routers know a replica's load."""
        load = self._averages[name].add(self._replicas[name].load(), now)
        for router in self._routers:
            router.report(name, Report(load))

    def follow(self, name: str) -> None:
        """Take the page events of a replica."""
        if (message := self._replicas[name].page_events()) is not None:
            self._index.apply(name, message)


Event = tuple[float, int, Callable[[float], None]]


class Simulation:
    """One run of a fleet; `run` returns what was seen."""

    def __init__(self, policy: str, replicas: list[SimulatedReplica], *, request_s: float, seed: int = 0) -> None:
        self._replicas = {str(number): replica for number, replica in enumerate(replicas)}
        page_size = replicas[0].cycle.scheduler.table.page_size
        self._routing = Routing(policy, self._replicas, page_size=page_size, seed=seed)
        self._request_s, self._events, self._numbers = request_s, list[Event](), count()
        self._asked: dict[Sequence, Asked] = {}
        self._callers: dict[int, Callable[[float], None]] = {}
        self._num_reports = 0
        self._seen = Seen(num_replicas=len(replicas))

    def run(self, conversations: Iterable[Conversation], *, until_s: float = math.inf) -> Seen:
        """Play conversations, which come in order of time, to the end of the last, or to a time."""
        coming = iter(conversations)
        self._begin_next(coming)
        for place, name in enumerate(self._replicas):
            self._report(name, place / len(self._replicas) * REPORT_S)
        while len(self._events) > self._num_reports:
            now, _, act = heappop(self._events)
            if now > until_s:
                break
            act(now)
        return self._seen

    def counts(self, asked: Asked) -> bool:
        """Return True if the gaps of a request count."""
        return True

    def _report(self, name: str, when: float) -> None:
        """Have a replica report its load then, and on from there, at its own moments."""

        def report(now: float) -> None:
            self._num_reports -= 1
            self._routing.report(name, now)
            self._report(name, now + REPORT_S)

        if self._routing.needs_reports:
            self._num_reports += 1
            self._at(when, report)

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        heappush(self._events, (when, next(self._numbers), act))

    def _begin_next(self, coming: Iterator[Conversation]) -> None:
        """Have the next conversation begin when it does, and then see to the one after it."""
        conversation = next(coming, None)
        if conversation is None:
            return

        def begin(now: float) -> None:
            if conversation.turns:
                self._ask(conversation, 0, np.zeros(0, np.int32), now)
            self._begin_next(coming)

        self._at(conversation.starts_at, begin)

    def _ask(self, conversation: Conversation, turn: int, history: np.ndarray, now: float) -> None:
        kept = history[: len(history) - conversation.turns[turn].num_dropped]
        prompt = np.concatenate([kept, token_ids(conversation.turns[turn].spans)])
        asked = Asked(conversation, turn, prompt, now, num_given=len(prompt))
        name = self._routing.choose(prompt, now)
        self._at(now + self._request_s, lambda then: self._enter(name, asked, then))

    def _enter(self, name: str, asked: Asked, now: float) -> None:
        replica, number = self._replicas[name], next(self._numbers)
        turns = asked.conversation.turns
        sequence = replica.add(
            str(number),
            asked.prompt,
            num_answer=turns[asked.turn].num_answer,
            session=str(id(asked.conversation)) if asked.conversation.sends_hints else None,
            is_last=asked.turn == len(turns) - 1,
        )
        self._asked[sequence] = asked
        if not replica.is_awake:
            replica.is_awake = True
            self._at(now, lambda then: self._step(name, then))

    def _step(self, name: str, now: float) -> None:
        """Begin a step; what the one before it comes to is known when that has ended."""
        replica = self._replicas[name]
        got, ended = replica.step(now)
        self._at(replica.clock.now, lambda then: self._take(name, got, ended, now=then))

    def _take(self, name: str, got: Iterable[Sequence], ended: Iterable[Sequence], *, now: float) -> None:
        got = list(got)
        interval = min(MAX_GROUPING_S, GROUPING_S_PER_SEQUENCE * len(got))
        for sequence in got:
            asked = self._asked[sequence]
            if not asked.first_at:
                asked.first_at = asked.told_at = now
            elif now - asked.told_at >= interval or sequence in ended:
                if self.counts(asked):
                    self._seen.gaps.append(now - asked.told_at)
                asked.told_at = now
            asked.last_at = now
        self._routing.follow(name)
        for sequence in ended:
            self._end(sequence, now)
        replica = self._replicas[name]
        replica.is_awake = replica.cycle.has_work
        if replica.is_awake:
            self._step(name, now)

    def _end(self, sequence: Sequence, now: float) -> None:
        asked = self._asked.pop(sequence)
        self._seen.ended_at = now
        asked.num_cached = sequence.cache.num_cached
        self._seen.asked.append(asked)
        conversation, following = asked.conversation, asked.turn + 1
        if following < len(conversation.turns):
            answer = np.full(conversation.turns[asked.turn].num_answer, ANSWER_ID, np.int32)
            self._continue(conversation, following, np.concatenate([asked.prompt, answer]), now)
        else:
            self._leave(conversation, now)
        asked.prompt = np.zeros(0, np.int32)

    def _continue(self, conversation: Conversation, turn: int, history: np.ndarray, now: float) -> None:
        """Schedule the next turn of a conversation for the end of its gap and of its subagents."""
        following = conversation.turns[turn]
        left = 1 + len(following.calls)

        def ended(then: float) -> None:
            nonlocal left
            left -= 1
            if not left:
                self._ask(conversation, turn, history, then)

        self._at(now + following.gap_s, ended)
        for called in following.calls:
            self._callers[id(called)] = ended
            self._ask(called, 0, np.zeros(0, np.int32), now)

    def _leave(self, conversation: Conversation, now: float) -> None:
        """End a conversation; the caller of a subagent may continue."""
        if (ended := self._callers.pop(id(conversation), None)) is not None:
            ended(now)


def simulate(
    policy: str, make: Callable[[], SimulatedReplica], conversations: Iterable[Conversation], **how: Any
) -> Seen:
    """Run `num_replicas` new replicas; `how` is `num_replicas`, `request_s`, `seed`, and for a limit `until_s`."""
    replicas, until_s = [make() for _ in range(how.pop("num_replicas"))], how.pop("until_s", math.inf)
    return Simulation(policy, replicas, **how).run(conversations, until_s=until_s)
