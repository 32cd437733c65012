"""Random requests made from the published description: the server answers only what it has documented.

Half of them break the schema. Of the others half are tamed, so that they reach the engine.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

import rayserve_moe
from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from tests.http.conftest import assert_idle
from tests.http.test_description import ROUTES
from tests.support.serving.http_client import CHAT, COMPLETIONS, GENERATE, TOKENS

PACKAGE = Path(rayserve_moe.__file__).parent
GENERATING = [COMPLETIONS, CHAT, GENERATE, TOKENS]
CONTEXT = 48
"""Tokens that a sequence may have here: random limits would otherwise keep the engine busy for long."""
SHORTEST_ECHO = 6
OWN_TEXT = "".join(file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py"))
"""What our messages are made of: a random string may be taken from it, and then stands in an answer by itself."""
ROUNDS, BODIES_A_ROUND = 8, 110
"""Number of rounds, and maximum number of different bodies per route and round; some routes have few bodies."""
LIMITS = {"max_tokens": 6, "max_new_tokens": 6, "max_completion_tokens": 6, "n": 4, "logprobs": 20}
EVERY_ROUTE = sorted((method, path) for method, paths in ROUTES.items() for path in paths)


@pytest.fixture(scope="module")
def operations(engine):
    """Every operation of an application in this process, over the real engine."""
    api = create_api(ApiState(engine.loop, engine.tokenizer, ServerSettings()))
    schema = schemathesis.openapi.from_asgi("/openapi.json", api)
    found = (result.ok() for result in schema.get_all_operations())
    return {(operation.method, operation.path): operation for operation in found}


@pytest.fixture
def short_context(engine, monkeypatch):
    monkeypatch.setattr(engine.loop.control, "card", dataclasses.replace(engine.loop.card, max_model_len=CONTEXT))
    version = engine.loop.card.weight_version
    yield
    engine.loop.control.resume().result()
    engine.loop.control.rename_weights(version).result()
    assert_idle(engine)


def tamed(value: object, name: str = "") -> object:
    """The same body with numbers that this server can serve, under the names that bound them."""
    if isinstance(value, dict):
        untamable = {"model", "lora_path"} | ({"text"} if value.get("input_ids") else set())
        return {key: tamed(each, key) for key, each in value.items() if key not in untamable}
    if isinstance(value, list):
        return [tamed(each, name) for each in value[:3]]
    if isinstance(value, int | float) and not isinstance(value, bool):
        if name in LIMITS:
            return 1 + int(value) % LIMITS[name]
        if name in ("prompt", "query", "items", "label_token_ids", "input_ids", "token_ids", "stop_token_ids"):
            return int(value) % 512
        if "start" in name:
            return int(value) % 2
    return value


def words_of(value: object) -> Iterator[str]:
    """Everything in a request that an answer could repeat."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from words_of(each)
    elif isinstance(value, list):
        for each in value:
            yield from words_of(each)
    elif isinstance(value, str):
        yield value


def check_documented(operation, case, response, own_words):
    assert str(response.status_code) in operation.definition.raw["responses"], (response.status_code, case.body)
    if response.status_code == 200:
        return
    forms = ["error"], ["error", "success", "message", "num_paused_requests"]
    assert list(response.json()) in ([["type", "error"]] if operation.path.startswith("/v1/messages") else forms)
    assert list(response.json()["error"]) == ["message", "type", "param", "code"]
    told = " ".join(words_of(response.json()))
    for word in words_of([case.body, case.query, case.path_parameters]):
        if len(word) >= SHORTEST_ECHO and word in told and word not in own_words:
            assert not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", told), "an answer repeats what it was asked"


def send_random(operations, route, num_requests):
    """Send random requests to one route; returns how often each status was answered."""
    operation = operations[route]
    own_words = json.dumps([operation.schema.raw_schema, "success", "num_paused_requests", " is required"]) + OWN_TEXT
    statuses: Counter[int] = Counter()
    kinds = st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE])

    @settings(max_examples=num_requests, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(kinds.flatmap(lambda kind: operation.as_strategy(generation_mode=kind)), st.booleans())
    def send(case, is_tamed):
        if is_tamed and isinstance(case.body, dict):
            case.body = tamed(case.body)
        response = case.call()
        statuses[response.status_code] += 1
        check_documented(operation, case, response, own_words)

    send()
    return statuses


def check_route(operations, method, path, *, num_bodies):
    has_body = "requestBody" in operations[method, path].definition.raw
    statuses = send_random(operations, (method, path), num_bodies if has_body else max(1, num_bodies // 40))
    if path in GENERATING:
        assert statuses[200] > 0 and statuses[400] > 0
    return statuses.total()


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("method", "path"), EVERY_ROUTE)
def test_only_documented_answers_come(operations, short_context, method, path):
    check_route(operations, method, path, num_bodies=25 if path in GENERATING else 10)


@pytest.mark.slow
def test_twenty_thousand_bodies_leave_nothing_behind(operations, engine, short_context):
    """In rounds over every route: answers as documented, no page and no request left.

    Memory is that of whoever draws the bodies too: `benchmarks.fuzz_http` holds the server to it.
    """
    num_answers = 0
    for _ in range(ROUNDS):
        for method, path in EVERY_ROUTE:
            num_answers += check_route(operations, method, path, num_bodies=BODIES_A_ROUND)
            engine.loop.control.resume().result()
        assert_idle(engine)
        numbers = engine.loop.statistics()
        assert numbers["pages_free"] == numbers["pages_total"], numbers
    assert num_answers >= 20_000
