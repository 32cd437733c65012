"""Command `rayserve-moe chat`: a conversation with a server in a terminal.

> 37 + 45           asks, with all previous lines as context; Ctrl-C ends the answer
> /help             lists the commands
> (Ctrl-D)          ends, as Ctrl-C and /exit do
"""

from __future__ import annotations

import argparse
import http.client
import importlib
import importlib.util
import json
import re
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rayserve_moe.config.load import environment_setting
from rayserve_moe.config.server_address import DEFAULT_URL, no_server, server_url, untrusted

FAILED = 1
PROMPT = "> "
HELP = """\
/clear  forget the conversation
/exit   end; so do Ctrl-D, and Ctrl-C at the prompt
/help   show this help
Ctrl-C  while an answer comes: end it"""
_COMMAND = re.compile(r"/[a-z]+")
_CONNECT_TIMEOUT_S = 30.0
_UNREACHABLE = (OSError, http.client.HTTPException)


class ServerFailed(Exception):
    """Error for a server that cannot be reached or rejects a request; the message is a sentence."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("--url", default=DEFAULT_URL, help="URL of the server (default: %(default)s)")
    parser.add_argument("--api-key", default="", help="key of a server with authentication, or RAYSERVE_MOE_API_KEY")
    parser.add_argument("--model", default="", help="model to ask (default: the server's first)")
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--max-tokens", type=int, help="maximum tokens per answer (default: the rest of the context)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Chat until the input ends; return 1 if the server cannot be reached or rejects a piped line."""
    options.url = server_url(options.url)
    options.api_key = options.api_key or environment_setting("api_key")
    try:
        options.model = _model_of(options)
        if sys.stdin.isatty():
            return converse(options, _typed_lines, output=sys.stdout)
        return answer_all(options, sys.stdin, output=sys.stdout)
    except ServerFailed as error:
        sys.stderr.write(f"rayserve-moe chat: {error}\n")
        return FAILED


def converse(options: argparse.Namespace, read_line: Callable[[str], str], *, output: TextIO) -> int:
    """Prompt for lines, and answer them, until the user ends the conversation."""
    output.write(f"{options.model} at {options.url}. /help lists the commands.\n")
    messages = _first_messages(options)
    while True:
        try:
            line = read_line(PROMPT).strip()
        except (EOFError, KeyboardInterrupt):
            output.write("\n")
            return 0
        if line == "/exit":
            return 0
        if line == "/clear":
            messages = _first_messages(options)
            output.write("the conversation is forgotten\n")
        elif _COMMAND.fullmatch(line):
            output.write(f"{HELP if line == '/help' else f'no command {line}; /help lists them'}\n")
        elif line:
            _answer_typed(options, messages, line=line, output=output)


def answer_all(options: argparse.Namespace, lines: TextIO, *, output: TextIO) -> int:
    """Answer every line of an input that is not a terminal, with all previous lines as context.

    Raises: ServerFailed at the first line without an answer.
    """
    messages = _first_messages(options)
    for line in lines:
        if line.strip():
            messages.append({"role": "user", "content": line.strip()})
            messages.append({"role": "assistant", "content": _write_answer(options, messages, output=output)})
    return 0


def _typed_lines(prompt: str) -> str:
    """Read a line of a terminal, with editing and history if this Python has them."""
    if importlib.util.find_spec("readline") is not None:
        importlib.import_module("readline")
    return input(prompt)


def _first_messages(options: argparse.Namespace) -> list[dict[str, str]]:
    return [{"role": "system", "content": options.system}] if options.system else []


def _answer_typed(options: argparse.Namespace, messages: list[dict[str, str]], *, line: str, output: TextIO) -> None:
    """Answer a line; without a whole answer the conversation stays as it was."""
    asked = [*messages, {"role": "user", "content": line}]
    try:
        answer = _write_answer(options, asked, output=output)
    except KeyboardInterrupt:
        output.write("\n(ended; the line is not part of the conversation)\n")
    except ServerFailed as error:
        output.write(f"{error}\n")
    else:
        messages[:] = [*asked, {"role": "assistant", "content": answer}]


def _write_answer(options: argparse.Namespace, messages: list[dict[str, str]], *, output: TextIO) -> str:
    """Write an answer as it arrives; return it."""
    pieces = []
    for piece in answer_pieces(options, messages):
        pieces.append(piece)
        output.write(piece)
        output.flush()
    output.write("\n")
    return "".join(pieces)


def answer_pieces(options: argparse.Namespace, messages: list[dict[str, str]]) -> Iterator[str]:
    """Yield the text of an answer as it arrives.

    Raises: ServerFailed if there is none, or if it ends with an error.
    """
    body: dict[str, Any] = {"messages": messages, "stream": True, "temperature": options.temperature}
    body |= {"model": options.model} | ({} if options.max_tokens is None else {"max_tokens": options.max_tokens})
    try:
        with _open(options, "/v1/chat/completions", body=body) as answer:
            for line in answer:
                event = line.decode().strip().removeprefix("data: ")
                if event.startswith("{"):
                    yield from _texts(json.loads(event))
    except _UNREACHABLE as error:
        raise ServerFailed(_message_of(error, options.url)) from error


def _model_of(options: argparse.Namespace) -> str:
    """Return the model to ask, after a first call that shows whether the server can be reached."""
    try:
        with _open(options, "/v1/models", timeout_s=_CONNECT_TIMEOUT_S) as answer:
            names = [model["id"] for model in json.load(answer)["data"]]
    except _UNREACHABLE as error:
        raise ServerFailed(_message_of(error, options.url)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ServerFailed(f"{options.url} is not an OpenAI-compatible server: /v1/models has no models") from error
    return options.model or (names[0] if names else "")


def _open(
    options: argparse.Namespace, path: str, *, body: dict[str, Any] | None = None, timeout_s: float | None = None
) -> http.client.HTTPResponse:
    headers = {"Content-Type": "application/json"}
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"
    raw = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(options.url + path, raw, headers), timeout=timeout_s)


def _texts(event: dict[str, Any]) -> Iterator[str]:
    if "error" in event:
        raise ServerFailed(event["error"]["message"])
    for choice in event["choices"]:
        yield choice["delta"].get("content") or ""


def _message_of(error: Exception, url: str) -> str:
    if isinstance(error, urllib.error.HTTPError):
        if error.code == http.HTTPStatus.UNAUTHORIZED:
            return "the API key is missing or wrong: give it by --api-key or RAYSERVE_MOE_API_KEY"
        return f"{error.code}: {_reason(error.read())}"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ConnectionRefusedError):
        return no_server(url)
    if isinstance(reason, ssl.SSLCertVerificationError):
        return untrusted(url, reason)
    if isinstance(reason, OSError) and reason.strerror:
        return f"{url}: {reason.strerror.lower()}"
    return f"{url}: {reason or type(reason).__name__}"


def _reason(raw: bytes) -> str:
    """Return the message of an error's body, or the body."""
    try:
        return json.loads(raw)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return " ".join(raw.decode(errors="replace").split())[:500]
