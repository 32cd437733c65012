"""Several adapters beside the weights: other requests do not change a request's answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rayserve_moe import Engine
from rayserve_moe.engine.adapters import UnknownAdapterError
from rayserve_moe.requests.records import RequestError
from tests.pipelines.conftest import EngineStore
from tests.support.checkpoints.adapters import MadeAdapter, make_adapter, make_adapter_beside
from tests.support.engine.shared_settings import ONE_BUCKET
from tests.support.engine.step_gate import wait_for_tokens

pytestmark = pytest.mark.slow
BESIDE: dict[str, Any] = {**ONE_BUCKET, "max_loras": 2, "max_lora_rank": 4, "max_cpu_loras": 4}
PROMPTS = [list(range(3, 3 + length)) for length in (5, 40, 7, 33)]
NAMES = (None, "a0", "a1", "a2")


@pytest.fixture(scope="module")
def made(core_checkpoint: Path) -> list[MadeAdapter]:
    return [make_adapter_beside(core_checkpoint, seed=seed, rank=2 + seed % 3) for seed in range(4)]


@pytest.fixture
def engine(engine_with: EngineStore, made: list[MadeAdapter], tmp_path: Path) -> Engine:
    """Engine with three adapters and two resident slots."""
    engine = engine_with(**BESIDE)
    for name in list(engine.loop.control.adapters.table.current):
        assert engine.unload_lora_adapter(name).success
    for number in range(3):
        outcome = engine.load_lora_adapter(made[number].write(tmp_path / f"{number}"), lora_name=f"a{number}")
        assert outcome.success, outcome.message
    return engine


def ask(engine: Engine, prompt: list[int], name: str | None, *, num_new: int = 12, **more: Any) -> dict[str, Any]:
    answer = engine.generate(
        input_ids=prompt,
        lora_path=name,
        ignore_eos=True,
        temperature=0.0,
        max_new_tokens=num_new,
        return_logprob=True,
        return_routed_experts=True,
        **more,
    )
    assert isinstance(answer, dict)
    return answer


def outputs(answer: dict[str, Any]) -> tuple[Any, ...]:
    meta = answer["meta_info"]
    return answer["output_ids"], [row[0] for row in meta["output_token_logprobs"]], meta["routed_experts"]


def test_adapters_and_none_in_a_batch_are_each_answered_as_alone(
    engine: Engine, engine_with: EngineStore, assert_alike: Callable[[Any, Any], None]
):
    """Adapters beyond the resident number take turns; requests without one match a server without the feature."""
    plain = engine_with(**ONE_BUCKET)
    wanted = {(None, place): outputs(ask(plain, prompt, None)) for place, prompt in enumerate(PROMPTS)}
    num_compilations = engine.runner.num_compilations_since_start
    for name in NAMES[1:]:
        wanted |= {(name, place): outputs(ask(engine, prompt, name)) for place, prompt in enumerate(PROMPTS)}
    assert len({str(wanted[name, 1]) for name in NAMES}) == len(NAMES)
    loads = engine.loop.statistics()["adapter_loads"]
    engine.flush_cache()
    with ThreadPoolExecutor(16) as pool:
        asked = {
            (name, place): pool.submit(ask, engine, prompt, name)
            for place, prompt in enumerate(PROMPTS)
            for name in NAMES
        }
    for key, answer in asked.items():
        assert_alike(outputs(answer.result()), wanted[key])
    assert engine.loop.statistics()["adapter_loads"] > loads, "three adapters do not fit at once"
    assert engine.runner.num_compilations_since_start == num_compilations


def test_a_reload_in_place_serves_no_stale_page_and_leaves_running_requests_alone(
    engine: Engine, made: list[MadeAdapter], tmp_path: Path, assert_alike: Callable[[Any, Any], None]
):
    prompt = list(range(7, 7 + 64))
    first = ask(engine, prompt, "a0", num_new=4)
    assert ask(engine, prompt, "a0", num_new=4)["meta_info"]["cached_tokens"] > 0
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, engine, [11, 12, 13], "a0", num_new=120)
        wait_for_tokens(engine.loop, 10)
        assert engine.load_lora_adapter(made[3].write(tmp_path / "again"), lora_name="a0").success
        second = ask(engine, prompt, "a0", num_new=4)
        versions = running.result()["meta_info"]["weight_versions"]
    assert second["meta_info"]["cached_tokens"] == 0
    old, new = (answer["meta_info"]["weight_version"] for answer in (first, second))
    assert old != new and old.split("@")[0] == new.split("@")[0] == f"{engine.card.weight_version}+a0"
    assert [span["version"] for span in versions] == [old]
    assert engine.load_lora_adapter(made[3].write(tmp_path / "other name"), lora_name="other").success
    assert_alike(outputs(second), outputs(ask(engine, prompt, "other", num_new=4)))
    assert outputs(first)[1] != outputs(second)[1]


def test_answers_under_pushes_are_those_of_the_bytes_that_they_name(
    engine: Engine, made: list[MadeAdapter], tmp_path: Path, assert_alike: Callable[[Any, Any], None]
):
    """Each stream asks one request after another while four adapters are pushed in turn under one name."""
    for name in ("a1", "a2"):
        assert engine.unload_lora_adapter(name).success
    paths = [adapter.write(tmp_path / f"push {number}") for number, adapter in enumerate(made)]

    def push(number: int) -> None:
        assert engine.load_lora_adapter(paths[number % len(paths)], lora_name="a0").success

    wanted = {}
    for number in range(len(paths)):
        push(number)
        for place, prompt in enumerate(PROMPTS):
            answer = ask(engine, prompt, "a0")
            wanted[answer["meta_info"]["weight_version"], place] = outputs(answer)
    assert len(wanted) == len(paths) * len(PROMPTS)
    stop, num_pushes = threading.Event(), 60

    def answers(place: int) -> list[dict[str, Any]]:
        found = []
        while not stop.is_set():
            found.append(ask(engine, PROMPTS[place], "a0"))
        return found

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asked = [pool.submit(answers, place) for place in range(len(PROMPTS))]
        try:
            for number in range(num_pushes):
                push(number)
        finally:
            stop.set()
    for place, found in enumerate(asked):
        for answer in found.result():
            ((version,),) = [{span["version"] for span in answer["meta_info"]["weight_versions"]}]
            assert_alike(outputs(answer), wanted[version, place])
    push(num_pushes)
    table, hosts = engine.loop.control.adapters.table, engine.runner.adapters
    assert list(table.loaded) == list(hosts._held) == [table.current["a0"]], "old bytes leave host memory"


def test_a_preempted_request_continues_with_its_adapter(engine: Engine, assert_alike: Callable[[Any, Any], None]):
    wanted = {name: outputs(ask(engine, PROMPTS[1], name, num_new=60)) for name in ("a0", "a1", None)}
    with ThreadPoolExecutor(3) as pool:
        asked = {name: pool.submit(ask, engine, PROMPTS[1], name, num_new=60) for name in wanted}
        wait_for_tokens(engine.loop, 30)
        engine.pause_generation("retract")
        engine.continue_generation()
    for name, answer in asked.items():
        assert_alike(outputs(answer.result()), wanted[name])


def test_requests_of_other_adapters_and_loads_without_a_place_are_refused(
    engine: Engine, core_checkpoint: Path, made: list[MadeAdapter], tmp_path: Path
):
    with pytest.raises(UnknownAdapterError, match="a0"):
        ask(engine, PROMPTS[0], "nobody")
    with pytest.raises(RequestError):
        ask(engine, PROMPTS[0], "a" * 1000)
    large = make_adapter_beside(core_checkpoint, seed=0, rank=5).write(tmp_path / "large")
    outcome = engine.load_lora_adapter(large, lora_name="large")
    assert not outcome.success and "rank 5 exceeds max_lora_rank 4" in outcome.message
    experts = make_adapter(core_checkpoint, others=False).write(tmp_path / "experts")
    outcome = engine.load_lora_adapter(experts, lora_name="experts")
    assert not outcome.success and "merge: true" in outcome.message
    before = outputs(ask(engine, PROMPTS[0], None)), outputs(ask(engine, PROMPTS[0], "a0"))
    assert engine.load_lora_adapter(experts, lora_name="experts", merge=True).success
    assert outputs(ask(engine, PROMPTS[0], "experts"))[1] == outputs(ask(engine, PROMPTS[0], None))[1]
    assert outputs(ask(engine, PROMPTS[0], None)) != before[0]
    assert engine.unload_lora_adapter("experts").success
    assert (outputs(ask(engine, PROMPTS[0], None)), outputs(ask(engine, PROMPTS[0], "a0"))) == before


def test_a_load_beyond_host_memory_drops_the_least_recently_used(
    engine: Engine, made: list[MadeAdapter], tmp_path: Path
):
    assert engine.load_lora_adapter(made[3].write(tmp_path / "3"), lora_name="a3").success
    ask(engine, PROMPTS[0], "a0", num_new=2)
    assert engine.load_lora_adapter(made[0].write(tmp_path / "4"), lora_name="a4").success
    assert set(engine.loop.control.adapters.table.current) == {"a0", "a2", "a3", "a4"}
    with pytest.raises(UnknownAdapterError):
        ask(engine, PROMPTS[0], "a1")
