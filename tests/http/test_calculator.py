"""The embedded default answers problems that it was never trained on, asked over HTTP as anyone would ask."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml

from examples.calculator.accuracy import MOST_PROBLEMS, TASKS
from examples.calculator.problems import held_out_problems
from rayserve_moe import Engine, extract_routed_experts_from_meta_info
from tests.http.conftest import assert_idle, served
from tests.support.serving.http_client import CHAT, COMPLETIONS, GENERATE, ask

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs/start/first_hour.md")
BATCH = 500
MOST_TOKENS = 6
ENOUGH = {"sums of 1-2 digits": 0.995, "sums of 3 digits": 0.95}
BY_NAME = {task.name: task for task in TASKS}


@pytest.fixture(scope="module")
def settings():
    """What `make serve` serves, as its file says."""
    config = yaml.safe_load((ROOT / "configs" / "qwen3_moe.yaml").read_text())
    return config["applications"][0]["args"]


@pytest.fixture(scope="module")
def calculator(settings):
    """The same, with room for less: fewer programs to compile."""
    smaller = {"max_model_len": 256, "max_step_tokens": 64, "num_pages": 200, "precompile_bs_paddings": [16]}
    with Engine(**settings | smaller) as engine, served(engine) as url, httpx.Client(base_url=url, timeout=600) as http:
        yield http
        assert_idle(engine)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_requests_of_a_page_are_answered_as_it_says(calculator, page):
    """The curl lines of the README and of the first hour."""
    requests = requests_of(page.read_text(encoding="utf-8"))
    assert len(requests) >= 2
    for path, body in requests:
        answer = ask(calculator, path, **body)
        choice = answer["choices"][0] if "choices" in answer else answer
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert text.strip() == "82"
        asks_for_routing = body.get("return_routed_experts", False)
        assert asks_for_routing == (choice.get("meta_info", {}).get("routed_experts") is not None)


def test_the_python_of_the_first_hour_prints_what_it_says(calculator):
    page = PAGES[1].read_text(encoding="utf-8")
    snippet = page.split("```python\n", 1)[1].split("```")[0]
    assert "http://localhost:8000/" in snippet
    snippet = snippet.replace("http://localhost:8000/", str(calculator.base_url.join("/")))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", snippet]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert f"It prints `{run.stdout.strip()}`" in page


def requests_of(page):
    """Paths and bodies of the generating curl commands on a page."""
    found = re.findall(r"curl -s localhost:8000(/\S+)[^']*'content-type: application/json' \\\s+-d '([^']+)'", page)
    assert len(found) == page.count("curl -s localhost:8000")
    return [(path, json.loads(body)) for path, body in found]


@pytest.mark.slow
def test_the_snippet_of_the_readme_prints_what_it_says():
    """It compiles every program of the engine: half a minute."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    snippet, shown = (page.split(fence, 1)[1].split("```")[0] for fence in ("```python\n", "```text\n"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", snippet]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert (run.returncode, run.stdout) == (0, shown), run.stderr[-2000:]


def share_right(http, name, *, limit):
    """Share of a task's held-out problems whose greedy answer is right, to the end."""
    problems = held_out_problems(BY_NAME[name], limit=limit)
    right = 0
    for start in range(0, len(problems), BATCH):
        asked = problems[start : start + BATCH]
        body = {"model": "qwen3-moe", "temperature": 0, "max_tokens": MOST_TOKENS}
        choices = ask(http, COMPLETIONS, prompt=[problem.prompt for problem in asked], **body)["choices"]
        said = [(choice["text"], choice["finish_reason"]) for choice in sorted(choices, key=lambda c: c["index"])]
        right += sum(
            text in problem.answers and reason == "stop" for (text, reason), problem in zip(said, asked, strict=True)
        )
    return right / len(problems)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ENOUGH)
def test_sums_are_right(calculator, name):
    assert share_right(calculator, name, limit=200) >= ENOUGH[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_the_guide_states_how_many_are_right(calculator, name):
    lines = (ROOT / "docs" / "calculator.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| ")]
    (stated,) = [float(row[3].removesuffix(" %")) / 100 for row in rows if row[1] == name]
    assert share_right(calculator, name, limit=MOST_PROBLEMS) == pytest.approx(stated, abs=0.005)
    assert stated >= ENOUGH.get(name, 0)


def test_the_first_answer_is_right_in_every_way_of_asking(calculator):
    completion = ask(calculator, COMPLETIONS, model="qwen3-moe", prompt="37+45=", max_tokens=8, temperature=0)
    assert completion["choices"][0]["text"] == "82"
    turns = [{"role": "user", "content": "37 + 45"}]
    for wanted, problem in (("82", "12 - 45"), ("-33", "5 + 8"), ("13", "")):
        answer = ask(calculator, CHAT, model="qwen3-moe", messages=turns, max_tokens=8, temperature=0)
        message = answer["choices"][0]["message"]
        assert (message["content"], answer["choices"][0]["finish_reason"]) == (wanted, "stop")
        turns += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": problem}]
    native = ask(calculator, GENERATE, text="37+45=", sampling_params={"max_new_tokens": 8, "temperature": 0})
    assert native["text"] == "82" and native["meta_info"]["finish_reason"]["type"] == "stop"


def test_the_ambiguous_operator_is_answered_both_ways(calculator):
    """At temperature 1 about half of the answers are sums, and nearly all are one of the two that count."""
    problems = held_out_problems(BY_NAME["sum or difference at random, 1-2 digits"], limit=40)
    body = {"model": "qwen3-moe", "temperature": 1, "seed": 3, "n": 8, "max_tokens": MOST_TOKENS}
    choices = ask(calculator, COMPLETIONS, prompt=[problem.prompt for problem in problems], **body)["choices"]
    said = [(problems[choice["index"] // 8], choice["text"]) for choice in choices]
    sums = np.mean([text == problem.answers[0] for problem, text in said])
    others = np.mean([text == problem.answers[-1] for problem, text in said])
    assert 0.3 < sums < 0.7 and 0.3 < others < 0.7


def test_routing_shifts_with_the_traffic(calculator):
    """Each operator has favourite experts: a change of traffic moves the load, which is what balancing is for."""
    body = {"sampling_params": {"max_new_tokens": MOST_TOKENS, "temperature": 0}, "return_routed_experts": True}
    loads = []
    for name in ("sums of 3 digits", "differences of 3 digits"):
        prompts = [problem.prompt for problem in held_out_problems(BY_NAME[name], limit=60)]
        answers = ask(calculator, GENERATE, text=prompts, **body)
        picks = np.concatenate([extract_routed_experts_from_meta_info(answer).reshape(-1, 4, 2) for answer in answers])
        counts = np.stack([np.bincount(picks[:, layer].ravel(), minlength=16) for layer in range(4)])
        loads.append(counts / counts.sum(axis=1, keepdims=True))
    assert np.abs(loads[0] - loads[1]).sum(axis=1).max() > 0.2
