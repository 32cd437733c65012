"""`rayserve-moe bench` against real servers, and against one that answers wrongly."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from aiohttp import web

from rayserve_moe.cli import main
from tests.http.conftest import served

LENGTHS = ("--random-input-len", "6", "--random-output-len", "4")


@pytest.fixture
def bench(capsys):
    """Call the command with JSON output; returns the exit status, the result and what it wrote besides."""

    def run(url, *options):
        status = main(["bench", "--url", url, "--json", "--disable-tqdm", *options])
        said = capsys.readouterr()
        return status, json.loads(said.out) if said.out else {}, said.err

    return run


@pytest.mark.parametrize("options", [["--max-concurrency", "2"], ["--request-rate", "200"], []])
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_every_request_is_counted_with_its_tokens(http, url, bench, backend, options):
    status, result, _ = bench(url, "--num-prompts", "6", "--backend", backend, *LENGTHS, *options)
    assert status == 0 and (result["completed"], result["failed"], result["model_id"]) == (6, 0, "tiny")
    assert result["total_output_tokens"] == 6 * 4
    assert result["total_input_tokens"] == 6 * 6 or backend == "openai-chat"
    assert 1 <= result["max_concurrent_requests"] <= (2 if "--max-concurrency" in options else 6)
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert 0 <= result[f"p50_{metric}_ms"] <= result[f"p99_{metric}_ms"]
    assert result["p99_ttft_ms"] <= result["p99_e2el_ms"]


def test_a_file_of_prompts_and_the_files_of_a_result(http, url, bench, tmp_path):
    prompts, plot = tmp_path / "prompts.jsonl", tmp_path / "chart.svg"
    prompts.write_text('{"prompt": "Hello", "output_tokens": 2}\n{"prompt": "And?", "output_tokens": 3}\n')
    saved = ("--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "result.json", "--plot", str(plot))
    status, result, said = bench(url, "--dataset-path", str(prompts), "--num-prompts", "4", "--ignore-eos", *saved)
    assert status == 0 and result["total_output_tokens"] == 10
    detailed = json.loads((tmp_path / "result.json").read_text())
    assert sorted(detailed["output_lens"]) == [2, 2, 3, 3] and len(detailed["ttfts"]) == 4
    assert {name: detailed[name] for name in result} == result
    assert plot.read_text().startswith("<svg") and f"chart: {plot}" in said


def test_a_key_is_asked_for_and_given(engine, bench):
    with served(engine, api_key="secret") as url:
        status, result, said = bench(url, "--num-prompts", "1", *LENGTHS)
        assert status == 1 and not result and "API key is missing or wrong" in said
        assert bench(url, "--num-prompts", "1", "--api-key", "secret", *LENGTHS)[0] == 0


def test_a_refused_first_request_ends_the_run(http, url, bench):
    status, result, said = bench(url, "--num-prompts", "3", "--temperature", "9", *LENGTHS)
    assert (
        status == 1
        and not result
        and "the first request failed: HTTP 400: `temperature` should be less than or equal to 2" in said
    )


EVENT = b'data: {"choices": [{"text": "x", "finish_reason": null}]}\n\n'
ANSWERS = {
    "complete": [EVENT, EVENT, b"data: [DONE]\n\n"],
    "incomplete": [EVENT, EVENT],
    "empty": [b"data: [DONE]\n\n"],
    "error event overloaded": [EVENT, b'data: {"error": {"message": "full", "code": "overloaded"}}\n\n'],
}


class WrongServer:
    """A server that answers each request in another way, in turn, and 429 at the end."""

    def __init__(self) -> None:
        self._left = list(ANSWERS.values())
        self._loop, self._ready = asyncio.new_event_loop(), threading.Event()
        self.port = 0
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        app = web.Application()
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        self._ready.set()
        await self._end.wait()
        await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "wrong"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if not self._left:
            return web.json_response({"error": {"message": "too many"}}, status=429)
        answer = web.StreamResponse()
        await answer.prepare(request)
        for event in self._left.pop(0):
            await answer.write(event)
        return answer

    def __enter__(self) -> str:
        self._thread.start()
        assert self._ready.wait(60)
        return f"http://127.0.0.1:{self.port}"

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()


def test_failures_are_counted_by_kind(bench):
    options = ("--num-prompts", "5", "--num-warmups", "0", "--max-concurrency", "1", "--vocab-size", "9", *LENGTHS)
    with WrongServer() as url:
        status, result, _ = bench(url, *options)
    assert status == 1 and (result["completed"], result["failed"]) == (1, 4)
    kinds = ["incomplete", "empty", "error event overloaded", "HTTP 429"]
    assert result["errors_by_kind"] == dict.fromkeys(kinds, 1)
    assert result["error_examples"]["HTTP 429"] == "too many" and result["total_output_tokens"] == 2


def test_a_server_without_a_vocabulary_needs_one(bench):
    with WrongServer() as url:
        status, _, said = bench(url, "--num-prompts", "1", *LENGTHS)
    assert status == 1 and "give --vocab-size" in said


def test_a_server_that_is_not_there_is_told(bench):
    with WrongServer() as url:
        pass
    status, _, said = bench(url, "--num-prompts", "1")
    assert status == 1 and f"no server at {url}: start one with" in said
