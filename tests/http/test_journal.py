"""Two replicas over one journal: what one has begun the other goes on with, and nothing differs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from threading import Event
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayserve_moe import extract_routed_experts_from_meta_info
from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.engine.admission import Capacity
from rayserve_moe.fleet.journal_client import TAKEN_OVER, JournalClient
from rayserve_moe.fleet.journal_records import AskedRequest, committed_in
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.rollouts.answers import SampleRequest
from rayserve_moe.rollouts.client import BlockingRolloutClient
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from rayserve_moe.serving.journalling import KeptRequest, identity_of
from tests.http.conftest import assert_idle
from tests.support.engine import step_gate
from tests.support.serving.http_client import CHAT, COMPLETIONS, GENERATE, TOKENS, wait_until
from tests.support.serving.http_server import running
from tests.support.serving.journal_server import OwnJournal

Events = Iterator[tuple[str, dict[str, Any]]]
RESUME = "/resume_request"
KEY = {"authorization": "Bearer mine"}
SAMPLING = {"max_new_tokens": 40, "temperature": 1, "sampling_seed": 3, "ignore_eos": True, "frequency_penalty": 0.3}
NATIVE = {"input_ids": [5, 6, 7, 8], "return_logprob": True, "return_routed_experts": True, "sampling_params": SAMPLING}
MANY = {**NATIVE, "sampling_params": {**SAMPLING, "n": 3}}


@dataclass
class Pair:
    """Two replicas, `a` and `b`, with a client of each and their connections to the journal."""

    journal: OwnJournal
    clients: dict[str, httpx.Client]
    journals: dict[str, JournalClient]
    engines: dict[str, Engine]
    apps: dict[str, ASGIApp] = field(default_factory=dict)

    def __getitem__(self, name: str) -> httpx.Client:
        return self.clients[name]


@contextmanager
def pair_over(journal: OwnJournal, engines: dict[str, Engine], **server: Any) -> Iterator[Pair]:
    with ExitStack() as closing:
        pair = Pair(journal, {}, {}, engines)
        closing.callback(journal.end)
        for epoch, (name, engine) in enumerate(engines.items(), 1):
            client = pair.journals[name] = journal.client(epoch)
            closing.callback(client.link.stop)
            state = ApiState(engine.loop, engine.tokenizer, ServerSettings(**server), journal=client)
            pair.apps[name] = create_api(state)
            url = closing.enter_context(running(pair.apps[name]))
            pair.clients[name] = closing.enter_context(httpx.Client(base_url=url, timeout=60, headers=KEY))
        wait_until(lambda: all(client.is_up for client in pair.journals.values()))
        yield pair
        for engine in engines.values():
            assert_idle(engine)
        journal.table.check_integrity()


@pytest.fixture
def pair(engine, second_engine):
    with pair_over(OwnJournal(), {"a": engine, "b": second_engine}) as pair:
        yield pair


def events_in(answer: httpx.Response) -> Events:
    """Ids of events and their objects, to the end of the stream or of the connection."""
    event_id = ""
    for line in answer.iter_lines():
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        if line.startswith("data: ") and line != "data: [DONE]":
            yield event_id, json.loads(line.removeprefix("data: "))


def all_events(client: httpx.Client, path: str, body: dict[str, Any], **headers: str) -> list[tuple[str, dict]]:
    with client.stream("POST", path, json=body, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        return list(events_in(answer))


def begin(client: httpx.Client, path: str, body: dict[str, Any], *, num_events: int) -> list[tuple[str, dict]]:
    """Read some events of a stream, and break the connection."""
    with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        return [event for event, _ in zip(events_in(answer), range(num_events), strict=False)]


@contextmanager
def held_stream(pair: Pair, body: dict[str, Any]) -> Iterator[tuple[step_gate.StepGate, Events]]:
    """Events of a stream of replica `a`, whose engine is held after a few of forty steps."""
    loop = pair.engines["a"].loop
    with (
        ThreadPoolExecutor(1) as beside,
        step_gate.unhurried(loop),
        step_gate.held_steps(loop) as gate,
        ExitStack() as closing,
    ):
        answer = beside.submit(closing.enter_context, pair["a"].stream("POST", GENERATE, json=body))
        gate.let_run(4)
        yield gate, events_in(answer.result())


def told_of(event_id: str) -> list[int]:
    return list(map(int, event_id.split(",")))


def last_answers(events: list[tuple[str, dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    """Of native events the last one of every choice."""
    return {event.get("index", 0): event for _, event in events}


def shown(answer: dict[str, Any]) -> dict[str, Any]:
    """What must not differ: ids, text, finish, weights, rows; log-probs to 1e-5."""
    meta = answer["meta_info"]
    rows = extract_routed_experts_from_meta_info(answer).tolist() if meta.get("routed_experts") else None
    names = ("finish_reason", "prompt_tokens", "completion_tokens", "weight_version", "weight_versions")
    logprobs = [(pytest.approx(value, abs=1e-5), token) for value, token, _ in meta["output_token_logprobs"]]
    return {
        "ids": answer["output_ids"],
        "text": answer["text"],
        "rows": rows,
        "logprobs": logprobs,
        **{name: meta[name] for name in names},
    }


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    ours, theirs = shown(one), shown(other)
    values = [value for value, *_ in one["meta_info"]["output_token_logprobs"]]
    assert theirs["logprobs"] == list(zip(values, one["output_ids"], strict=True))
    for each in (ours, theirs):
        del each["logprobs"]
    assert ours == theirs


@pytest.mark.sampled(3)
@pytest.mark.parametrize("body", [NATIVE, MANY], ids=["one choice", "three choices"])
@pytest.mark.parametrize("num_events", [1, 7])
def test_a_stream_whose_replica_is_left_goes_on_at_the_other(pair, body, num_events, unhurried):
    wanted = last_answers(all_events(pair["b"], GENERATE, {**body, "stream": True}))
    begun = begin(pair["a"], GENERATE, {**body, "stream": True, "rid": "left"}, num_events=num_events)
    told = told_of(begun[-1][0])
    assert sum(told) == sum(len(each["output_ids"]) for each in last_answers(begun).values())
    rest = all_events(pair["b"], RESUME, {"rid": "left", "from_token": told})
    found = last_answers(rest)
    assert found.keys() == wanted.keys()
    for choice, answer in wanted.items():
        assert_same(answer, found[choice])
        firsts = [len(event["output_ids"]) for _, event in rest if event.get("index", 0) == choice]
        assert firsts[0] > told[choice] or told[choice] == 0
    assert told_of(rest[-1][0]) == [41] * len(told)
    assert pair.journals["b"].statistics()["resumed"] == 1


def test_texts_of_chats_and_completions_join_without_a_gap(pair, unhurried):
    for path, prompt in (
        (COMPLETIONS, {"prompt": [5, 6, 7]}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
    ):
        body = {**prompt, "max_tokens": 30, "seed": 4, "ignore_eos": True, "stream": True, "stop": ["<never>"]}

        def text_of(events: list[tuple[str, dict]]) -> str:
            choices = [choice for _, event in events for choice in event["choices"]]
            return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)

        wanted = all_events(pair["b"], path, body)
        begun = begin(pair["a"], path, {**body, "rid": path}, num_events=4)
        rest = all_events(pair["b"], RESUME, {"rid": path, "from_token": told_of(begun[-1][0])})
        assert text_of(begun) + text_of(rest) == text_of(wanted)
        assert {event["id"] for _, event in begun + rest} == {path}


def test_a_plain_answer_is_whole_wherever_it_is_asked_for_again(pair, unhurried):
    for body in (NATIVE, MANY):
        wanted = pair["b"].post(GENERATE, json=body).json()
        asked = {**body, "rid": f"plain {len(str(body))}"}
        with pytest.raises(httpx.ReadTimeout):
            pair["a"].post(GENERATE, json=asked, timeout=0.15)
        wait_until(lambda: len(pair.journal.table) > 0)
        for name in "ba":
            found = pair[name].post(RESUME, json={"rid": asked["rid"]}).json()
            for one, other in zip(
                *([each] if isinstance(each, dict) else each for each in (wanted, found)), strict=True
            ):
                assert_same(one, other)


def test_the_same_post_with_the_last_id_attaches(pair, unhurried):
    body = {"token_ids": [5, 6, 7], "request_id": "again", "stream": True}
    body["sampling_params"] = {"max_tokens": 30, "seed": 4, "ignore_eos": True}

    def ids_of(events: list[tuple[str, dict]]) -> list[int]:
        return [token for _, event in events for choice in event["choices"] for token in choice["token_ids"]]

    wanted = ids_of(all_events(pair["b"], TOKENS, {**body, "request_id": "other"}))
    begun = begin(pair["a"], TOKENS, body, num_events=5)
    rest = all_events(pair["b"], TOKENS, body, **{"last-event-id": begun[-1][0]})
    assert ids_of(begun) + ids_of(rest) == wanted
    other = pair["b"].post(TOKENS, json={**body, "token_ids": [1]}, headers={"last-event-id": "1"})
    assert other.status_code == 400 and other.json()["error"]["code"] == "other_body"
    assert pair["b"].post(TOKENS, json=body, headers={"last-event-id": "x"}).status_code == 400


@pytest.mark.parametrize("name", "ba", ids=["by the other replica", "by the same"])
def test_whoever_resumes_owns_the_request_and_the_other_ends(pair, name):
    body = {**NATIVE, "rid": "owned", "stream": True}
    wanted = last_answers(all_events(pair["b"], GENERATE, {**body, "rid": "undisturbed"}))
    with ThreadPoolExecutor(1) as beside, held_stream(pair, body) as (gate, events):
        next(events)
        taken = beside.submit(all_events, pair[name], RESUME, {"rid": "owned"})
        wait_until(lambda: pair.journal.table.num_taken_over or not pair.journals["a"].tickets)
        gate.open()
        assert_same(last_answers(taken.result())[0], wanted[0])
        assert list(events)[-1][1]["error"]["code"] == "taken_over"


@pytest.mark.parametrize("headers", [KEY, {}])
def test_requests_that_nobody_has_are_refused(pair, headers):
    answer = pair["a"].post(GENERATE, json={**NATIVE, "rid": "known"})
    assert answer.status_code == 200
    assert pair["b"].post(RESUME, json={"rid": "unknown"}).status_code == 404
    assert pair["b"].post(RESUME, json={"rid": "known"}, headers={"authorization": "Bearer other"}).status_code == 404
    for from_token, status in ((42, 400), ([1, 2], 400), (-1, 400), ("x", 400), (41, 200), (40, 200)):
        asked = {"rid": "known", "from_token": from_token}
        assert pair["b"].post(RESUME, json=asked).status_code == status, from_token
    assert pair["b"].post(RESUME, json={}).status_code == 400
    bad = pair["a"].post(GENERATE, json={**NATIVE, "rid": "bad", "sampling_params": {"top_p": 7}})
    assert bad.status_code == 400 and pair["b"].post(RESUME, json={"rid": "bad"}).status_code == 404


def test_tokens_wait_for_a_journal_that_is_lost_and_its_successor_has_what_runs(pair):
    body = {**NATIVE, "rid": "waits", "stream": True}
    wanted = last_answers(all_events(pair["b"], GENERATE, {**body, "rid": "undisturbed"}))
    with held_stream(pair, body) as (_, events):
        next(events)
        pair.journal.end()
        wait_until(lambda: not pair.journals["a"].is_up)
        assert pair["b"].post(RESUME, json={"rid": "waits"}).json()["error"]["code"] == "journal_down"
        pair.journal.start()
        wait_until(lambda: len(pair.journal.table) == 1 and pair.journals["b"].is_up)
    found = last_answers(all_events(pair["b"], RESUME, {"rid": "waits"}))
    assert_same(found[0], wanted[0])


def test_without_a_journal_for_long_requests_go_on_and_health_says_so(engine, second_engine):
    journal = OwnJournal()
    with pair_over(journal, {"a": engine, "b": second_engine}) as pair:
        for client in pair.journals.values():
            client.link.wait_s = 0.2
        journal.end()
        wait_until(lambda: not pair.journals["a"].is_up)
        assert pair["a"].post(GENERATE, json={**NATIVE, "rid": "goes on"}).status_code == 200
        assert pair["a"].get("/health").json()["journal"] == "down"
        journal.start()
        wait_until(lambda: pair.journals["a"].is_up)
        assert "journal" not in pair["a"].get("/health").json()
        assert pair.journals["a"].statistics()["lost"] >= 1
        assert 'rayserve_moe_journal_up{model_name="tiny"} 1.0' in pair["a"].get("/metrics").text


def test_what_has_no_place_in_the_journal_is_answered_all_the_same(engine, second_engine):
    with pair_over(OwnJournal(max_bytes=3000), {"a": engine, "b": second_engine}) as pair:
        answer = pair["a"].post(GENERATE, json={**MANY, "rid": "large"})
        assert answer.status_code == 200 and pair["b"].post(RESUME, json={"rid": "large"}).status_code == 404
        assert pair.journals["a"].statistics()["dropped"] == 1


def test_other_weights_are_named_from_the_token_on_from_which_they_were_used(pair):
    control = pair.engines["b"].loop.control
    before = pair.engines["b"].card.weight_version
    with held_stream(pair, {**NATIVE, "rid": "weights", "stream": True}) as (_, events):
        (told,) = told_of(next(events)[0])
        control.rename_weights("others").result()
        try:
            found = last_answers(all_events(pair["b"], RESUME, {"rid": "weights", "from_token": told}))[0]
        finally:
            control.rename_weights(before).result()
    first, second = found["meta_info"]["weight_versions"]
    assert (first["version"], second["version"], second["end"]) == (before, "others", 40)
    assert told <= second["start"] == first["end"] < 40


def losing_front(pair: Pair) -> ASGIApp:
    """A proxy whose replica is lost under every new request; what is resumed the other one answers."""

    async def front(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != GENERATE:
            await pair.apps["b"](scope, receive, send)
            return
        parts: list[Message] = []
        while not parts or parts[-1].get("more_body"):
            parts.append(await receive())

        async def receive_then_leave() -> Message:
            if not parts:
                step_gate.wait_for_tokens(pair.engines["a"].loop, 1)
            return parts.pop(0) if parts else {"type": "http.disconnect"}

        async def drop(_: Message) -> None:
            return

        with suppress(ClientDisconnect):
            await pair.apps["a"](scope, receive_then_leave, drop)
        raise ConnectionResetError

    return front


@pytest.mark.filterwarnings("ignore")
def test_the_rollout_client_resumes_by_itself(pair, unhurried):
    sampling = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 1.0}
    asked = [SampleRequest(f"p{number}", [5, 6, 7 + number], sampling, seed=number, count=2) for number in range(2)]
    with running(losing_front(pair)) as front, BlockingRolloutClient(front, api_key="mine") as client:
        found = client.generate(asked)
    with BlockingRolloutClient(str(pair["b"].base_url), api_key="mine") as client:
        wanted = client.generate(asked)
    assert pair.journals["b"].statistics()["resumed"] >= 1
    for one, other in zip(chain(*found), chain(*wanted), strict=True):
        assert one.output_ids.tolist() == other.output_ids.tolist() and one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(one.routing.rows, other.routing.rows)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 30}, "content_block_delta"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 30}, "response.output_text.delta"),
    ],
)
def test_what_has_its_name_in_a_header_and_a_drawn_seed_goes_on_with_them(pair, unhurried, path, body, kind):
    def text_of(events: list[tuple[str, dict]]) -> str:
        deltas = [event["delta"] for _, event in events if event["type"] == kind]
        return "".join(delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas)

    pair["a"].headers.update({"x-request-id": "in a header", "accept": "text/event-stream"})
    begun = begin(pair["a"], path, {**body, "temperature": 1, "stream": True}, num_events=9)
    rest = all_events(pair["b"], RESUME, {"rid": "in a header", "from_token": told_of(begun[-1][0])})
    whole = all_events(pair["a"], RESUME, {"rid": "in a header"})
    assert text_of(begun) and text_of(begun) + text_of(rest) == text_of(whole)


def test_who_names_a_request_in_a_header_alone_gets_lines_of_data_alone(pair):
    """Clients that measure servers send `X-Request-Id`, and read every line that is not data as an error."""
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "stream": True}
    named = {"x-request-id": "measured"}
    with pair["a"].stream("POST", COMPLETIONS, json=body, headers=named) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines and all(line.startswith("data: ") for line in lines)
    rest = all_events(pair["b"], RESUME, {"rid": "measured"})
    assert told_of(rest[-1][0]) == [5], "it is kept all the same"
    for how in ({**named, "accept": "text/event-stream"}, {**named, "last-event-id": "1"}):
        assert all(event_id for event_id, _ in all_events(pair["a"], COMPLETIONS, body, **how))


def test_a_name_that_no_client_has_given_is_none(pair):
    given = {"x-request-id": "drawn by HAProxy", "x-request-unnamed": "1"}
    assert pair["a"].post(GENERATE, json=NATIVE, headers=given).status_code == 200
    assert pair["a"].post(GENERATE, json={**NATIVE, "rid": "named"}, headers=given).status_code == 200
    assert len(pair.journal.table) == 1
    assert pair["b"].post(RESUME, json={"rid": "named"}).status_code == 200


def test_a_request_that_is_asked_again_while_it_runs_is_another(pair):
    """As a client does that was cut off before its request was kept: the later one is kept, alone, and both go on."""
    client, identity = pair.journals["a"], identity_of("mine", "asked twice")
    tickets = [client.open(identity, AskedRequest(GENERATE, body, "", "", choices=(1,))) for body in (b"1", b"2")]
    delivered = [Event(), Event(), Event()]
    for ticket, token, event in zip((*tickets, tickets[0]), (7, 8, 9), delivered, strict=True):
        client.commit(ticket, [(0, ChoiceResult(token_ids=[token]))], deliver=event.set)
    assert all(event.wait(60) for event in delivered)
    client.close(tickets[0])
    found = pair.journals["b"].ask(identity).result(60)
    assert found is not None and AskedRequest.read(found.records[0]).body == b"2"
    assert [each.token_ids for each in committed_in(found.records[1:], 1)] == [[8]]
    assert client.tickets[identity] is tickets[1] and pair.journal.table.read(identity).closed_at is None
    client.close(tickets[1])


@pytest.mark.parametrize("by_cursor", [True, False])
def test_a_full_replica_takes_over_nothing_but_what_runs_there(pair, unhurried, monkeypatch, by_cursor):
    body = {**NATIVE, "rid": f"full {by_cursor}", "stream": True}

    def go_on(client: httpx.Client) -> httpx.Response:
        if by_cursor:
            return client.post(GENERATE, json=body, headers={"last-event-id": "0"})
        return client.post(RESUME, json={"rid": body["rid"], "from_token": 0})

    with pair["a"].stream("POST", GENERATE, json=body) as answer:
        events = events_in(answer)
        assert next(events)
        monkeypatch.setattr(pair.engines["b"].loop, "capacity", Capacity((None,), 1))
        monkeypatch.setattr(pair.engines["a"].loop, "capacity", Capacity(pair.engines["a"].loop._outputs, 1))
        refused = go_on(pair["b"])
        assert refused.status_code == 429 and refused.headers["retry-after"]
        assert pair["b"].post(GENERATE, json={**NATIVE, "rid": "refused"}).status_code == 429
        assert next(events)
        assert go_on(pair["a"]).status_code == 200
    assert go_on(pair["b"]).status_code == 200, "it has ended, and needs no place"
    assert pair["b"].post(RESUME, json={"rid": "refused", "from_token": 0}).status_code == 404
    monkeypatch.undo()


def test_of_several_prompts_none_is_taken_over_where_not_all_find_a_place(pair, unhurried, monkeypatch):
    body = {"prompt": [[5, 6], [7, 8]], "max_tokens": 40, "ignore_eos": True, "rid": "two prompts", "stream": True}
    with pair["a"].stream("POST", COMPLETIONS, json=body) as answer:
        events = events_in(answer)
        assert next(events)
        monkeypatch.setattr(pair.engines["b"].loop, "capacity", Capacity((None,), 2))
        assert pair["b"].post(RESUME, json={"rid": body["rid"], "from_token": 0}).status_code == 429
        assert "error" not in [*events][-1][1]
    two = {**body, "rid": "not kept"}
    assert pair["b"].post(COMPLETIONS, json=two).status_code == 429
    assert pair["b"].post(RESUME, json={"rid": "not kept", "from_token": 0}).status_code == 404
    monkeypatch.undo()


def test_of_two_that_resume_at_once_the_later_one_owns_the_request(pair):
    """By the journal's answers, one after the other, before either goes on."""
    body = {**NATIVE, "rid": "resumed twice", "stream": True}
    client, identity = pair.journals["b"], identity_of("mine", "resumed twice")
    begin(pair["a"], GENERATE, body, num_events=3)
    found = [client.ask(identity, takes_over=True).result(60) for _ in range(2)]
    tickets = [client.own(identity, each) for each in found if each is not None]
    ended = {name: Event() for name in ("first", "second")}
    for ticket, event in zip(tickets, ended.values(), strict=True):
        ticket.on_loss = lambda _, event=event: event.set()
    delivered = {name: Event() for name in ended}
    for ticket, event in zip(tickets, delivered.values(), strict=True):
        client.commit(ticket, [(0, ChoiceResult(token_ids=[7]))], deliver=event.set)
    assert ended["first"].wait(60) and delivered["second"].wait(60)
    assert not ended["second"].is_set() and not delivered["first"].is_set()
    assert client.tickets[identity] is tickets[1] and not tickets[1].is_over
    client.close(tickets[1])


