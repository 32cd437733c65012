"""The pages in a real browser, over a real server: what they show is what the API answers.

`make browser` installs Chromium and runs these; without it they are skipped.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe.engine.eplb.steps import COUNTS_EVERY_UNPLANNED
from tests.http.conftest import assert_idle, served
from tests.http.test_experts_page import RANKS, ShownBalancing
from tests.support.engine.step_gate import held_steps
from tests.support.serving.browser import CHROMIUM, browsing
from tests.support.serving.http_client import CHAT, ask
from tests.support.serving.http_server import KEY

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: `make browser` installs it")

MESSAGE = "Which experts?"
HOSTILE = '<img src=x onerror="window.hit = 1"><script>window.hit = 1</script>'
NUM_NEW = 12
IS_DONE = "!document.getElementById('send').disabled && document.querySelectorAll('.token').length > 0"
COUNT = "document.querySelectorAll('.token').length"
SHOWN = """[...document.querySelectorAll('.token')].map(token => {
    token.click();
    const numbers = row => [...row.querySelectorAll('button')].map(each => Number(each.textContent));
    const rows = [...document.querySelectorAll('#experts tr[data-layer]')];
    return {
        text: token.getAttribute('aria-label').replace('token ', ''),
        experts: rows.map(row => [Number(row.dataset.layer), numbers(row)]),
        alternatives: [...document.querySelectorAll('#alternatives tbody tr')].map(row => row.cells[2].textContent),
        about: document.querySelector('#about p').textContent,
        said: document.getElementById('no-experts')?.textContent,
    };
})"""
HELD_LOADS = """const loads = window.fetch;
window.held = [];
window.fetch = async (path, ...rest) => {
    const answer = await loads(path, ...rest);
    if (path === 'v1/loads') await new Promise(release => held.push(release));
    return answer;
}"""
ANSWER_WITH = """const real = window.fetch;
window.fetch = (path, ...rest) =>
    path === 'v1/chat/completions' ? Promise.resolve(new Response(EVENTS)) : real(path, ...rest)"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(chromium):
    """The browser; afterwards no script has failed, and nothing was requested but from servers on this machine."""
    chromium.requested.clear()
    chromium.faults.clear()
    yield chromium
    assert chromium.faults == []
    assert [url for url in chromium.requested if not url.startswith(("http://127.0.0.1:", "data:"))] == []


def by_id(name, end=""):
    return f"document.getElementById('{name}'){end}"


def text_of(browser, name):
    return browser.run(by_id(name, ".textContent"))


def fill(browser, **values):
    for name, value in values.items():
        browser.run(by_id(name, f".value = {json.dumps(value)}"))


def say(browser, text, **sampling):
    """Write a message with the keyboard, and send it."""
    fill(browser, **sampling)
    browser.run(by_id("prompt", ".focus()"))
    browser.type(text)
    browser.press("Enter", code=13, text="\r")


def open_chat(browser, url, **window):
    browser.open(f"{url}/", **window)
    browser.until(by_id("model", ".textContent !== 'rayserve_moe'"))


