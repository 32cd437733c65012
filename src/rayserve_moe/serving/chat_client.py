"""Command `rayserve-moe chat`: a conversation with a server in a terminal."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, TextIO

FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)")
    parser.add_argument("--api-key", default="", help="key of a server with authentication")
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--max-tokens", type=int, help="maximum tokens per answer (default: the rest of the context)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Chat until the input ends; return 1 if the server cannot be reached."""
    return converse(options, sys.stdin, output=sys.stdout)


def converse(options: argparse.Namespace, lines: TextIO, *, output: TextIO) -> int:
    """Answer every line of the input, with all previous lines as context."""
    messages = [{"role": "system", "content": options.system}] if options.system else []
    for line in lines:
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.strip()})
        spoken = []
        try:
            for piece in answer_pieces(options, messages):
                spoken.append(piece)
                output.write(piece)
                output.flush()
        except (urllib.error.URLError, TimeoutError) as error:
            sys.stderr.write(f"rayserve-moe chat: {_message_of(error)}\n")
            return FAILED
        output.write("\n")
        messages.append({"role": "assistant", "content": "".join(spoken)})
    return 0


def answer_pieces(options: argparse.Namespace, messages: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the text of an answer as it arrives."""
    body: dict[str, Any] = {"messages": messages, "stream": True, "temperature": options.temperature}
    if options.max_tokens is not None:
        body["max_tokens"] = options.max_tokens
    headers = {"Content-Type": "application/json"}
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"
    url = f"{options.url.rstrip('/')}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            event = line.decode().strip().removeprefix("data: ")
            if event and event != "[DONE]":
                yield from _texts(json.loads(event))


def _texts(event: dict[str, Any]) -> Iterator[str]:
    if "error" in event:
        raise urllib.error.URLError(event["error"]["message"])
    for choice in event["choices"]:
        yield choice["delta"].get("content") or ""


def _message_of(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"{error.code}: {error.read().decode(errors='replace')}"
    return str(error)
