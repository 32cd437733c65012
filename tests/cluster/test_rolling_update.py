"""Three replicas take weights under requests: none is refused, and each answer is that of the versions it names."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.resuming_client import ResumingClient
from tests.cluster.conftest import SETTINGS
from tests.cluster.test_fleet import WITHIN_S, info, process_of, running
from tests.support.cluster.deployed_server import deployed
from tests.support.cluster.ports import free_port
from tests.support.serving.http_client import wait_until
from tests.support.serving.journal_server import KEY, OwnJournal

PORT = free_port()
NUM_REPLICAS = 3
NUM_CLIENTS = 9
PROMPTS = [[5, 6, 7 + number] for number in range(NUM_CLIENTS)]
SAMPLING = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True, "frequency_penalty": 0.5}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def paths(checkpoint: Path, other_checkpoint: Path) -> list[Path]:
    return [checkpoint, other_checkpoint]


@pytest.fixture(scope="module")
def fleet(raylets: int, checkpoint: Path) -> Iterator[httpx.Client]:
    journal = OwnJournal()
    settings = {**SETTINGS, "num_replicas": NUM_REPLICAS, "cpus_per_host": 0.25}
    settings |= {"journal": "on", "journal_address": f"127.0.0.1:{journal.port}", "journal_key": KEY.decode()}
    with deployed(checkpoint, settings, port=PORT) as client:
        wait_until(lambda: is_whole(client), within_s=WITHIN_S)
        yield client
    journal.end()


def is_whole(client: httpx.Client) -> bool:
    return len(running()) == len(info(client).get("replicas", ())) == NUM_REPLICAS


def update(client: httpx.Client, path: Path, *, version: str) -> httpx.Response:
    return client.post("/update_weights_from_disk", json={"model_path": str(path), "weight_version": version})


class Load:
    """Clients that ask one thing after the other, and all that they were answered."""

    def __init__(self) -> None:
        self.client = ResumingClient(f"http://127.0.0.1:{PORT}", within_s=WITHIN_S)
        self.answers: list[tuple[int, dict[str, Any]]] = []
        self._numbers, self._is_over = count(), threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Ask meanwhile; whoever waits for an answer at the end gets it."""
        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            asked = [threads.submit(self._ask, prompt) for prompt in range(NUM_CLIENTS)]
            try:
                yield
            finally:
                self._is_over.set()
        for each in asked:
            each.result()

    def wait_for(self, number: int) -> None:
        """Wait for so many more answers."""
        wanted = len(self.answers) + number
        wait_until(lambda: len(self.answers) >= wanted)

    def _ask(self, prompt: int) -> None:
        while not self._is_over.is_set():
            body = {"input_ids": PROMPTS[prompt], "sampling_params": SAMPLING, "stream": prompt % 2 == 0}
            self.answers.append((prompt, self.client.ask({**body, "rid": f"{id(self)} {next(self._numbers)}"})))


def greedy() -> list[list[int]]:
    """What the weights that serve answer to each prompt."""
    client = ResumingClient(f"http://127.0.0.1:{PORT}", within_s=WITHIN_S)
    bodies = [
        {"input_ids": PROMPTS[prompt], "sampling_params": SAMPLING, "rid": f"greedy {prompt}"}
        for prompt in range(NUM_CLIENTS)
    ]
    return [client.ask(body)["output_ids"] for body in bodies]


def assert_right(load: Load, expected: dict[str, list[list[int]]]) -> set[str]:
    """What was sampled before other weights came is what the first version says; returns all versions seen."""
    seen = set()
    for prompt, answer in load.answers:
        spans = answer["meta_info"]["weight_versions"]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == len(answer["output_ids"]) == SAMPLING["max_new_tokens"]
        first = spans[0]
        assert answer["output_ids"][: first["end"]] == expected[first["version"]][prompt][: first["end"]]
        seen |= {span["version"] for span in spans}
    return seen


def test_no_request_is_refused_and_versions_are_right(fleet: httpx.Client, paths: list[Path]) -> None:
    of_path = []
    for number, path in enumerate(paths):
        assert update(fleet, path, version=f"learn {number}").json()["success"]
        of_path.append(greedy())
    assert of_path[0] != of_path[1]
    names = ["learn 1", *(f"v{number}" for number in range(4))]
    expected = {name: of_path[(number + 1) % 2] for number, name in enumerate(names)}
    load = Load()
    with load.running():
        for number, name in enumerate(names[1:]):
            load.wait_for(2 * NUM_CLIENTS)
            assert update(fleet, paths[number % 2], version=name).json()["success"]
        load.wait_for(2 * NUM_CLIENTS)
    assert load.client.num_cut == 0
    assert assert_right(load, expected) == set(names)


@pytest.mark.parametrize("delay_s", [0.0, 0.1])
def test_a_replica_that_is_killed_half_way_comes_back_with_what_was_decided(
    fleet: httpx.Client, paths: list[Path], delay_s: float
) -> None:
    of_path = []
    for number, path in enumerate(paths):
        assert update(fleet, path, version=f"before {number} {delay_s}").json()["success"]
        of_path.append(greedy())
    before, after = f"before 1 {delay_s}", f"after {delay_s}"
    load, lost, found = Load(), running()[0], None
    with load.running():
        load.wait_for(NUM_CLIENTS)
        killing = threading.Timer(delay_s, os.kill, (process_of(lost), signal.SIGKILL))
        killing.start()
        with suppress(httpx.HTTPError):  # it may be the one that is asked
            found = update(fleet, paths[0], version=after)
        killing.join()
        wait_until(lambda: lost not in running() and is_whole(fleet), within_s=WITHIN_S)
        load.wait_for(2 * NUM_CLIENTS)
    version = fleet.get("/get_weight_version").json()
    assert version["agree"] and version["weight_version"] in (before, after)
    if found is not None and found.status_code == 200:
        assert found.json()["success"] and version["weight_version"] == after
    assert version["weight_version"] in assert_right(load, {before: of_path[1], after: of_path[0]})
