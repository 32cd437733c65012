"""Pages of a prompt that one replica computes and another receives: both ends of the push, and its records.

A received page is a page in host memory like others, so that restoring it, its rows and its release are those of
`scheduling.host_pages`. Any failure costs the pages, never the request: it is computed here.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

import numpy as np

from rayserve_moe.engine.command_queue import CommandQueue, EngineStoppedError
from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.engine.executor import ExecutorFailure, PageHosts
from rayserve_moe.engine.extension import extension_of
from rayserve_moe.engine.host_pages import HostedPages
from rayserve_moe.engine.output_dispatch import OutputDispatch
from rayserve_moe.scheduling.data_rank import num_found
from rayserve_moe.scheduling.host_pages import HostPages, page_names
from rayserve_moe.scheduling.host_slots import HostedPage, PageName, PageSlots
from rayserve_moe.scheduling.prefix_tree import TOKEN_BYTES
from rayserve_moe.scheduling.scheduler import namespace_of
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import NO_SLOT
from rayserve_moe.scheduling.token_probe import probe_for

log = logging.getLogger(__name__)

VERSION, NAMESPACE, RANGE, LOST, FULL, NOT_KEPT, BUSY, LATE, STOPPED = (
    *("weight_version", "namespace", "range", "lost", "full", "not_kept", "busy", "late", "stopped"),
)
"""Reasons for dropping pages, in addition to the faults of `execution.page_store`."""


class PushRefusedError(RuntimeError):
    """Pages of a prompt are not available. The text is the reason."""


@dataclass(frozen=True)
class PromptRequest:
    """A decoding replica's request for pages of a prompt."""

    token_ids: np.ndarray
    """The whole prompt, int32. The pages of its last token are not wanted."""
    namespace: tuple[str, ...]
    """Namespace of its prefixes: the salt."""
    first_page: int
    """First wanted page; the replica has those before it."""
    weight_version: str


class PushedPage(NamedTuple):
    """Record of a pushed page."""

    are_held: tuple[bool, ...]
    """For each state, True if its data is pushed."""
    has_entry: bool
    """True if the arrays of entries have rows of this page."""
    rows: Any
    """Routing rows, without their version; None on a server that captures none."""


@dataclass(frozen=True)
class Push:
    """Pages of a prompt, in order, all of one weight version."""

    namespace: tuple[str, ...]
    first_page: int
    weight_version: str
    pages: tuple[PushedPage, ...]
    shares: Mapping[int, Any]
    """Bytes by place of a device in a data rank (`executor.PageHosts`)."""


Outcome = Push | PushRefusedError


class PromptSource(Protocol):
    """Other replicas that compute prompts."""

    def ask(self, request: PromptRequest, deliver: Callable[[Outcome], object]) -> bool:
        """Request pages; return False if no replica computes prompts.

        `deliver` is called once, from any thread.
        """
        ...


@dataclass
class _Lent:
    """Pages of a push whose bytes are on their way into slots."""

    choices: list[Sequence]
    host: HostPages
    num_clears: int
    """Number of times that the host's pages were cleared before."""
    names: list[PageName]
    pages: list[HostedPage]