def test_what_is_committed_before_the_journal_knows_a_request_is_kept_once(pair):
    """Both go in one message, where the thread that sends comes late."""
    client, identity = pair.journals["a"], identity_of("mine", "sent late")
    delivered = Event()
    with client._changed:  # the thread that sends waits for it
        ticket = client.open(identity, AskedRequest(GENERATE, b"", "", "", choices=(1,)))
        for token in (7, 8):
            client.commit(ticket, [(0, ChoiceResult(token_ids=[token]))], deliver=delivered.set)
    assert delivered.wait(60)
    found = client.ask(identity).result(60)
    assert found is not None
    assert [each.token_ids for each in committed_in(found.records[1:], 1)] == [[7, 8]]
    client.close(ticket)


def test_a_question_that_nobody_waits_for_any_longer_is_answered_to_nobody(pair):
    """As where its client has gone: what comes after it is kept and delivered, and what it took over expires."""
    client, identity = pair.journals["a"], identity_of("mine", "left")
    client.close(client.open(identity, AskedRequest(GENERATE, b"", "", "", choices=(1,))))
    with client._changed:  # the thread that sends waits for it
        for takes_over in (False, True):
            assert client.ask(identity, takes_over=takes_over).cancel()
    delivered = Event()
    ticket = client.open(identity_of("mine", "later"), AskedRequest(GENERATE, b"", "", "", choices=(1,)))
    client.commit(ticket, [(0, ChoiceResult(token_ids=[7]))], deliver=delivered.set)
    assert delivered.wait(60) and client.is_up
    client.close(ticket)
    wait_until(
        lambda: pair.journal.table.num_taken_over == 1 and pair.journal.table.read(identity).closed_at is not None
    )


