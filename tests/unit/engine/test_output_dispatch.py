"""Clients hear of their tokens at once at first, then in groups, and of everything by the end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe.engine.output_dispatch import GROUPING_S_PER_SEQUENCE, MAX_GROUPING_S, OutputDispatch
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import Sequence
from tests.support.engine.schedulers import choices

NUM_ROWS = 64
ABORT = FinishReason("abort")
ALONE_S = GROUPING_S_PER_SEQUENCE
"""How long the tokens of a single running sequence are kept back."""


class Clients:
    """Sequences in rows, what they generate, and what their clients hear of it."""

    def __init__(self) -> None:
        self.table = RowTable(num_rows=NUM_ROWS, max_tokens=300, page_size=16)
        self.outputs = OutputDispatch(self.table)
        self.heard: dict[str, list[ChoiceResult]] = {}

    def begin(self, request_id: str, *, n: int = 1, incremental: bool = True) -> list[Sequence]:
        group = choices(request_id, 3, num_new=250, n=n)
        request = replace(group[0].request, incremental=incremental)
        for sequence in group:
            sequence.request = request
            self.table.take(self.table.sequences.index(None), sequence)
        self.heard[request_id] = []
        self.outputs.add(group, self.heard[request_id].extend)
        return group

    def sample(self, *sequences: Sequence, now: float) -> None:
        """Each of `sequences` gets a token."""
        rows = np.array([sequence.row for sequence in sequences])
        places = self.table.num_tokens[rows]
        self.table.state.token_ids[rows, places] = places
        self.table.state.logprobs[rows, places] = -places
        self.table.num_tokens[rows] += 1
        self.outputs.publish(rows, [], now=now)

    def end(self, sequence: Sequence, *, now: float = 1e9) -> None:
        sequence.finish = ABORT
        self.table.leave(sequence)
        self.outputs.publish(np.zeros(0, np.int64), [sequence], now=now)

    def tokens(self, request_id: str) -> list[list[int]]:
        """The tokens of each update so far."""
        return [update.token_ids for update in self.heard[request_id]]


@pytest.fixture
def clients() -> Clients:
    return Clients()


def test_the_first_token_comes_at_once_and_later_ones_once_enough_time_went_by(clients: Clients):
    (sequence,) = clients.begin("a")
    for now in (0.0, 0.4 * ALONE_S, 0.8 * ALONE_S):
        clients.sample(sequence, now=now)
    assert clients.tokens("a") == [[3]]
    clients.sample(sequence, now=ALONE_S)
    assert clients.tokens("a") == [[3], [4, 5, 6]]
    clients.sample(sequence, now=1.9 * ALONE_S)
    assert len(clients.tokens("a")) == 2, "the time counts from the last update"


def test_everything_is_heard_once_with_its_logprobs(clients: Clients):
    (sequence,) = clients.begin("a")
    for step in range(50):
        clients.sample(sequence, now=step * 0.3 * ALONE_S)
    clients.end(sequence)
    heard = clients.heard["a"]
    assert [token for update in heard for token in update.token_ids] == list(range(3, 53))
    assert [logprob for update in heard for logprob in update.logprobs] == [-float(i) for i in range(3, 53)]
    assert 10 <= len(heard) <= 20, "some of them together"
    assert [update.finish for update in heard] == [None] * (len(heard) - 1) + [ABORT]


def test_the_more_run_the_longer_tokens_are_kept_back_up_to_a_bound(clients: Clients):
    groups = [clients.begin(f"r{i}") for i in range(NUM_ROWS)]
    everybody = [sequence for group in groups for sequence in group]
    clients.sample(*everybody, now=0.0)
    clients.sample(*everybody, now=0.9 * MAX_GROUPING_S)
    assert all(len(heard) == 1 for heard in clients.heard.values())
    clients.sample(*everybody, now=MAX_GROUPING_S)
    assert clients.tokens("r7") == [[3], [4, 5]]
    clients.sample(everybody[0], now=MAX_GROUPING_S + ALONE_S)
    assert len(clients.tokens("r0")) == 3, "with the others gone it waits no longer than alone"


def test_the_end_brings_what_was_kept_back_without_waiting(clients: Clients):
    (sequence,) = clients.begin("a")
    for now in (0.0, 0.1 * ALONE_S, 0.2 * ALONE_S):
        clients.sample(sequence, now=now)
    clients.end(sequence, now=0.2 * ALONE_S)
    assert clients.tokens("a") == [[3], [4, 5]]
    assert clients.heard["a"][-1].finish == ABORT
    assert "a" not in clients.outputs and len(clients.outputs) == 0


def test_who_does_not_want_increments_hears_once(clients: Clients):
    (sequence,) = clients.begin("a", incremental=False)
    for step in range(30):
        clients.sample(sequence, now=float(step))
    assert clients.heard["a"] == []
    clients.end(sequence)
    assert clients.tokens("a") == [list(range(3, 33))]


def test_choices_are_told_apart_and_the_request_is_there_until_the_last_ends(clients: Clients):
    group = clients.begin("a", n=3)
    clients.sample(group[2], group[0], now=0.0)
    assert [update.choice_index for update in clients.heard["a"]] == [2, 0]
    clients.end(group[0])
    assert clients.outputs.unfinished("a") == [group[1], group[2]]
    assert "a" in clients.outputs
    for sequence in (group[2], group[1]):
        clients.end(sequence)
    assert "a" not in clients.outputs and clients.outputs.unfinished("a") == []


def test_whoever_takes_a_row_over_gets_its_own_first_token_at_once(clients: Clients):
    (first,) = clients.begin("first")
    clients.sample(first, now=0.0)
    clients.end(first)
    (second,) = clients.begin("second")
    assert second.row == 0
    clients.sample(second, now=0.1 * ALONE_S)
    assert clients.tokens("second") == [[3]]


def test_when_all_ends_everybody_hears_the_rest_and_why(clients: Clients):
    (sequence,), (quiet,) = clients.begin("a"), clients.begin("b", incremental=False)
    for step in range(3):
        clients.sample(sequence, quiet, now=step * 0.1 * ALONE_S)
    clients.outputs.end_all(ABORT)
    assert clients.tokens("a") == [[3], [4, 5]] and clients.tokens("b") == [[3, 4, 5]]
    assert clients.heard["a"][-1].finish == clients.heard["b"][-1].finish == ABORT
    assert len(clients.outputs) == 0


def test_when_all_ends_a_choice_that_has_ended_is_not_told_again(clients: Clients):
    ended, running = clients.begin("a", n=2)
    clients.end(ended)
    clients.outputs.end_all(FinishReason("error", message="gone"))
    assert [(update.choice_index, update.finish) for update in clients.heard["a"]] == [
        (0, ABORT),
        (1, FinishReason("error", message="gone")),
    ]
    assert running.finish is None