def test_the_chat_streams_and_shows_the_experts_of_every_token(browser, http, url, engine, layout):
    """Greedy, so that the API answers the same to the same messages."""
    open_chat(browser, url)
    assert text_of(browser, "model") == engine.loop.card.name
    with held_steps(engine.loop) as gate:
        say(browser, MESSAGE, temperature="0", max_tokens=str(NUM_NEW), system="Be brief.", top_logprobs="3")
        for count in (1, 2, 3):
            gate.let_run(2)
            browser.until(f"{COUNT} >= {count}")
        assert browser.run(COUNT) < NUM_NEW and not browser.run(IS_DONE), "tokens appear as they come"
    browser.until(IS_DONE)
    shown = browser.run(SHOWN)

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": MESSAGE}]
    body = {"messages": messages, "temperature": 0, "max_tokens": NUM_NEW, "logprobs": True, "top_logprobs": 3}
    answer = ask(http, CHAT, **body, return_routed_experts=True, routed_experts_format="nested", return_token_ids=True)
    (choice,) = answer["choices"]
    rows = np.array(choice["routed_experts"])
    assert len(shown) == len(choice["token_ids"]) == len(rows) + 1 >= 3
    for index, (token, scored) in enumerate(zip(shown, choice["logprobs"]["content"], strict=True)):
        assert token["text"] == scored["token"]
        position = len(answer["prompt_token_ids"]) + index
        assert token["about"].startswith(f"id {choice['token_ids'][index]}, position {position}, ")
        told = sorted((each["logprob"] for each in scored["top_logprobs"]), reverse=True)
        np.testing.assert_allclose([float(each) for each in token["alternatives"]], told, atol=2e-3)
        if index < len(rows):
            assert token["experts"] == [[*pair] for pair in zip(layout.layer_ids, rows[index].tolist(), strict=True)]
        else:
            assert token["experts"] == [] and token["said"].startswith("None: ")


def test_the_keyboard_reaches_every_token_and_stops_an_answer(browser, url, engine):
    open_chat(browser, url)
    with held_steps(engine.loop) as gate:
        say(browser, MESSAGE, temperature="0", max_tokens="300")
        gate.let_run(8)
        browser.until(f"{COUNT} >= 4")
        browser.press("Escape", code=27)
        browser.until(IS_DONE)
    assert browser.run("document.querySelector('.numbers').textContent").endswith(", stopped")
    assert_idle(engine)
    count = browser.run(COUNT)
    assert 4 <= count <= 8
    browser.run("document.querySelector('.token').focus()")
    for _ in range(3):
        browser.press("ArrowRight", code=39)
    position = browser.run("[...document.querySelectorAll('.token')].indexOf(document.activeElement)")
    chosen = browser.run("[...document.querySelectorAll('.token')].findIndex(token => token.matches('.chosen'))")
    assert position == chosen == 3
    browser.run(by_id("clear", ".click()"))
    assert browser.run("document.querySelectorAll('.message').length") == 0
    say(browser, MESSAGE, max_tokens="3")
    browser.until(IS_DONE)
    assert_idle(engine)


def test_an_expert_marks_the_tokens_that_have_it(browser, url, engine):
    open_chat(browser, url)
    say(browser, MESSAGE, temperature="0", max_tokens=str(NUM_NEW))
    browser.until(IS_DONE)
    shown = browser.run(SHOWN)
    browser.run("document.querySelector('.token').click()")
    layer, (expert, *_) = shown[0]["experts"][1]
    browser.run(f'document.querySelector(\'#experts [data-layer="{layer}"] [data-expert="{expert}"]\').click()')
    marked = browser.run("[...document.querySelectorAll('.token')].map(token => token.matches('.same'))")
    assert marked == [expert in dict(map(tuple, token["experts"])).get(layer, ()) for token in shown]
    assert_idle(engine)