def test_what_ends_while_there_is_no_journal_leaves_nothing(engine, second_engine):
    journal = OwnJournal()
    client = journal.client(1, wait_s=0.1)
    wait_until(lambda: client.is_up)
    journal.end()
    wait_until(lambda: client._goes_without)
    for number in range(3):
        ended = Event()
        ticket = client.open(str(number).encode(), AskedRequest(GENERATE, b"", "", "", choices=(1,)))
        client.close(ticket, ended.set)
        assert ended.is_set()
    assert not client._unanswered.all() and not client.tickets
    client.link.stop()


def test_whoever_is_told_late_that_a_request_has_another_owner_ends_too(pair):
    client, identity = pair.journals["a"], identity_of("mine", "fenced early")
    ticket = client.open(identity, AskedRequest(GENERATE, b"", "", "", choices=(1,)))
    wait_until(lambda: pair.journal.table.read(identity) is not None)
    assert pair.journals["b"].ask(identity, takes_over=True).result(60) is not None
    wait_until(lambda: ticket.is_over)
    reasons: list[FinishReason] = []
    KeptRequest(client, ticket, [], [], [], has_event_ids=True).on_loss(reasons.append)
    assert reasons == [TAKEN_OVER]


def test_an_answer_of_one_name_after_another_keeps_its_own_though_the_journal_was_lost(pair):
    """Both were waiting: the journal is greeted with the one that runs, then with the one that has ended."""
    client, identity = pair.journals["a"], identity_of("mine", "in turn")
    pair.journal.end()
    wait_until(lambda: not client.is_up)
    first, second = (AskedRequest(GENERATE, body, "", "", choices=(1,)) for body in (b"1", b"2"))
    client.close(client.open(identity, first))
    ticket = client.open(identity, second)
    pair.journal.start()
    wait_until(lambda: client.is_up)
    found = client.ask(identity).result(60)
    assert found is not None and AskedRequest.read(found.records[0]) == second and found.fence == ticket.fence
    client.close(ticket)
