"""Every known field has one standing on every route, and shows it: computed, without effect, or refused by name."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.serving.api.schemas.known_fields import NOTHING, OBJECTS, is_one_edit, known_fields, plain_objects
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.middleware.ignored_fields import HEADER, listed
from rayserve_moe.serving.middleware.json_body import taken_fields
from tests.architecture.fields_page import PAGE, page
from tests.http.peer_fields import RECORDED
from tests.support.serving.http_client import CHAT, COMPLETIONS, GENERATE, TOKENS, check_error

ROUTES = {
    "completions": (COMPLETIONS, {"prompt": [5, 6], "max_tokens": 2, "temperature": 0}),
    "chat": (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "temperature": 0}),
    "native": (GENERATE, {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}),
    "tokens": (TOKENS, {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "temperature": 0}}),
}
NESTED = {
    "native-sampling": ("native", "sampling_params"),
    "tokens-sampling": ("tokens", "sampling_params"),
    "stream-options": ("completions", "stream_options"),
}
GENERATING = [*ROUTES, *NESTED]
HINTS = {
    "prompt_cache_retention": "24h",
    "kv_cache_retention_config": {"decode_duration_ms": 5},
    "cache_control": {"type": "ephemeral"},
}
"""Values of hints about cached pages, which are read though no answer depends on them."""


def body_with(key, **fields):
    """A good body of the route that the object belongs to, with fields of the object; and what stands before them."""
    if key in ROUTES:
        path, body = ROUTES[key]
        return path, body | fields, ""
    route, name = NESTED[key]
    path, body = ROUTES[route]
    stream = {"stream": True} if key == "stream-options" else {}
    return path, body | stream | {name: body.get(name, {}) | fields}, f"{name}."


def output_of(answer):
    assert answer.status_code == 200, answer.text
    if "event-stream" in answer.headers["content-type"]:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        return "".join(choice["text"] for event in events for choice in event["choices"])
    told = answer.json()
    return told["choices"] if "choices" in told else (told["text"], told["output_ids"])


@pytest.mark.parametrize("key", OBJECTS)
def test_a_field_stands_in_one_list(key):
    known = known_fields(key)
    lists = [known.computed, frozenset(known.other_names), known.accepted, frozenset(known.refused)]
    for one, other in itertools.combinations(lists, 2):
        assert not one & other
    assert set(known.other_names.values()) <= known.computed


@pytest.mark.parametrize("key", GENERATING)
def test_accepted_fields_change_nothing(http, key):
    path, plain, _ = body_with(key)
    _, body, _ = body_with(key, **{name: HINTS.get(name, "any") for name in known_fields(key).accepted})
    answer = http.post(path, json=body)
    assert output_of(answer) == output_of(http.post(path, json=plain))
    assert HEADER not in answer.headers


@pytest.mark.parametrize("key", GENERATING)
def test_a_field_that_is_switched_off_is_as_if_it_were_not_there(http, key):
    path, plain, _ = body_with(key)
    known, expected = known_fields(key), output_of(http.post(path, json=plain))
    switches = [dict.fromkeys(known.refused, value) for value in NOTHING]
    switches.append({name: off[0] for name, off in known.refused.items() if off})
    given = plain[NESTED[key][1]] if key in ("native-sampling", "tokens-sampling") else plain
    switches.append(dict.fromkeys([name for name in known.names if name not in given]))
    for fields in switches:
        assert output_of(http.post(path, json=body_with(key, **fields)[1])) == expected


@pytest.mark.parametrize("key", GENERATING)
def test_a_field_that_would_change_the_answer_is_refused_by_name(http, key):
    for name in known_fields(key).refused:
        path, body, before = body_with(key, **{name: "on"})
        error = check_error(http.post(path, json=body), 400)
        assert error["param"] == f"{before}{name}" and name in error["message"]


@pytest.mark.parametrize("key", sorted(OBJECTS.keys() - {*GENERATING}))
def test_control_routes_hold_to_the_table_too(key):
    known = known_fields(key)
    assert taken_fields(dict.fromkeys(known.accepted, 7), known) == ({}, [])
    for name, values in known.refused.items():
        assert taken_fields({name: values[0] if values else None}, known) == ({}, [])
        with pytest.raises(ApiError, match=name):
            taken_fields({name: 7}, known)


@pytest.mark.parametrize(
    ("key", "typo", "meant"),
    [
        ("native-sampling", "temprature", "temperature"),
        ("native-sampling", "max_tokens", "max_new_tokens"),
        ("tokens-sampling", "max_new_tokens", "max_tokens"),
        ("tokens-sampling", "Top_P", "top_p"),
        ("stream-options", "include_usages", "include_usage"),
        ("native-sampling", "zq7-marker" * 100, ""),
        ("tokens-sampling", "", ""),
    ],
)
def test_an_unknown_name_in_an_object_is_refused_with_the_nearest_one(http, key, typo, meant):
    path, body, before = body_with(key, **{typo: 0})
    error = check_error(http.post(path, json=body), 400)
    assert error["param"] == before[:-1] and meant in error["message"]


def test_each_object_of_a_list_is_looked_at(http):
    body = {"input_ids": [[5], [6]], "sampling_params": [{"max_new_tokens": 1}, {"temprature": 0}]}
    assert check_error(http.post(GENERATE, json=body), 400)["param"] == "sampling_params.1"


def test_two_names_of_one_field_are_one_field(http):
    path, body = ROUTES["completions"]
    assert http.post(path, json=body | {"request_id": "mine"}).json()["id"] == "mine"
    error = check_error(http.post(path, json=body | {"request_id": "mine", "rid": "mine"}), 400)
    assert error["param"] == "rid"


@pytest.mark.parametrize("key", ROUTES)
@pytest.mark.parametrize("streams", [False, True])
def test_names_that_nobody_knows_are_listed_in_a_header(http, key, streams):
    path, body = ROUTES[key]
    answer = http.post(path, json=body | {"sparkle": 1, "é,\n": 2, "stream": streams})
    assert answer.status_code == 200 and answer.headers[HEADER] == "sparkle, %C3%A9%2C%0A"
    assert HEADER not in http.post(path, json=body | {"stream": streams}).headers


def test_a_header_lists_so_many_names_and_counts_the_rest(http):
    path, body = ROUTES["native"]
    names = [f"field{number}" for number in range(19)]
    answer = http.post(path, json=body | {"x" * 1000: 0} | dict.fromkeys(names, 0))
    told = answer.headers[HEADER].split(", ")
    assert told == ["x" * 64, *names[:15], "+4"] and listed(["a"] * 16).count("a") == 16
    assert all(len(name) <= 64 and name.isascii() for name in listed(["\U0001f600" * 64, "\x00" * 64]).split(", "))


def test_an_unknown_name_is_logged_once(http, caplog):
    path, body = ROUTES["native"]
    for _ in range(2):
        http.post(path, json=body | {"wobble": True})
    assert [record.getMessage() for record in caplog.records if "wobble" in record.getMessage()] == [
        "ignoring request field 'wobble', which is not known"
    ]


@pytest.mark.parametrize(
    ("key", "typo", "meant"),
    [
        ("completions", "return_routed_expert", "return_routed_experts"),
        ("chat", "temprature", "temperature"),
        ("chat", "mesages", "messages"),
        ("native", "sampling_parms", "sampling_params"),
        ("tokens", "cache_slat", "cache_salt"),
        ("tokens", "streams", "stream"),
    ],
)
def test_a_name_one_edit_away_from_a_known_one_is_refused_with_that(http, key, typo, meant):
    path, body = ROUTES[key]
    error = check_error(http.post(path, json=body | {typo: 0}), 400)
    assert error["param"] == meant and f"`{meant}`" in error["message"] and f"`{typo}`" not in error["message"]


def test_two_edits_and_short_names_are_no_misspelling(http):
    path, body = ROUTES["completions"]
    others = ["tempreture", "nn", "id", "step", "test", "maxtoken", "", "x" * 70]
    answer = http.post(path, json=body | dict.fromkeys(others, 0))
    assert answer.status_code == 200 and len(answer.headers[HEADER].split(", ")) == len(others)


@given(st.text("ab_", max_size=6), st.text("ab_", max_size=6))
def test_one_edit_is_a_distance_of_one(one, other):
    edits = {one[:i] + c + one[i + k :] for i in range(len(one) + 1) for c in ["", *"ab_"] for k in (0, 1)}
    edits |= {one[:i] + one[i + 1] + one[i] + one[i + 2 :] for i in range(len(one) - 1)}
    assert is_one_edit(one, other) == (other in edits - {one})


PEERS = json.loads(RECORDED.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("system", "key"), [(system, key) for system in PEERS for key in PEERS[system] if key in OBJECTS]
)
def test_every_field_of_other_systems_is_known(system, key):
    """Their request models, read as text (`tests/http/peer_fields.py`): none unknown here, so that none is ignored."""
    assert len(PEERS[system][key]) > 1 and not set(PEERS[system][key]) - set(known_fields(key).names)


OTHER_CLIENTS = [
    *("models", "route", "transforms", "provider", "plugins", "usage", "top_a", "typical_p", "tfs", "mirostat"),
    *("id", "step", "epoch", "uid", "index", "version", "timeout", "extra_body", "extra_headers", "api_key", "headers"),
    *("stop_words", "top_n", "num_beams", "do_sample", "max_length", "best_of", "history", "name", "names", "test"),
]
"""Fields of routers, of older servers and of trainers."""


@pytest.mark.parametrize("key", OBJECTS)
def test_no_field_of_a_real_client_is_taken_for_a_misspelt_one(key):
    """Clients send the fields of one route to another, too."""
    sent = {name for objects in PEERS.values() for names in objects.values() for name in names}
    sent |= {name for each in OBJECTS for name in known_fields(each).names} | {*OTHER_CLIENTS}
    known = known_fields(key)
    assert [name for name in sorted(sent) if name not in known.names and known.meant_by([name])] == []


def test_names_within_objects_that_are_read_as_they_stand_are_those_of_other_systems(http):
    path, body = ROUTES["completions"]
    names = PEERS["vllm 0.32.0"]
    error = check_error(http.post(path, json=body | {"structured_outputs": {"sparkle": 1}}), 400)
    assert set(names["structured_outputs"]) <= set(re.findall(r"\w+", error["message"]))
    told = http.post(path, json=body | {"repetition_detection": dict.fromkeys(names["repetition_detection"], 2)})
    assert told.status_code == 200, told.text


def test_the_table_is_served(http):
    told = http.get("/v1/fields").json()
    described = http.get("/openapi.json").json()["paths"]
    assert len(told["objects"]) == len(OBJECTS) + sum(len(plain_objects(key)) for key in OBJECTS)
    for each in told["objects"]:
        assert all(path in described for path in each["routes"])
    (sampling,) = [each for each in told["objects"] if each["routes"] == ["/generate"] and each["object"] != "body"]
    assert sampling["fields"]["temperature"] == {"standing": "computed"}
    assert sampling["fields"]["beam_width"] == {"standing": "refused", "also_switched_off_by": [1]}


def test_the_page_of_fields_is_the_table():
    """`python -m tests.architecture.fields_page` writes it anew."""
    assert Path(PAGE).read_text(encoding="utf-8") == page()


MESSAGE = {"max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
PLAIN = {
    "messages": ("/v1/messages", MESSAGE),
    "count-tokens": ("/v1/messages/count_tokens", MESSAGE),
    "responses": ("/v1/responses", {"input": "x"}),
}


def with_object(key, path, known, **fields):
    """A body with an object at a path, and what errors call that."""
    value = ({"type": known.kinds[0]} if known.kinds else {}) | fields
    outer, _, inner = path.partition(".")
    if inner:
        value = {inner: value}
    return PLAIN[key][1] | {outer: [value] if outer == "tools" else value}, f"{path}.0" if outer == "tools" else path


@pytest.mark.parametrize("key", PLAIN)
def test_unknown_names_in_objects_without_a_schema_are_refused(http, key):
    for path, known in plain_objects(key).items():
        body, param = with_object(key, path, known, **{"zq7-marker": 5})
        error = check_error(http.post(PLAIN[key][0], json=body), 400)
        assert error["param"] == param and "nearest" in error["message"]


@pytest.mark.parametrize("key", PLAIN)
def test_what_such_an_object_cannot_have_is_refused_by_name(http, key):
    for path, known in plain_objects(key).items():
        for name, values in known.refused.items():
            body, param = with_object(key, path, known, **{name: 7})
            assert check_error(http.post(PLAIN[key][0], json=body), 400)["param"] == f"{param}.{name}"
            assert taken_fields({name: values[0] if values else None}, known) == ({}, [])


def test_names_of_such_objects_are_told_too(http):
    told = http.get("/v1/fields").json()["objects"]
    (thinking,) = [each for each in told if each["object"] == "thinking" and each["routes"] == ["/v1/messages"]]
    assert thinking["fields"]["budget_tokens"] == {"standing": "computed"}