def test_what_a_model_says_is_text(browser, url):
    """Whatever comes in an event, no element and no script comes of it."""
    open_chat(browser, url)
    scored = {"token": HOSTILE, "bytes": list(HOSTILE.encode()), "logprob": -0.5}
    choice = {"index": 0, "delta": {"content": HOSTILE}, "token_ids": [5], "finish_reason": "stop"}
    choice |= {"logprobs": {"content": [{**scored, "top_logprobs": [scored]}]}}
    event = json.dumps(f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n")
    browser.run(ANSWER_WITH.replace("EVENTS", event))
    say(browser, HOSTILE)
    browser.until(IS_DONE)
    browser.run("document.querySelector('.token').click()")
    said = browser.run("[...document.querySelectorAll('.said')].map(each => each.textContent)")
    assert (
        said == [HOSTILE, HOSTILE] and browser.run("document.querySelectorAll('.panes img, .panes script').length") == 0
    )
    assert HOSTILE in json.loads(text_of(browser, "about").partition("Token ")[2].partition("id 5")[0])
    assert browser.run("window.hit") is None


def test_what_goes_wrong_is_said_and_the_message_is_kept(browser, url, engine):
    open_chat(browser, url)
    say(browser, MESSAGE, temperature="3")
    browser.until(by_id("conversation", ".querySelector('.bad')?.textContent.includes('temperature')"))
    assert browser.run(by_id("prompt", ".value")) == MESSAGE
    say(browser, "", temperature="0", max_tokens="2")
    browser.until(IS_DONE)
    assert_idle(engine)


def test_experts_shows_the_counts_of_the_server(browser, http, url, engine):
    body = {"prompt": [5, 6], "max_tokens": 3 * COUNTS_EVERY_UNPLANNED, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).status_code == 200
    browser.open(f"{url}/experts")
    browser.until(f"{by_id('all')} && !{by_id('all', '.hidden')}")
    tokens = np.array(http.get("/experts/state").json()["tokens"])
    assert text_of(browser, "tokens").replace(",", "") == str(round(tokens.sum(axis=1).mean()))
    shares = tokens / tokens.mean(axis=1, keepdims=True)
    layer, expert = np.unravel_index(shares.argmax(), shares.shape)
    assert text_of(browser, "hottest") == f"{shares.max():.3f}"
    assert text_of(browser, "hottest-where") == f"expert {expert} of layer {engine.loop.card.routing.layer_ids[layer]}"
    assert browser.run("[...document.querySelectorAll('.ranks')].every(part => part.hidden)"), "there is one rank"
    assert text_of(browser, "model") == engine.loop.card.name
    size = browser.run(f"[{by_id('heat', '.width')}, {by_id('heat', '.height')}]")
    assert size == [*reversed(tokens.shape)]


def test_experts_shows_the_loads_of_every_plan(browser, engine, monkeypatch):
    shown = ShownBalancing()
    monkeypatch.setattr(engine.loop, "eplb_control", shown)
    with served(engine) as url:
        browser.open(f"{url}/experts")
        browser.until(f"{by_id('all')} && !{by_id('all', '.hidden')}")
        view = shown.view()
        assert browser.run("document.querySelectorAll('#ranks rect').length") == 3 * RANKS
        assert text_of(browser, "worst") == f"{max(view.imbalance_now):.3f}"
        assert text_of(browser, "worst-before") == f"{max(view.imbalance_before):.3f} before the last plan"
        browser.run(by_id("when", ".focus()"))
        browser.press("ArrowLeft", code=37)
        browser.until(by_id("shown-plan", ".textContent.startsWith('plan 1, ')"))
        assert text_of(browser, "worst-before").endswith("before this plan")
        browser.run(by_id("to-now", ".click()"))
        browser.until(by_id("shown-plan", ".textContent === 'now'"))


def test_experts_says_when_counts_come(browser, engine, monkeypatch):
    shown = ShownBalancing()
    nothing = np.zeros_like(shown.view().tokens).tolist()
    shown._view = replace(shown.view(), tokens=nothing)
    monkeypatch.setattr(engine.loop, "eplb_control", shown)
    with served(engine) as url:
        browser.open(f"{url}/experts")
        browser.until(f"{by_id('none')} && !{by_id('none', '.hidden')}")
        assert text_of(browser, "none").startswith("No counts yet: they are read every 16 steps.")
        assert browser.run(by_id("all", ".hidden"))


def test_docs_lists_every_route_with_its_fields(browser, http, url):
    browser.open(f"{url}/docs")
    browser.until("document.querySelectorAll('.route').length > 0")
    api = http.get("/openapi.json").json()
    routes = {f"{method.upper()} {path}" for path, methods in api["paths"].items() for method in methods}
    assert {*browser.run("[...document.querySelectorAll('.route')].map(each => each.dataset.route)")} == routes
    section = f"document.querySelector('[data-route=\"POST {CHAT}\"]')"
    browser.run(f"{section}.open = true")
    browser.until(f"{section}.querySelector('table')")
    written = browser.run(f"{section}.textContent")
    fields = api["components"]["schemas"]["ChatBody"]["properties"]
    assert len(fields) > 100 and [name for name in fields if name not in written] == []
    assert fields["temperature"]["description"] in written
    assert {*api["paths"][CHAT]["post"]["responses"]} <= {
        *browser.run(f"[...{section}.querySelectorAll('td:first-child')].map(cell => cell.textContent)")
    }
    browser.run(f"{by_id('filter')}.value = 'tokenize'; {by_id('filter')}.dispatchEvent(new Event('input'))")
    left = browser.run(
        "[...document.querySelectorAll('.route')].filter(each => !each.hidden).map(each => each.dataset.route)"
    )
    assert {"POST /tokenize", "POST /detokenize"} <= {*left} and len(left) < len(routes)


@pytest.mark.parametrize("path", ["", "experts", "docs"])
def test_a_page_asks_for_the_key_and_blames_nobody_before(browser, engine, path):
    with served(engine, api_key=KEY) as url:
        browser.open(f"{url}/{path}")
        browser.run("sessionStorage.clear()")
        browser.until(f"!{by_id('login', '.hidden')}")
        assert text_of(browser, "login-said") == "This server asks for its API key."
        browser.until(f"{by_id('state', '.textContent')} === 'waiting for the API key'")
        assert browser.run("[...document.querySelectorAll('.bad')].filter(each => each.checkVisibility()).length") == 0
        for key in ("wrong", KEY):
            browser.run(by_id("key", ".select()"))
            browser.type(key)
            browser.press("Enter", code=13, text="\r")
            if key != KEY:
                browser.until(f"{by_id('login-said', '.textContent')} === 'This key is wrong.'")
        browser.until(f"{by_id('model', '.textContent')} === {json.dumps(engine.loop.card.name)}")
        browser.until(f"{by_id('login', '.hidden')} && {by_id('state', '.textContent')}.startsWith('serving')")
        browser.run("sessionStorage.clear()")


def test_an_answer_to_an_older_key_does_not_ask_again(browser, engine):
    """The first key's refusal is held until the second key has been taken."""
    with served(engine, api_key=KEY) as url:
        browser.open(f"{url}/")
        browser.until(f"!{by_id('login', '.hidden')}")
        browser.run(HELD_LOADS)
        for key in ("wrong", KEY):
            browser.run(f"{by_id('key')}.value = {json.dumps(key)}; {by_id('login')}.requestSubmit()")
        browser.until("window.held.length >= 2")
        browser.run("held.slice(0, 1).forEach(release => release())")
        browser.until("window.held.length >= 3")
        browser.run("held.slice(1).forEach(release => release())")
        browser.until(by_id("state", ".textContent.startsWith('serving')"))
        assert browser.run(by_id("login", ".hidden")) and browser.run("sessionStorage.getItem('api_key')") == KEY
        browser.run("sessionStorage.clear()")


@pytest.mark.parametrize("path", ["", "experts", "docs"])
def test_a_page_fits_a_small_screen(browser, url, path):
    for is_dark in (False, True):
        browser.open(f"{url}/{path}", width=390, height=800, is_dark=is_dark)
        browser.until(by_id("state", ".textContent.startsWith('serving')"))
        assert browser.run("document.documentElement.scrollWidth") <= 390
        paper = browser.run("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(13, 17, 23)" if is_dark else "rgb(255, 255, 255)")


def test_the_browser_would_tell_of_a_broken_page(chromium, url):
    """What the other tests rely on: a fault of a script is seen, and so is a request that the policy forbids."""
    chromium.open(f"{url}/")
    chromium.faults.clear()
    chromium.run("setTimeout(() => { throw new Error('broken'); })")
    chromium.run("fetch('http://example.com/').catch(() => 0)")
    chromium.run("new Promise(done => setTimeout(done))")
    chromium.until("true")
    assert any("broken" in fault for fault in chromium.faults)
    assert any("Content Security Policy" in fault for fault in chromium.faults)
