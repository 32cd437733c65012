"""Run Tinker's clients against a full server and a replaced one, and cancel a sample."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayserve_moe import Engine
from rayserve_moe.engine.admission import Capacity
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from tests.clients.test_apart import SCRIPTS, TINKER, program_of, run
from tests.http.conftest import assert_idle
from tests.support.engine.step_gate import unhurried
from tests.support.serving.http_client import wait_until
from tests.support.serving.http_server import running

pytestmark = pytest.mark.skipif(
    not any(program_of(name, "python").exists() for name in TINKER), reason="`make clients` installs them"
)
FULL, ORDERED, LOST, CANCELLED = ("asample", 429), ("asample", 200), ("retrieve_future", 410), ("cancel_future", 200)


class ReplacedApp:
    """An application that `replace` swaps for another one. Requests in progress are lost."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.asked: list[str] = []
        """Last part of the path of each request."""
        self.answered: list[tuple[str, int]] = []
        """Last part of the path, and status, of each answered request."""
        self._tasks: dict[asyncio.Task[None], asyncio.AbstractEventLoop] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path"].rpartition("/")[2]

        async def recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.answered.append((name, message["status"]))
            await send(message)

        self.asked.append(name)
        loop = asyncio.get_running_loop()
        task = loop.create_task(self.app(scope, receive, recorded))  # type: ignore[arg-type]
        self._tasks[task] = loop
        try:
            await asyncio.wait([task])
        finally:
            del self._tasks[task]
        if not task.cancelled():
            task.result()  # without a message, the server closes the connection

    def replace(self, app: ASGIApp) -> None:
        """Swap the application, and cancel the requests in progress."""
        self.app = app
        for task, loop in list(self._tasks.items()):
            loop.call_soon_threadsafe(task.cancel)


def new_app(engine: Engine) -> ASGIApp:
    return create_api(ApiState(engine.loop, engine.tokenizer))


@pytest.mark.parametrize("name", TINKER)
def test_tinker_waits_for_places_orders_lost_samples_again_and_cancels(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sampling = {"max_new_tokens": 40, "sampling_seed": 3, "temperature": 1.0}
    wanted = engine.generate(input_ids=[10, 11, 12, 13], n=2, **sampling)
    app, cancel, end = ReplacedApp(new_app(engine)), tmp_path / "cancel", tmp_path / "end"
    environment = {"TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0"}
    with running(app) as url, ThreadPoolExecutor(1) as pool, unhurried(engine.loop):
        with monkeypatch.context() as full:
            full.setattr(engine.loop, "capacity", Capacity((None,), 1))
            script = (str(SCRIPTS / "ask_tinker_faults.py"), url, "m", str(cancel), str(end))
            told = pool.submit(run, name, "python", *script, **environment)
            wait_until(lambda: FULL in app.answered or told.done())
        wait_until(lambda: "retrieve_future" in app.asked or told.done())
        assert app.answered.count(ORDERED) == 1
        app.replace(new_app(engine))
        wait_until(lambda: app.answered.count(ORDERED) == 3 or told.done())
        assert not told.done(), told.result()
        assert LOST in app.answered
        cancel.touch()
        if name == TINKER[0]:  # the last client that trainers pin has no such call
            wait_until(lambda: CANCELLED in app.answered)
            wait_until(lambda: engine.loop.statistics()["requests_live"] == 0)
        end.touch()
        assert json.loads(told.result()) == [answer["output_ids"] for answer in wanted]
    wait_until(lambda: engine.loop.statistics()["requests_live"] == 0)
    assert_idle(engine)
