"""A replica that computes prompts for another: one endpoint answers, and a lost replica costs pages only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayserve_moe import Engine
from rayserve_moe.serving.control.prefill_peers import PrefillPeers
from tests.support.engine.shared_settings import SMALL
from tests.support.kernels.native_kernels import need_native_kernels
from tests.support.serving.http_client import GENERATE
from tests.support.serving.local_fleet import LocalFleet, local_fleet

PAGE, MIN_TOKENS = 16, 32
NATIVE = {"dtype": "bfloat16", "cpu_kernels": "native"}
SETTINGS: dict[str, Any] = {**SMALL, "host_cache_mib": 8, "structured_output": False, "max_model_len": 512, **NATIVE}


@pytest.fixture(scope="module")
def engines(checkpoint: Path) -> Iterator[dict[str, Engine]]:
    need_native_kernels()
    with Engine(str(checkpoint), **SETTINGS) as prefills, Engine(str(checkpoint), **SETTINGS) as decodes:
        yield {"prefills": prefills, "decodes": decodes}


@pytest.fixture
def fleet(engines: dict[str, Engine]) -> Iterator[LocalFleet]:
    for engine in engines.values():
        assert engine.flush_cache()
    with local_fleet(engines) as fleet:
        fleet.state.forget(list(engines))
        for name in engines:
            assert fleet.state.join(name, 0, num_prefill=1)
        fleet.sync()
        pushes = engines["decodes"].loop.control.pushes
        assert pushes is not None
        pushes.refused.clear()
        pushes.receive_from(PrefillPeers(fleet.member("decodes"), fleet.calls), min_tokens=MIN_TOKENS)
        yield fleet


def ask(fleet: LocalFleet, *, first: int, length: int = 100) -> dict[str, Any]:
    sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": list(range(first, first + length)), "sampling_params": sampling}
    answer = fleet["decodes"].post(GENERATE, json={**body, "return_routed_experts": True})
    assert answer.status_code == 200, answer.text
    return answer.json()


def sources(answer: dict[str, Any]) -> list[Any]:
    return answer["meta_info"]["routed_experts_info"]["source"]


def test_a_long_prompt_comes_from_the_other_replica_and_a_short_one_does_not(fleet: LocalFleet):
    assert fleet["decodes"].get("/server_info").json()["prefill"] == ["prefills"]
    answer, whole = ask(fleet, first=20), 96
    assert sources(answer)[0] == [0, whole, "transferred"] and answer["meta_info"]["cached_tokens"] == whole
    fleet.calls.silent.add("prefills")
    again = ask(fleet, first=20)
    assert fleet.calls.asked.count("prefill") == 1, "it is cached here by now"
    assert again["output_ids"] == answer["output_ids"]
    assert again["meta_info"]["routed_experts"] == answer["meta_info"]["routed_experts"]
    assert ask(fleet, first=200, length=MIN_TOKENS)["meta_info"]["cached_tokens"] == 0
    assert fleet.calls.asked.count("prefill") == 1


@pytest.mark.parametrize("lost", ["silent", "stopped", "gone", "forgotten"])
def test_without_the_other_replica_a_prompt_is_computed(fleet: LocalFleet, engines: dict[str, Engine], lost: str):
    pushes, control = engines["decodes"].loop.control.pushes, engines["prefills"].loop.control
    assert pushes is not None
    if lost == "silent":
        fleet.calls.silent.add("prefills")
    elif lost == "stopped":
        control.rename_weights("another").result()
    elif lost == "gone":
        fleet.remove("prefills")
    else:
        fleet.state.forget(["prefills"])
        fleet.sync(["decodes"])
    answer = ask(fleet, first=30)
    control.rename_weights(engines["decodes"].card.weight_version).result()
    assert sources(answer)[0][2] == "computed" and answer["meta_info"]["cached_tokens"] == 0
    reason = {"silent": {"lost": 1}, "stopped": {"weight_version": 1}, "gone": {"lost": 1}, "forgotten": {}}[lost]
    assert dict(pushes.refused) == reason
