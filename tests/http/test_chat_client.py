"""`rayserve-moe chat` against a real server."""

from __future__ import annotations

import io

import pytest

from rayserve_moe.cli import main
from tests.support.serving.http_client import CHAT, ask


@pytest.fixture
def typed(monkeypatch):
    def run(text, *options):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return main(["chat", *options])

    return run


def test_each_line_is_answered_with_all_before_it(http, url, typed, capsys):
    messages, answers = [{"role": "system", "content": "be"}], []
    for line in ("Hello", "And?"):
        messages.append({"role": "user", "content": line})
        told = ask(http, CHAT, messages=messages, max_tokens=5, temperature=0)["choices"][0]["message"]["content"]
        answers.append(told)
        messages.append({"role": "assistant", "content": told})
    options = ["--url", url, "--system", "be", "--max-tokens", "5", "--temperature", "0"]
    assert typed("Hello\n\nAnd?\n", *options) == 0
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in answers)


def test_a_refusal_is_told(http, url, typed, capsys):
    assert typed("x\n", "--url", url, "--temperature", "9") == 1
    assert "400" in capsys.readouterr().err
