"""A real server over a real engine, and the road to it, which may be bad."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayserve_moe import Engine
from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from tests.support.engine.host_runners import shared_by_many
from tests.support.engine.shared_settings import SERVED, write_served
from tests.support.serving.http_server import KEY, running

PROMPTS = [
    *({"id": f"text {i}", "text": f"{i}+{i}="} for i in range(4)),
    *({"id": f"ids {i}", "input_ids": list(range(5, 40 + i))} for i in range(4)),
    {"id": "few", "input_ids": [7, 8, 9], "sampling_params": {"max_new_tokens": 1}},
    {"id": "own", "input_ids": [7, 8, 9], "sampling_params": {"sampling_seed": 5, "temperature": 0.5}},
    {"id": "not before", "input_ids": [7, 8, 9], "sampling_params": {"min_new_tokens": 3, "no_stop_trim": True}},
]

Road = Callable[[int, dict[str, Any], list[Message]], list[Message] | None]
"""Given the number of a request to `/generate`, its body and its answer: what arrives of it, None for a broken
connection."""


class UnreliableRoad:
    """ASGI wrapper that lets everything through, but for what `road` makes of answers to `/generate`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self.num_asked, self.num_prompts = app, 0, 0
        self.road: Road | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/generate":
            await self._app(scope, receive, send)
            return
        number, self.num_asked = self.num_asked, self.num_asked + 1
        messages: list[Message] = []
        asked = bytearray()

        async def note() -> Message:
            message = await receive()
            asked.extend(message.get("body", b""))
            return message

        async def keep(message: Message) -> None:
            messages.append(message)

        await self._app(scope, note, keep)
        body = json.loads(asked)
        self.num_prompts += len(prompts_in(body))
        arriving = messages if self.road is None else self.road(number, body, messages)
        for message in arriving or ():
            await send(message)


def prompts_in(body: dict[str, Any]) -> list[list[int]]:
    """The prompts that a request asks for: one, or several."""
    ids = body["input_ids"]
    return ids if isinstance(ids[0], list) else [ids]


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served(tmp_path_factory.mktemp("rollouts") / "tiny")


@pytest.fixture(scope="package")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with shared_by_many():
        engine = Engine(str(checkpoint), **SERVED)
    with engine:
        yield engine


@pytest.fixture(scope="package")
def server(engine: Engine) -> Iterator[tuple[str, UnreliableRoad]]:
    road = UnreliableRoad(create_api(ApiState(engine.loop, engine.tokenizer, ServerSettings(api_key=KEY))))
    with running(road) as url:
        yield url, road


@pytest.fixture
def road(server: tuple[str, UnreliableRoad]) -> Iterator[UnreliableRoad]:
    """The road, as good as new again after the test."""
    server[1].num_asked = server[1].num_prompts = 0
    yield server[1]
    server[1].road = None


@pytest.fixture
def url(server: tuple[str, UnreliableRoad], monkeypatch: pytest.MonkeyPatch) -> str:
    """The server's address; its key is in the environment."""
    monkeypatch.setenv("RAYSERVE_MOE_API_KEY", KEY)
    return server[0]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS), encoding="utf-8")
    return file