class PagePushes:
    """Sender and receiver of pages. Methods run in the engine thread; bytes move in other threads, beside steps."""

    def __init__(
        self,
        cycle: StepCycle,
        hosts: PageHosts,
        *,
        commands: CommandQueue,
        outputs: OutputDispatch,
        version: Callable[[], str],
        admit: Callable[[list[Sequence]], object],
    ) -> None:
        hosted = extension_of(cycle.extensions, HostedPages)
        assert hosted is not None, "pages are kept in host memory"
        self._hosted, self._cycle, self._hosts = hosted, cycle, hosts
        self._commands, self._outputs, self._version = commands, outputs, version
        self._admit = admit
        """Queues the choices of a request, with or without pages."""
        self._source: PromptSource | None = None
        self._min_tokens = 0
        self.held: dict[Sequence, list[Sequence]] = {}
        """Choices of held requests, keyed by the first choice."""
        self._threads = ThreadPoolExecutor(2, "pushed-pages")
        self.refused: Counter[str] = Counter()
        """Pushes that were not used, or not in full, by reason."""
        self.num_sent = self.num_received = 0

    def statistics(self) -> dict[str, float]:
        """Return totals of pages and of pushes that were not used."""
        return {
            "pushed_pages_sent": float(self.num_sent),
            "pushed_pages_received": float(self.num_received),
            "pushes_refused": float(self.refused.total()),
        }

    def receive_from(self, source: PromptSource, *, min_tokens: int) -> None:
        """Request prompts from other replicas from now on, if at least `min_tokens` of them are not cached here.

        Call before the first request.
        """
        self._source, self._min_tokens = source, min_tokens

    def post(self, command: Callable[[], None]) -> None:
        """Run a command in the engine thread, between two steps."""
        self._commands.post(command)

    def close(self) -> None:
        """Begin no further transfers."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def send(self, sequence: Sequence, *, first_page: int, done: Future[Push]) -> None:
        """Read the pages of an ended sequence's prompt for another replica."""
        namespace, host = sequence.cache.namespace, self._hosted.hosts[sequence.data_rank]
        token_ids = sequence.token_ids[: sequence.num_prompt_tokens - 1]
        assert isinstance(namespace, tuple), "a pushed prompt is of no private namespace"
        kept = host.keep_prefix(namespace, token_ids, first=first_page)
        rows = [self._hosted.for_push(hosted.rows) for hosted in kept.values()]
        count = len(list(takewhile(_is_known, rows)))
        if not count:
            done.set_exception(PushRefusedError(NOT_KEPT))
            return
        names, pages = list(kept)[:count], list(kept.values())[:count]
        slots = _slots_of(pages)
        pushed = tuple(
            PushedPage(hosted.are_held, hosted.entry_slot != NO_SLOT, of_page[0])
            for hosted, of_page in zip(pages, rows, strict=False)
            if of_page is not None
        )
        push = Push(namespace, first_page, self._version(), pushed, {})
        place = PageSlots(sequence.data_rank, slots, self._carry())
        self._threads.submit(self._read, push, place, names=names, pages=pages, done=done)

    def begin(self, choices: list[Sequence]) -> bool:
        """Request pages for the choices of a new request, and hold it until `admit`.

        Returns: False if its prompt is computed here.
        """
        leader, scheduler, version = choices[0], self._cycle.scheduler, self._version()
        request = leader.request
        namespace = namespace_of(scheduler, request)
        is_probed = request.wants_evidence and probe_for(request, version) is not None
        if self._source is None or not isinstance(namespace, tuple) or request.adapter or is_probed:
            return False
        leader.cache.namespace = namespace
        found = {rank: num_found(rank, leader) for rank in scheduler.open_ranks}
        rank = max(found, key=lambda rank: (found[rank], -len(rank.running)))
        page_size = scheduler.table.page_size
        first = found[rank] // page_size
        if ((len(request.prompt_ids) - 1) // page_size - first) * page_size < self._min_tokens:
            return False
        asked = PromptRequest(np.asarray(request.prompt_ids, np.int32), namespace, first, version)
        self.held[leader] = choices
        deliver = partial(self._deliver, leader, asked, self._hosted.hosts[rank.index])
        if self._source.ask(asked, deliver):
            return True
        self.held.pop(leader, None)
        return False

    def _deliver(self, leader: Sequence, asked: PromptRequest, host: HostPages, outcome: Outcome) -> None:
        self._commands.post(partial(self._receive, leader, asked, host, outcome=outcome))

    def _receive(self, leader: Sequence, asked: PromptRequest, host: HostPages, *, outcome: Outcome) -> None:
        """Lend slots for pages, and have the hosts write them."""
        choices = self.held.get(leader)
        if choices is None:
            return
        reason = str(outcome) if isinstance(outcome, PushRefusedError) else self._fault(asked, outcome)
        if reason or isinstance(outcome, PushRefusedError):
            self._end(choices, reason)
            return
        page_bytes = self._cycle.scheduler.table.page_size * TOKEN_BYTES
        run, first = asked.token_ids[:-1].tobytes(), asked.first_page
        names = page_names(asked.namespace, run, page_bytes=page_bytes, first=first)
        pages: list[HostedPage] = []
        for page in outcome.pages[: len(names)]:
            hosted = host.slots.lend(page.are_held, rows=self._hosted.from_push(page.rows))
            if hosted is None:
                break
            if (hosted.entry_slot != NO_SLOT) != page.has_entry:
                host.slots.take_back(hosted)
                break
            hosted.is_transferred = True
            pages.append(hosted)
        if not pages:
            self._end(choices, FULL)
            return
        if len(pages) < len(outcome.pages):
            self._refuse(FULL)
        lent = _Lent(choices, host, host.num_clears, names[: len(pages)], pages)
        place = PageSlots(self._hosted.hosts.index(host), _slots_of(pages), self._carry())
        self._threads.submit(self._write, lent, place, outcome.shares)

    def _fault(self, asked: PromptRequest, push: Push) -> str:
        """Return the reason why no page of a push can be used; empty if some can."""
        if push.namespace != asked.namespace:
            return NAMESPACE
        if not push.weight_version == asked.weight_version == self._version():
            return VERSION
        if push.first_page != asked.first_page or any(
            len(page.are_held) != len(self._cycle.scheduler.ranks[0].states) for page in push.pages
        ):
            return RANGE
        return ""

    def _settle(self, lent: _Lent, faults: Several[str]) -> None:
        """Name the pages before the first fault, and queue the request."""
        slots, is_current = lent.host.slots, lent.host.num_clears == lent.num_clears
        faults = faults if is_current else [VERSION] * len(lent.pages)
        num_good = len(list(takewhile(lambda fault: not fault, faults)))
        for number, (name, hosted) in enumerate(zip(lent.names, lent.pages, strict=True)):
            known = slots.pages.get(name)
            if number >= num_good or name in slots.busy or (known is not None and known.covers(hosted.are_held)):
                slots.take_back(hosted)
            else:
                slots.name(hosted, name)
                self.num_received += 1
        lent.choices[0].cache.is_pushed = num_good > 0
        self._end(lent.choices, next(filter(None, faults), ""))

    def _end(self, choices: list[Sequence], reason: str) -> None:
        """Queue a request after its push. `reason` says why its pages are not used; empty if they are."""
        if reason:
            self._refuse(reason)
        del self.held[choices[0]]
        if any(choice.finish is None for choice in choices):
            self._admit(choices)

    def _refuse(self, reason: str) -> None:
        self.refused[reason] += 1
        log.warning("pages of another replica are not used: %s", reason)

    def _carry(self) -> int:
        """Return the id of the step that carries all copies so far, and run it if no other step follows."""
        step_id = self._hosted.next_step
        if not self._cycle.has_work:
            self._outputs.publish(*self._cycle.carry(), now=time.monotonic())
        return step_id

    def _write(self, lent: _Lent, place: PageSlots, shares: Mapping[int, Any]) -> None:
        """Have the hosts write pages, in another thread."""
        try:
            faults = self._hosts.write(place, shares)
        except (ExecutorFailure, TimeoutError) as error:
            log.warning("pages were not written: %s", error)
            faults = [LOST] * len(lent.pages)
        self._commands.post(partial(self._settle, lent, faults))

    def _read(
        self, push: Push, place: PageSlots, *, names: list[PageName], pages: list[HostedPage], done: Future[Push]
    ) -> None:
        """Have the hosts read pages, in another thread; leave out those that have lost their slot meanwhile."""
        host = self._hosted.hosts[place.data_rank]
        try:
            shares = self._hosts.read(place)
            are_kept = self._commands.call(partial(_are_kept, host, names, pages, place.slots)).result()
        except (ExecutorFailure, TimeoutError) as error:
            log.warning("pages were not read: %s", error)
            done.set_exception(PushRefusedError(LOST))
        except EngineStoppedError:
            done.set_exception(PushRefusedError(STOPPED))
        else:
            count = len(list(takewhile(bool, are_kept)))
            self.num_sent += count
            if count:
                done.set_result(replace(push, pages=push.pages[:count], shares=shares))
            else:
                done.set_exception(PushRefusedError(NOT_KEPT))


def _is_known(rows: tuple[Any] | None) -> bool:
    return rows is not None


def _slots_of(pages: list[HostedPage]) -> np.ndarray:
    return np.array([(hosted.slot, hosted.entry_slot) for hosted in pages], np.int32).reshape(-1, 2)


def _are_kept(host: HostPages, names: list[PageName], pages: list[HostedPage], slots: np.ndarray) -> list[bool]:
    """Return True for each page that has had its slots since its record was read."""
    entry_slots = slots[:, 1].tolist()
    return [
        host.slots.pages.get(name) is hosted and hosted.entry_slot == entry_slot
        for name, hosted, entry_slot in zip(names, pages, entry_slots, strict=True)
    ]
