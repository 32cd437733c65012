"""`rayserve-moe chat` against a real server."""

from __future__ import annotations

import io
import socket
import sys

import pytest

from rayserve_moe.cli import main
from tests.http.conftest import served
from tests.support.serving.http_client import CHAT, ask


@pytest.fixture
def typed(monkeypatch):
    """Call the command with an input that is not a terminal."""

    def run(text, *options):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return main(["chat", *options])

    return run


class Terminal(io.StringIO):
    """Standard input that is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def talk(monkeypatch):
    """Call the command at a terminal; lines are typed in turn, and exceptions among them are raised at the prompt."""

    def run(*lines, options=()):
        def read_line(prompt):
            line = next(left, EOFError())
            sys.stdout.write(prompt if isinstance(line, BaseException) else f"{prompt}{line}\n")
            if isinstance(line, BaseException):
                raise line
            return line

        left = iter(lines)
        monkeypatch.setattr("sys.stdin", Terminal())
        monkeypatch.setattr("builtins.input", read_line)
        return main(["chat", *options])

    return run


def answers_of(http, *lines, system):
    messages, answers = [{"role": "system", "content": system}], []
    for line in lines:
        messages.append({"role": "user", "content": line})
        answer = ask(http, CHAT, messages=messages, max_tokens=5, temperature=0)["choices"][0]["message"]["content"]
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer})
    return answers


GREEDY = ("--system", "be", "--max-tokens", "5", "--temperature", "0")


def test_each_line_is_answered_with_all_before_it(http, url, typed, capsys):
    answers = answers_of(http, "Hello", "And?", system="be")
    assert typed("Hello\n\nAnd?\n", "--url", url, *GREEDY) == 0
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in answers)


def test_a_conversation_has_a_greeting_prompts_and_commands(http, url, talk, capsys):
    first, second = answers_of(http, "Hello", "And?", system="be")
    (alone,) = answers_of(http, "And?", system="be")
    lines = ("Hello", "", "And?", "/help", "/no", "/clear", "And?", "/exit", "never read")
    assert talk(*lines, options=("--url", url, *GREEDY)) == 0
    greeting, *rest = capsys.readouterr().out.splitlines()
    assert greeting == f"tiny at {url}. /help lists the commands."
    said = "\n".join(rest)
    assert said.startswith(f"> Hello\n{first}\n> \n> And?\n{second}\n> /help\n/clear ")
    assert "> /no\nno command /no; /help lists them\n> /clear\n" in said
    assert said.endswith(f"> And?\n{alone}\n> /exit")


@pytest.mark.parametrize("end", [EOFError(), KeyboardInterrupt()])
def test_the_end_of_the_input_is_a_clean_end(url, talk, capsys, end):
    assert talk(end, options=("--url", url)) == 0
    said = capsys.readouterr()
    assert said.out.endswith("> \n") and not said.err


def test_an_interrupted_answer_leaves_the_conversation_as_it_was(http, url, talk, monkeypatch):
    (alone,) = answers_of(http, "And?", system="be")
    calls = []

    class Once:
        """Output that is interrupted at the first piece of the first answer."""

        def __init__(self, output):
            self.output = output

        def write(self, text):
            self.output.write(text)

        def flush(self):
            calls.append(None)
            if len(calls) == 1:
                raise KeyboardInterrupt

    stdout = io.StringIO()
    monkeypatch.setattr("sys.stdout", Once(stdout))
    assert talk("Hello", "And?", options=("--url", url, *GREEDY)) == 0
    said = stdout.getvalue()
    assert "(ended; the line is not part of the conversation)\n> " in said and said.endswith(f"{alone}\n> \n")


def test_a_refusal_is_told(http, url, typed, talk, capsys):
    assert typed("x\n", "--url", url, "--temperature", "9") == 1
    assert "400" in capsys.readouterr().err
    assert talk("x", options=("--url", url, "--temperature", "9")) == 0
    assert "> x\n400: " in capsys.readouterr().out


def test_a_server_that_is_not_there_is_told_at_once(talk, capsys):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    assert talk("never read", options=("--url", f":{port}")) == 1
    said = capsys.readouterr()
    wanted = f"no server at http://127.0.0.1:{port}: start one with `rayserve-moe serve trained:calculator`"
    assert wanted in said.err and not said.out


@pytest.mark.parametrize("url", ["ftp://x", "http://", ":many", "http://x:0"])
def test_what_is_no_address_is_wrong_use(talk, capsys, url):
    assert talk(options=("--url", url)) == 2
    assert f"--url {url}: not the address of a server" in capsys.readouterr().err


def test_a_key_is_asked_for_and_taken_from_an_option_or_the_environment(engine, talk, capsys, monkeypatch):
    with served(engine, api_key="secret") as url:
        assert talk(options=("--url", url)) == 1
        assert "API key is missing or wrong" in capsys.readouterr().err
        assert talk(options=("--url", url, "--api-key", "secret")) == 0
        monkeypatch.setenv("RAYSERVE_MOE_API_KEY", "secret")
        assert talk(options=("--url", url)) == 0
