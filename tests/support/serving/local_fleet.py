"""A fleet in one process: replicas over engines of their own, which are called as over Serve, and may be silent."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any

import httpx

from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.fleet.broadcast import Answer, Answers, collect, expected_of
from rayserve_moe.fleet.journal_client import JournalClient
from rayserve_moe.fleet.member import FleetMember, StateUnavailableError
from rayserve_moe.fleet.wanted_state import RESTORE_S, WantedState
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.control.membership import Membership
from rayserve_moe.serving.control.replica_calls import answer
from rayserve_moe.serving.http import create_api
from tests.support.serving.http_server import running


@dataclass
class OwnState:
    """The state as its actor has it, unless that is lost."""

    kept: WantedState
    is_lost: bool = False

    def __getattr__(self, method: str) -> Any:
        if self.is_lost:
            raise StateUnavailableError("the actor is lost")
        return getattr(self.kept, method)

    async def ask(self, method: str, *arguments: Any) -> Any:
        return getattr(self, method)(*arguments)


@dataclass
class OwnCalls:
    """Calls in this process. Those in `silent` do not answer; `listed` and `wanted` are what Serve would tell."""

    replicas: dict[str, ApiState] = field(default_factory=dict)
    listed: dict[str, str] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    wanted: int | None = None

    def put(self, content: bytearray) -> list[Any]:
        return [bytes(content)]

    def get(self, sent: list[Any]) -> bytearray:
        return bytearray(sent[0])

    async def ask(self, call: str, *arguments: Any, timeout_s: float, members: Any) -> Answers:
        self.asked.append(call)
        told = [name for name in self.replicas if name not in self.silent and name in self.listed]
        answers = [await answer(self.replicas[name], call, arguments=arguments) for name in told]
        return replace(collect(answers, expected_of(self.listed, members())), num_wanted=self.wanted)

    async def ask_one(self, replica: str, call: str, *arguments: Any, timeout_s: float) -> Answer | None:
        self.asked.append(call)
        if replica not in self.replicas or replica in self.silent:
            return None
        return await answer(self.replicas[replica], call, arguments=arguments)

    async def num_wanted(self) -> int | None:
        return self.wanted


@dataclass
class LocalFleet:
    """Replicas that have joined, with a client of each."""

    calls: OwnCalls
    state: OwnState
    clients: dict[str, httpx.Client] = field(default_factory=dict)
    given_up: list[str] = field(default_factory=list)
    server: ServerSettings = field(default_factory=ServerSettings)

    def __getitem__(self, name: str) -> httpx.Client:
        return self.clients[name]

    def member(self, name: str) -> FleetMember:
        fleet = self.calls.replicas[name].membership
        assert fleet is not None
        return fleet.member

    def sync(self, names: Collection[str] = ()) -> None:
        """Have replicas compare once, as their threads would every second."""
        for name in names or self.clients:
            self.member(name).sync(self.calls.replicas[name].loop.control)

    def add(self, name: str, engine: Engine, closing: ExitStack, journal: JournalClient | None = None) -> None:
        """Start a replica: it joins, and serves."""
        self.calls.listed[name] = "RUNNING"
        member = FleetMember(name, self.state, lambda: self.calls.listed, lambda: self.given_up.append(name))
        member.follow(engine.loop.control, self.state.view().wanted)
        membership = Membership(member, self.calls, self.state, 60.0)  # type: ignore[arg-type]
        state = ApiState(engine.loop, engine.tokenizer, self.server, membership=membership, journal=journal)
        assert self.state.join(name, member.applied.number)
        self.calls.replicas[name] = state
        url = closing.enter_context(running(create_api(state)))
        self.clients[name] = closing.enter_context(httpx.Client(base_url=url, timeout=60))

    def remove(self, name: str) -> None:
        """Have Serve lose a replica."""
        del self.calls.listed[name], self.calls.replicas[name], self.clients[name]


@contextmanager
def local_fleet(engines: dict[str, Engine]) -> Iterator[LocalFleet]:
    """Serve engines as the replicas of one application."""
    times = chain([0.0], repeat(RESTORE_S))  # the state is as old as it has to be for replicas to join
    fleet = LocalFleet(OwnCalls(), OwnState(WantedState(clock=times.__next__)))
    with ExitStack() as closing:
        for name, engine in engines.items():
            fleet.add(name, engine, closing)
        fleet.sync()
        yield fleet
