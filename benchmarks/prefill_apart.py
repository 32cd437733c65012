"""Gaps between tokens of chats beside long prompts: two replicas that do both, or one for prompts and one for tokens.

    python -m benchmarks.prefill_apart [--loads chats,streams] [--rates 8] [--every 2] [--seconds 14] [--seed 0]
        [--model qwen3-30b-a3b] [--topology v6e:2x4] [--data-ranks 4] [--out FILE.json]

Simulated time. Chats come at a rate, and a prompt of 24,576 tokens every few seconds. `quiet` has no long prompts.
`streams` are chats with short prompts and longer answers.
Gaps are between two tokens of a chat, before a server groups them.
`smaller steps` takes a quarter of the prompt tokens per step. `long apart` computes prompts of more than a step on the
first replica, `all apart` those of more than a page; the second replica answers all requests. Pages reach it by host
memory on both sides and a link between the replicas.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import merge
from itertools import count, product
from typing import Any

import numpy as np

from benchmarks.agent_sessions import measure_on_slice
from benchmarks.conditions import note
from benchmarks.fleet_simulation import LIMITS
from benchmarks.fleet_table import prefill_apart
from benchmarks.simulation.fleet import Asked, Seen, Simulation
from benchmarks.simulation.replica import SimulatedReplica
from benchmarks.simulation.slices import SliceReplica
from benchmarks.simulation.workloads import SHAPES, Conversation, Shape, Turn, drawn
from rayserve_moe.engine.extension import extension_of
from rayserve_moe.engine.host_pages import HostedPages
from rayserve_moe.scheduling.data_rank import num_found
from rayserve_moe.scheduling.host_pages import HostPages, page_names
from rayserve_moe.scheduling.prefix_tree import TOKEN_BYTES
from rayserve_moe.scheduling.sequence import Sequence

LINK_RATE = 10e9
"""Bytes per second between two replicas, of 25e9 that a host of v6e has."""
LONG, LONG_ANSWER = 24_576, 64
APART = {"long apart": LIMITS.chunk_tokens, "all apart": LIMITS.page_size}
"""Maximum number of tokens of a prompt that the second replica computes."""
WAYS = ("quiet", "mixed", "smaller steps", *APART)
NAMESPACE = ("",)
LOADS = {"chats": SHAPES["chat"], "streams": Shape((48, 0.5), (300, 0.6))}
BEGIN_S = 4.0
"""Start of the first long prompt, and of what is counted."""
TTFT_S, TPOT_S = 2.0, 0.05
"""Bounds of a good chat."""


class Beside(Simulation):
    """Counts the gaps between tokens of chats alone.

    The first replica computes prompts of more than `longest` tokens for the second, which answers all requests. Without
    `longest` both replicas answer.
    """

    def __init__(
        self, replicas: list[SimulatedReplica], *, request_s: float, seed: int, page_link_s: float, longest: int | None
    ) -> None:
        super().__init__("two choices", replicas, request_s=request_s, seed=seed)
        self._page_link_s, self._pulls = page_link_s, dict[Sequence, tuple[Asked, HostPages, int]]()
        self._link_free_at, self._longest = 0.0, longest
        if longest is not None:
            self._routing._names = ["1"]

    def counts(self, asked: Asked) -> bool:
        """Return False: gaps are counted between tokens, not between events."""
        return False

    def _enter(self, name: str, asked: Asked, now: float) -> None:
        if self._longest is None:
            super()._enter(name, asked, now)
            return
        decodes, prompt = self._replicas[name].cycle.scheduler, asked.prompt
        probe = self._replicas[name].queued(prompt)
        found = {rank: num_found(rank, probe) for rank in decodes.open_ranks}
        rank = max(found, key=lambda rank: (found[rank], -len(rank.running)))
        first = found[rank] // LIMITS.page_size
        if len(prompt) - found[rank] <= self._longest:
            super()._enter(name, asked, now)
            return
        sequence = self._replicas["0"].add(f"prefill {id(asked)}", prompt, num_answer=1)
        assert isinstance(rank.host, HostPages)
        self._pulls[sequence] = asked, rank.host, first
        self._wake("0", now)

    def _wake(self, name: str, now: float) -> None:
        replica = self._replicas[name]
        if not replica.is_awake:
            replica.is_awake = True
            self._at(now, lambda then: self._step(name, then))

    def _take(self, name: str, got: Iterable[Sequence], ended: Iterable[Sequence], *, now: float) -> None:
        ended = list(ended)
        for sequence in [each for each in ended if each in self._pulls]:
            self._send(sequence, now)
        got = [each for each in got if each in self._asked]
        for asked in map(self._asked.__getitem__, got):
            if asked.first_at and asked.conversation.sends_hints:
                self._seen.gaps.append(now - asked.last_at)
        of_clients = [each for each in ended if not each.request.request_id.startswith("prefill")]
        super()._take(name, got, of_clients, now=now)

    def _send(self, sequence: Sequence, now: float) -> None:
        """Copy the pages of a prompt to host memory there, over the link, and into slots here."""
        asked, to, first = self._pulls.pop(sequence)
        hosted = extension_of(self._replicas["0"].cycle.extensions, HostedPages)
        assert hosted is not None
        tokens = asked.prompt[:-1]
        kept = hosted.hosts[sequence.data_rank].keep_prefix(NAMESPACE, tokens, first=first)
        host = self._replicas["0"].devices.host
        assert host is not None
        copied_at = now + len(kept) * host.page_s
        self._link_free_at = max(self._link_free_at, copied_at) + len(kept) * self._page_link_s

        def arrive(then: float) -> None:
            names = page_names(NAMESPACE, tokens.tobytes(), page_bytes=LIMITS.page_size * TOKEN_BYTES, first=first)
            for name in names[: len(kept)]:
                lent = to.slots.lend((), rows=None)
                assert lent is not None, "there is space for all prompts"
                to.slots.name(lent, name)
            Simulation._enter(self, "1", asked, then)
            entered = next(each for each, of in self._asked.items() if of is asked)
            entered.cache.is_pushed = True

        self._at(self._link_free_at, arrive)


def load(shape: Shape, *, rate: float, every_s: float, seconds: float, seed: int) -> Iterator[Conversation]:
    """Yield chats, and long prompts from BEGIN_S on; `every_s` 0 for none."""
    chats = drawn(shape, rate=rate, num_requests=int(rate * seconds), seed=seed)
    times = np.arange(BEGIN_S, seconds, every_s) if every_s else ()
    numbers = count(1 << 40)
    prompts = (
        Conversation(float(at), (Turn(((next(numbers), LONG),), LONG_ANSWER),), sends_hints=False) for at in times
    )
    return merge(chats, prompts, key=lambda one: one.starts_at)


def run(arguments: argparse.Namespace, found: SliceReplica) -> dict[str, Any]:
    """Simulate each way under each load."""
    limits = replace(LIMITS, num_data_ranks=found.num_data_ranks, num_pages=found.num_pages)
    host = found.host_memory()
    page_link_s = found.page_bytes * found.num_devices / found.num_data_ranks / LINK_RATE
    small = replace(limits, step_tokens=limits.step_tokens // 4, chunk_tokens=limits.chunk_tokens // 4)
    rows = []
    for name, rate, every_s in product(arguments.loads, arguments.rates, arguments.every):
        for way in WAYS:
            of_way = small if way == "smaller steps" else limits
            replicas = [SimulatedReplica(of_way, found.steps, host=host if way in APART else None) for _ in range(2)]
            apart = Beside(
                replicas,
                request_s=found.steps.request_s,
                seed=arguments.seed,
                page_link_s=page_link_s,
                longest=APART.get(way),
            )
            asked = load(
                LOADS[name],
                rate=rate,
                every_s=0.0 if way == "quiet" else every_s,
                seconds=arguments.seconds,
                seed=arguments.seed,
            )
            rows.append({"load": name, "rate": rate, "every_s": every_s, "way": way, **figures(apart.run(asked))})
            note(f"{rate} {name}/s, every {every_s} s, {way}: p99 gap {rows[-1]['gap_p99_s'] * 1e3:.1f} ms")
    return {"rows": rows, "link_gb_s": LINK_RATE / 1e9, "long": LONG}


def figures(seen: Seen) -> dict[str, float]:
    """Return times of chats from BEGIN_S on, and the mean time to the first token of long prompts."""
    counted = [one for one in seen.asked if one.conversation.sends_hints and one.arrived_at >= BEGIN_S]
    chats = replace(seen, asked=counted)
    shown = ("goodput_s", "ttft_p50_s", "ttft_p99_s", "gap_p50_s", "gap_p99_s")
    of_chats = replace(chats, began_at=BEGIN_S, ended_at=max(one.arrived_at for one in chats.asked))
    of_chats = of_chats.figures(ttft_s=TTFT_S, tpot_s=TPOT_S)
    longs = [one.first_at - one.arrived_at for one in seen.asked if not one.conversation.sends_hints]
    return {**{name: of_chats[name] for name in shown}, "long_ttft_s": float(np.mean(longs)) if longs else 0.0}


def main() -> None:
    """Measure prompts apart from tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loads", type=lambda text: text.split(","), default=list(LOADS))
    numbers = {"type": lambda text: [float(part) for part in text.split(",")]}
    parser.add_argument("--rates", default=[8.0], help="chats per second", **numbers)
    parser.add_argument("--every", default=[2.0], help="seconds between long prompts", **numbers)
    parser.add_argument("--seconds", type=float, default=14.0)
    parser.add_argument("--data-ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    measure_on_slice(parser, run, name="prefill_apart", machine="prefill_apart_machine", table=prefill_apart)


if __name__ == "__main__":
    main()
