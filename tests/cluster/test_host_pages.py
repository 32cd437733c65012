"""Workers, hosts and replicas are killed at random moments while pages move to host memory and back.

Each session has two turns, and its pages are evicted between them. Ids, log-probs and rows equal those of undisturbed
turns, with native kernels, for one family of every state kind. Each test kills four times.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.cluster_utils import Cluster

from benchmarks.kill_nodes import NUM_CPUS, kill_raylet
from benchmarks.resuming_client import ResumingClient
from rayserve_moe import extract_routed_experts_from_meta_info
from rayserve_moe.cluster.replica_engine import ReplicaEngine, start_replica_engine
from rayserve_moe.config.load import settings_from
from rayserve_moe.engine.extension import extension_of
from rayserve_moe.engine.host_pages import HostedPages
from rayserve_moe.inprocess.running import run_to_end
from tests.cluster.conftest import SETTINGS
from tests.cluster.test_fleet import is_whole, process_of, running
from tests.cluster.test_rebuild import MANY, pids
from tests.support.cluster.deployed_server import deployed
from tests.support.cluster.ports import free_port
from tests.support.engine.workload import draw_prompt, request_for
from tests.support.kernels.native_kernels import need_native_kernels
from tests.support.models.families import family_case, write_family
from tests.support.serving.http_client import wait_until
from tests.support.serving.journal_server import KEY, OwnJournal

pytestmark = pytest.mark.slow
KINDS = ("qwen3_moe-0", "deepseek_v3-0", "gpt_oss-0", "deepseek_v32-0", "qwen3_5_moe_text-0")
"""Keys and values, latents, windows, index keys, recurrent states."""
NUM_SESSIONS, PROMPT, ANSWER, MORE, KILLS = 6, 150, 24, 20, 4
PORT = free_port()
WITHIN_S = 600.0
HOSTED: dict[str, Any] = {
    **SETTINGS,
    "dtype": "bfloat16",
    "cpu_kernels": "native",
    "host_cache_mib": 32,
    "num_pages": 45,  # for three sessions
    "cpus_per_host": 0.25,
}
Answer = tuple[list[int], list[float], list[Any]]
"""Ids, log-probs and rows of an answer."""
Ask = Callable[[list[list[int]], int], list[Answer]]


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_native_kernels()
    case = family_case(request.param)
    return write_family(case, tmp_path_factory.mktemp(case.name) / "model", seed=5, dtype="bfloat16")


def two_turns(ask: Ask) -> list[Answer]:
    """Return the answers of the first turn of all sessions, then of the second."""
    draw = np.random.default_rng(4)
    prompts = [draw_prompt(draw, PROMPT).tolist() for _ in range(NUM_SESSIONS)]
    first = ask(prompts, 0)
    answered = zip(prompts, first, strict=True)
    return [*first, *ask([[*prompt, *ids, *draw_prompt(draw, MORE).tolist()] for prompt, (ids, *_) in answered], 1)]


def sampling_of(number: int, turn: int) -> dict[str, Any]:
    """Return the sampling parameters of a turn. Sessions with even numbers are greedy."""
    return {"max_new_tokens": ANSWER, "temperature": float(number % 2), "ignore_eos": True, "seed": 10 * turn + number}


def turns_of(engine: ReplicaEngine) -> list[Answer]:
    """Return the answers of an engine; its cache is empty before and after."""

    def ask(prompts: list[list[int]], turn: int) -> list[Answer]:
        requests = [
            request_for(prompt, f"{turn} {number}", **sampling_of(number, turn))
            for number, prompt in enumerate(prompts)
        ]
        found = run_to_end(engine.loop, engine.tokenizer, requests=requests, shows_progress=False)
        results = [one.results[0] for one in found]
        assert all(one.routing is not None for one in results)
        return [(list(one.token_ids), list(one.logprobs), one.routing.rows.tolist()) for one in results if one.routing]

    found = two_turns(ask)
    engine.loop.check_integrity()
    assert engine.loop.control.flush().result(WITHIN_S)
    return found


def check_kills(engine: ReplicaEngine, victim: Callable[[], Callable[[], object]]) -> None:
    """Kill a process of `victim` at a random step, KILLS times. Every page that is found in host memory is restored."""
    hosted = extension_of(engine.loop._cycle.extensions, HostedPages)
    assert hosted is not None
    for host in hosted.hosts:
        host.pays = lambda _: True
    before = engine.loop.statistics()
    expected = turns_of(engine)
    undisturbed = engine.loop.statistics()
    assert undisturbed["host_pages_restored"] > before["host_pages_restored"], "no page came back"
    num_steps = undisturbed["steps"] - before["steps"]
    for _ in range(KILLS):
        begun = engine.loop.statistics()
        kill, at = victim(), begun["steps"] + random.randrange(int(0.9 * num_steps))
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(turns_of, engine)
            while engine.loop.statistics()["steps"] < at:
                assert not found.done(), found.exception()
                time.sleep(0.0005)
            kill()
            assert found.result(WITHIN_S) == expected, f"killed at step {at - begun['steps']} of {num_steps}"
        wait_until(lambda begun=begun: engine.loop.statistics()["rebuilds"] > begun["rebuilds"], within_s=WITHIN_S)


def started(checkpoint: Path, **changes: object) -> ReplicaEngine:
    return start_replica_engine(settings_from({"model_path": str(checkpoint), **HOSTED, **MANY, **changes}))


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_killed_workers_cost_pages_only(raylets: int, checkpoint: Path, num_hosts: int):
    engine = started(checkpoint, num_hosts=num_hosts, devices_per_host=1)

    def victim() -> Callable[[], object]:
        return partial(os.kill, random.choice(pids(engine)), signal.SIGKILL)

    try:
        check_kills(engine, victim)
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def hosts(cluster: Cluster) -> Iterator[Cluster]:
    """Add three nodes to the cluster: two for hosts, and a spare."""
    others = set(cluster.worker_nodes)
    for _ in range(3):
        cluster.add_node(num_cpus=NUM_CPUS)
    cluster.wait_for_nodes()
    yield cluster
    for node in set(cluster.worker_nodes) - others:
        cluster.remove_node(node, allow_graceful=False)


def test_killed_hosts_cost_pages_only(hosts: Cluster, checkpoint: Path):
    engine = started(checkpoint, num_hosts=2, devices_per_host=1, cpus_per_host=NUM_CPUS)

    def victim() -> Callable[[], object]:
        hosts.wait_for_nodes()
        kill_node = kill_raylet(hosts, engine)

        def kill() -> None:
            kill_node()
            hosts.add_node(num_cpus=NUM_CPUS)

        return kill

    try:
        check_kills(engine, victim)
    finally:
        engine.shutdown()


@pytest.fixture
def journal() -> Iterator[OwnJournal]:
    journal = OwnJournal()
    yield journal
    journal.end()


def test_killed_replicas_lose_no_request(raylets: int, checkpoint: Path, journal: OwnJournal):
    settings = {**HOSTED, "num_replicas": 2, "journal": "on"}
    settings |= {"journal_address": f"127.0.0.1:{journal.port}", "journal_key": KEY.decode()}
    with deployed(checkpoint, settings, port=PORT) as fleet, ThreadPoolExecutor(NUM_SESSIONS) as threads:
        wait_until(lambda: is_whole(fleet), within_s=WITHIN_S)
        client, rounds = ResumingClient(f"http://127.0.0.1:{PORT}", within_s=WITHIN_S), count()

        def play() -> list[Answer]:
            name = next(rounds)

            def one(number: int, prompt: list[int], turn: int) -> Answer:
                sampling = sampling_of(number, turn)
                seed = sampling.pop("seed")
                body = {
                    "input_ids": prompt,
                    "sampling_params": {**sampling, "sampling_seed": seed},
                    "rid": f"{name} {turn} {number}",
                    "stream": number % 2 == 0,
                    "return_logprob": True,
                    "return_routed_experts": True,
                }
                answer = client.ask(body)
                logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
                return answer["output_ids"], logprobs, extract_routed_experts_from_meta_info(answer).tolist()

            def ask(prompts: list[list[int]], turn: int) -> list[Answer]:
                return list(threads.map(one, range(NUM_SESSIONS), prompts, [turn] * NUM_SESSIONS))

            return two_turns(ask)

        def flush() -> None:
            assert fleet.post("/flush_cache").status_code == 200

        play()
        flush()
        began = time.monotonic()
        expected = play()
        run_s = time.monotonic() - began
        for _ in range(KILLS):
            flush()
            lost = random.choice(running())
            killing = threading.Timer(random.uniform(0, 0.8 * run_s), os.kill, (process_of(lost), signal.SIGKILL))
            killing.start()
            assert play() == expected
            killing.join()
            wait_until(lambda lost=lost: len(running()) == 2 and lost not in running(), within_s=WITHIN_S)
            wait_until(lambda: is_whole(fleet), within_s=WITHIN_S)
