"""Adapters on two hosts, merged or beside the weights: hosts that are killed meanwhile or later change no answer."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from benchmarks.resuming_client import ResumingClient
from rayserve_moe import Engine
from rayserve_moe.checkpoints.adapters.directory import NO_ADAPTER, adapter_body
from rayserve_moe.checkpoints.bucket import SentAdapter, read_bucket
from rayserve_moe.cluster.replica_engine import ReplicaEngine, start_replica_engine
from rayserve_moe.config.load import settings_from
from rayserve_moe.engine.adapters import UnknownAdapterError
from rayserve_moe.engine.updates.adapters import LOST_WHILE_LOADING, adapter_order
from rayserve_moe.engine.updates.orders import WeightOutcome
from rayserve_moe.observability.fault_points import arm, disarm
from rayserve_moe.requests.results import ChoiceResult
from tests.cluster.conftest import SETTINGS
from tests.cluster.test_fleet import process_of, running
from tests.cluster.test_hosts import PROMPTS, assert_same, complete
from tests.cluster.test_rebuild import MANY, TIMEOUT_S, answers_under, pids
from tests.support.checkpoints.adapters import MadeAdapter, make_adapter, make_adapter_beside
from tests.support.cluster.deployed_server import deployed
from tests.support.cluster.ports import free_port
from tests.support.experts.placements import random_placement
from tests.support.serving.http_client import wait_until
from tests.support.serving.journal_server import KEY, OwnJournal

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(checkpoint: Path) -> MadeAdapter:
    return make_adapter(checkpoint, "shared_outer")


@pytest.fixture(scope="module")
def expected(
    checkpoint: Path, made: MadeAdapter, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[ChoiceResult], list[ChoiceResult]]:
    """Answers of one process with the base checkpoint, then with the merged checkpoint."""
    merged = made.write_merged(checkpoint, tmp_path_factory.mktemp("merged") / "model")
    with Engine(str(checkpoint), **SETTINGS) as engine:
        base = complete(engine.loop, engine.tokenizer)
        assert engine.update_weights_from_disk(merged, weight_version="0").success
        return base, complete(engine.loop, engine.tokenizer)


@pytest.fixture
def replica(raylets: int, checkpoint: Path) -> Iterator[ReplicaEngine]:
    engine = start_replica_engine(settings_from({"model_path": str(checkpoint), "num_hosts": 2, **SETTINGS, **MANY}))
    yield engine
    disarm()
    engine.shutdown()


def load(replica: ReplicaEngine, body: bytes | bytearray, name: str) -> WeightOutcome:
    order = adapter_order(name, weight_version="0")
    return replica.loop.control.tensors.stage(read_bucket(body), order).result(TIMEOUT_S)


def test_an_adapter_outlives_its_hosts_and_its_directory(
    replica: ReplicaEngine, made: MadeAdapter, expected: tuple[list, list], tmp_path: Path
) -> None:
    base, merged = expected
    directory = made.write(tmp_path / "adapter")
    body = adapter_body(str(directory))
    victims = pids(replica)
    arm("merging", lambda _: os.kill(victims[-1], signal.SIGKILL))
    outcome = load(replica, body, "a")
    assert not outcome.success and "a host was lost" in outcome.message
    assert replica.loop.control.adapter == ""
    assert_same(complete(replica.loop, replica.tokenizer), base)
    outcome = load(replica, body, "a")
    assert outcome.success and outcome.max_rounding, outcome.message
    assert_same(complete(replica.loop, replica.tokenizer), merged)
    shutil.rmtree(directory)
    victims = pids(replica)
    assert_same(answers_under(replica, lambda: os.kill(victims[0], signal.SIGKILL)), merged)
    assert victims[0] not in pids(replica)
    assert load(replica, NO_ADAPTER, "").success
    assert replica.loop.control.adapter == ""
    assert_same(complete(replica.loop, replica.tokenizer), base)


BESIDE = {"max_loras": 2, "max_lora_rank": 4}
NAMES = ("x", "", "y")
ASK = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}}


def test_adapters_beside_the_weights_are_given_to_the_hosts_that_replace_others(
    raylets: int, checkpoint: Path, tmp_path: Path
) -> None:
    paths = {
        name: make_adapter_beside(checkpoint, seed=seed).write(tmp_path / name) for seed, name in enumerate(("x", "y"))
    }
    with Engine(str(checkpoint), **SETTINGS, **BESIDE) as engine:
        for name, path in paths.items():
            assert engine.load_lora_adapter(path, lora_name=name).success
        expected = complete(engine.loop, engine.tokenizer, adapters=NAMES)
    given = {"model_path": str(checkpoint), "num_hosts": 2, **SETTINGS, **MANY, **BESIDE}
    replica = start_replica_engine(settings_from(given))
    try:
        loads = replica.loop.control.adapters
        assert loads is not None
        adapters = {name: read_bucket(adapter_body(str(path))) for name, path in paths.items()}
        for name, adapter in adapters.items():
            outcome = hold(replica, name, adapter)
            assert outcome.success, outcome.message
            shutil.rmtree(paths[name])
        assert_same(complete(replica.loop, replica.tokenizer, adapters=NAMES), expected)
        victims = pids(replica)
        found = answers_under(replica, lambda: os.kill(victims[-1], signal.SIGKILL), adapters=NAMES)
        assert_same(found, expected)
        assert not set(pids(replica)) & set(victims)
        arm("sending adapter", lambda _: os.kill(pids(replica)[0], signal.SIGKILL))
        outcome = hold(replica, "z", adapters["y"])
        assert not outcome.success and outcome.message == LOST_WHILE_LOADING
        with pytest.raises(UnknownAdapterError):
            complete(replica.loop, replica.tokenizer, adapters=("z",))
        assert_same(complete(replica.loop, replica.tokenizer, adapters=NAMES), expected)
        victims = pids(replica)
        arm("sending adapter", lambda _: os.kill(pids(replica)[-1], signal.SIGKILL))  # while it is given to new hosts
        found = answers_under(replica, lambda: os.kill(victims[0], signal.SIGKILL), adapters=NAMES)
        assert_same(found, expected)
        assert hold(replica, "y", adapters["x"]).success
        again = complete(replica.loop, replica.tokenizer, adapters=("x", "", "x"))
        assert_same(complete(replica.loop, replica.tokenizer, adapters=NAMES), again)
        assert loads.table.current["y"].partition("@")[2] == loads.table.current["x"].partition("@")[2]
    finally:
        disarm()
        replica.shutdown()


MOVES = {
    "enable_eplb": True,
    "num_redundant_experts": 4,
    "eplb_slots_per_step": 1,
    "eplb_interval": 1_000_000,
    "expert_backend": "all_to_all",
    "data_parallel_size": 2,
}
LAYOUTS = {False: ("fused", "per_expert"), True: ("shared_outer", "shared_outer")}


@pytest.mark.parametrize("shares", [False, True])
def test_experts_move_between_hosts_while_their_adapters_answer(
    raylets: int, checkpoint: Path, tmp_path: Path, shares: bool
) -> None:
    """No move changes a bit of an answer, and a host that is killed during the moves loses none."""
    experts = {"lora_experts": True, "lora_shared_outer": shares}
    paths = {
        name: make_adapter_beside(checkpoint, seed=seed, experts=layout).write(tmp_path / name)
        for seed, (name, layout) in enumerate(zip(("x", "y"), LAYOUTS[shares], strict=True))
    }
    with Engine(str(checkpoint), **SETTINGS, **BESIDE, **experts) as engine:
        for name, path in paths.items():
            assert engine.load_lora_adapter(path, lora_name=name).success
        expected = complete(engine.loop, engine.tokenizer, adapters=NAMES)
    given = {"model_path": str(checkpoint), "num_hosts": 2, **SETTINGS, **MANY, **BESIDE, **experts, **MOVES}
    replica = start_replica_engine(settings_from(given))
    try:
        for name, path in paths.items():
            assert hold(replica, name, read_bucket(adapter_body(str(path)))).success
        wanted, eplb = answers_alone(replica), replica.loop.eplb
        assert_same(wanted, expected)
        assert eplb is not None
        start = eplb.migration.placement
        for seed in range(2):
            version, num_answered = eplb.order(random_placement(start, seed=seed)), 0
            while eplb.migration.progress.version < version or not eplb.migration.progress.is_done:
                place = num_answered % len(PROMPTS)
                assert bits_of(answers_alone(replica, [place])) == bits_of(wanted)[place : place + 1]
                num_answered += 1
            assert num_answered, "an answer came during the moves"
            assert bits_of(answers_alone(replica)) == bits_of(wanted)
        assert (eplb.migration.placement.expert_of_slot != start.expert_of_slot).any()
        eplb.order(start)
        victims = pids(replica)
        found = answers_under(replica, lambda: os.kill(victims[-1], signal.SIGKILL), adapters=NAMES)
        assert_same(found, expected)
        assert not set(pids(replica)) & set(victims)
        assert bits_of(answers_alone(replica)) == bits_of(wanted)
    finally:
        replica.shutdown()


def answers_alone(replica: ReplicaEngine, prompts: Sequence[int] = range(len(PROMPTS))) -> list[ChoiceResult]:
    """Answer each prompt alone, by the adapters in turn."""
    return [complete(replica.loop, replica.tokenizer, which=(i,), adapters=NAMES)[0] for i in prompts]


def bits_of(answers: list[ChoiceResult]) -> list[tuple[object, ...]]:
    """Return ids, log-probs, rows and versions of answers, for comparison to the bit."""
    return [
        (each.token_ids, each.logprobs, each.routing.rows.tobytes(), each.weight_versions)
        for each in answers
        if each.routing is not None
    ]


def hold(replica: ReplicaEngine, name: str, adapter: object) -> WeightOutcome:
    """Hold an adapter beside the weights."""
    assert isinstance(adapter, SentAdapter) and replica.loop.control.adapters is not None
    return replica.loop.control.adapters.load(adapter, name).result(TIMEOUT_S)


@pytest.fixture
def fleet(raylets: int, checkpoint: Path) -> Iterator[tuple[httpx.Client, str]]:
    """Two replicas that share a journal, and their URL."""
    journal, port = OwnJournal(), free_port()
    settings = {**SETTINGS, **BESIDE, "num_replicas": 2, "cpus_per_host": 0.25}
    settings |= {"journal": "on", "journal_address": f"127.0.0.1:{journal.port}", "journal_key": KEY.decode()}
    with deployed(checkpoint, settings, port=port) as client:
        yield client, f"http://127.0.0.1:{port}"
    journal.end()


def load_over_http(client: httpx.Client, name: str, path: Path) -> None:
    """Load until all replicas confirm it, as trainers do."""

    def is_loaded() -> bool:
        try:
            answer = client.post("/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})
        except httpx.HTTPError:  # the replica that was asked is lost
            return False
        return answer.status_code == 200

    wait_until(is_loaded, within_s=TIMEOUT_S)


def answers_of(client: httpx.Client, name: str | None) -> tuple[list[int], str]:
    """Return the ids and version that all replicas answer by an adapter."""
    found = {
        (tuple(answer["output_ids"]), answer["meta_info"]["weight_version"])
        for answer in (client.post("/generate", json=ASK | {"lora_path": name}).json() for _ in range(8))
    }
    ((ids, version),) = found
    return list(ids), version


def test_replicas_that_start_later_hold_the_same_adapters_before_they_serve(
    fleet: tuple[httpx.Client, str], checkpoint: Path, tmp_path: Path
) -> None:
    """Both replicas are killed in turn under requests, later one of them while it loads: no request is lost."""
    client, url = fleet
    first, second, third = (make_adapter_beside(checkpoint, seed=seed).write(tmp_path / f"{seed}") for seed in range(3))
    for name, path in (("x", first), ("y", first), ("x", second)):
        load_over_http(client, name, path)
    shutil.rmtree(second)  # no disk has it any more
    wanted = {name: answers_of(client, name) for name in ("x", "y", None)}
    assert len({version for _, version in wanted.values()}) == 3
    stop, resuming = threading.Event(), ResumingClient(url, within_s=TIMEOUT_S)

    def ask_on(number: int) -> int:
        """Ask one request after another, and one more after the end; return their number."""
        name, count, is_last = ("x", "y", None)[number % 3], 0, False
        while not is_last:
            is_last = stop.is_set()
            answer = resuming.ask(ASK | {"lora_path": name, "rid": f"{number} {count}", "stream": number % 2 == 0})
            meta = answer["meta_info"]
            assert (answer["output_ids"], meta["weight_version"]) == wanted[name], (name, meta)
            count += 1
        return count

    def statuses() -> set[int]:
        """Return the statuses of requests that no client repeats."""
        found = set()
        while not stop.is_set():
            with suppress(httpx.HTTPError):  # the replica is lost
                found.add(client.post("/generate", json=ASK | {"lora_path": "x"}).status_code)
        return found

    with ThreadPoolExecutor(8) as threads:
        seen = threads.submit(statuses)
        clients = [threads.submit(ask_on, number) for number in range(6)]
        try:
            for lost in running():
                lose(lost, process_of(lost))
            loading = threads.submit(load_over_http, client, "z", third)
            lost = running()[0]
            lose(lost, process_of(lost))
            loading.result()
        finally:
            stop.set()
        assert all(each.result() for each in clients)
        assert 200 in seen.result() and 404 not in seen.result(), "a replica served without the adapter"
    assert resuming.num_cut > 0
    for name, answer in wanted.items():
        assert answers_of(client, name) == answer
    ids, version = answers_of(client, "z")
    assert ids != wanted[None][0] and "+z@" in version


def lose(replica: str, pid: int) -> None:
    """Kill a replica, and wait until another serves in its place."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(running()) == 2 and replica not in running(), within_s=TIMEOUT_S)
