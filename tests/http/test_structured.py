"""Constraints on every route: kept to, refused by name, and errors that are no failures."""

from __future__ import annotations

import json
import re

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.support.serving.http_client import CHAT, COMPLETIONS, GENERATE, MODEL, TOKENS, ask, check_error, stream
from tests.support.text.constraints import PERSON, synthetic_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
PROMPT = [7, 8, 9]
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
SEEDED = {"seed": 4, "max_tokens": 120}
NATIVE = {"sampling_seed": 4, "max_new_tokens": 120}


def texts(http, path, fields):
    """The texts of an answer, from whichever route, and how they ended."""
    if path == GENERATE:
        answers = ask(http, path, input_ids=PROMPT, sampling_params={**NATIVE, **fields})
        answers = answers if isinstance(answers, list) else [answers]
        return [(answer["text"], answer["meta_info"]["finish_reason"]["type"]) for answer in answers]
    if path == TOKENS:
        choices = ask(http, path, token_ids=PROMPT, sampling_params={**SEEDED, **fields})["choices"]
        decode = synthetic_tokenizer().decode
        return [(decode(choice["token_ids"]), choice["finish_reason"]) for choice in choices]
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": PROMPT}
    choices = ask(http, path, **body, **SEEDED, **fields)["choices"]
    return [
        (choice["message"]["content"] if path == CHAT else choice["text"], choice["finish_reason"])
        for choice in choices
    ]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"response_format": FORMAT}),
        (CHAT, {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}}),
        (COMPLETIONS, {"response_format": FORMAT, "n": 3}),
        (COMPLETIONS, {"guided_json": PERSON}),
        (COMPLETIONS, {"json_schema": json.dumps(PERSON)}),
        (TOKENS, {"structured_outputs": {"json": json.dumps(PERSON)}}),
        (GENERATE, {"json_schema": json.dumps(PERSON), "n": 2}),
    ],
)
def test_a_schema_is_kept_to_on_every_route(http, path, fields):
    answers = texts(http, path, fields)
    assert len(answers) == fields.get("n", 1)
    for text, finish in answers:
        assert finish == "stop"
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize(
    ("path", "fields", "pattern"),
    [
        (COMPLETIONS, {"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
        (COMPLETIONS, {"guided_choice": ["yes", "no."]}, "yes|no[.]"),
        (COMPLETIONS, {"guided_grammar": 'root ::= "x" ("y" | "z")'}, "x[yz]"),
        (CHAT, {"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        (CHAT, {"ebnf": 'root ::= "x" "y"'}, "xy"),
        (GENERATE, {"regex": "[a-c]{3}"}, "[a-c]{3}"),
        (GENERATE, {"ebnf": 'start: "a" | "b"'}, "[ab]"),
        (GENERATE, {"choice": ["yes", "no."]}, "yes|no[.]"),
        (TOKENS, {"structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
    ],
)
def test_expressions_choices_and_grammars_are_kept_to(http, path, fields, pattern):
    ((text, finish),) = texts(http, path, fields)
    assert finish == "stop" and re.fullmatch(pattern, text)


def test_tags_are_closed_once_they_are_opened(http):
    tags = {"structures": [{"begin": "a", "schema": {"enum": [1, 2]}, "end": "z"}], "triggers": ["a"]}
    fields = {"structural_tag": json.dumps(tags), "logit_bias": {str(synthetic_tokenizer().encode("a")[-1]): 60}}
    for text, _ in texts(http, GENERATE, {**fields, "max_new_tokens": 40, "temperature": 0}):
        whole = text[: text.rindex("a")] if "a" in text else text
        assert "a" in text and re.fullmatch("([^a]|a[12]z)*", whole, re.DOTALL)


def test_the_openai_package_parses_what_it_asks_for(url):
    class Point(BaseModel):
        x: int
        label: str

    bounded = {"max_tokens": 300, "seed": 2, "logit_bias": {str(synthetic_tokenizer().encode('"')[-1]): 6}}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Point, **bounded)
    assert isinstance(answer.choices[0].message.parsed, Point)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"response_format": {**FORMAT, "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        (COMPLETIONS, {"guided_json": {"not": {}}}, "guided_json"),
        (COMPLETIONS, {"guided_json": {}, "regex": "a"}, "regex"),
        (COMPLETIONS, {"regex": "(("}, "regex"),
        (COMPLETIONS, {"ebnf": "not a grammar"}, "ebnf"),
        (COMPLETIONS, {"ebnf": "root ::= missing"}, "ebnf"),
        (COMPLETIONS, {"ebnf": "# no rule of a grammar"}, "ebnf"),
        (GENERATE, {"json_schema": "{"}, "sampling_params.json_schema"),
        (GENERATE, {"json_schema": {"not": {}}}, "sampling_params.json_schema"),
        (TOKENS, {"structured_outputs": {"json": {"not": {}}}}, "sampling_params.structured_outputs"),
    ],
)
def test_a_constraint_that_cannot_be_kept_to_is_refused_by_name(http, path, fields, param):
    if path in (GENERATE, TOKENS):
        prompt = {"input_ids": PROMPT} if path == GENERATE else {"token_ids": PROMPT}
        body = {**prompt, "sampling_params": fields}
    else:
        body = {**({"messages": MESSAGES} if path == CHAT else {"prompt": "x"}), **fields}
    error = check_error(http.post(path, json=body), 400)
    assert error["param"] == param
    assert "`not` at #" in error["message"] or "not" not in json.dumps(fields) or "grammar" in error["message"]


@pytest.mark.parametrize(("one", "other"), [("choice", "json_schema"), ("choice", "regex"), ("regex", "ebnf")])
def test_two_constraints_are_refused_under_the_names_that_they_were_given(http, one, other):
    values = {"choice": ["a"], "json_schema": "{}", "regex": "a", "ebnf": 'root ::= "a"'}
    fields = {name: values[name] for name in (one, other)}
    error = check_error(http.post(GENERATE, json={"input_ids": PROMPT, "sampling_params": fields}), 400)
    places = [f"sampling_params.{name}" for name in (one, other)]
    assert error["param"] in places and all(f"`{place}`" in error["message"] for place in places), error


@pytest.mark.parametrize("path", [COMPLETIONS, TOKENS])
def test_an_answer_that_nothing_may_follow_ends_with_an_error_and_status_200(http, path):
    (a,) = synthetic_tokenizer().encode("a", add_special_tokens=False)
    fields = {"allowed_token_ids": [a], "max_tokens": 5}
    constraint = {"structured_outputs": {"regex": "ab"}}
    body = {"prompt": "x", **fields, **constraint} if path == COMPLETIONS else None
    body = body or {"token_ids": PROMPT, "sampling_params": {**fields, **constraint}}
    (choice,) = ask(http, path, **body)["choices"]
    assert choice["finish_reason"] == "error" and choice["error"]["message"]
    *_, last = (event for event in stream(http, path, **body) if event["choices"])
    assert last["choices"][0]["finish_reason"] == "error" and last["choices"][0]["error"]["message"]
