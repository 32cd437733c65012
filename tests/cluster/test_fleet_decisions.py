"""A request resumes on the other of two replicas: its choices keep their schema and all decisions."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest

from rayserve_moe import extract_routed_experts_from_meta_info, extract_router_gates_from_meta_info
from rayserve_moe.checkpoints.synthetic import ensure_checkpoint
from tests.cluster.conftest import SETTINGS
from tests.cluster.test_fleet import WITHIN_S, is_whole, num_requests, process_of
from tests.http.test_journal import RESUME, events_in, last_answers, told_of
from tests.support.cluster.deployed_server import deployed
from tests.support.cluster.ports import free_port
from tests.support.kernels.native_kernels import need_native_kernels
from tests.support.serving.http_client import GENERATE, wait_until
from tests.support.serving.journal_server import KEY, OwnJournal

PORT, CHOICES = free_port(), 4
SCHEMA = {"type": "array", "items": {"enum": ["ab", "cd", "ef"]}, "minItems": 20, "maxItems": 22}
"""Answers of about a hundred tokens."""
SAMPLING = {
    "temperature": 1.0, "top_k": 40, "top_p": 0.9, "sampling_seed": 5, "n": CHOICES, "max_new_tokens": 220,
    "json_schema": json.dumps(SCHEMA),
}  # fmt: skip
BODY = {
    "input_ids": [*range(20, 50)], "sampling_params": SAMPLING, "stream": True, "return_logprob": True,
    "return_routed_experts": True, "return_router_gates": True, "return_sampling_mask": True,
}  # fmt: skip
COLUMNS = ("output_token_logprobs", "output_token_sampling_mask", "output_token_sampling_logprobs", "finish_reason")


@pytest.fixture
def journal() -> Iterator[OwnJournal]:
    journal = OwnJournal()
    yield journal
    journal.end()


def answers_of(fleet: httpx.Client, path: str, body: dict[str, Any], told: list[int]) -> dict[int, dict[str, Any]]:
    """Read a stream until it ends or its replica is lost; keep the number of delivered tokens per choice in `told`."""
    events = []
    with suppress(httpx.HTTPError), fleet.stream("POST", path, json=body) as answer:
        if answer.status_code != 200:
            return {}
        for event_id, event in events_in(answer):
            if "error" in event:
                break
            events.append((event_id, event))
            told[:] = told_of(event_id)
    return last_answers(events)


def is_complete(answers: dict[int, dict[str, Any]]) -> bool:
    return len(answers) == CHOICES and all(each["meta_info"]["finish_reason"] for each in answers.values())


@pytest.mark.slow
def test_choices_under_a_schema_outlive_their_replica(raylets: int, journal: OwnJournal, tmp_path: Path):
    """With native kernels, ids, rows, gates and masks equal those of an undisturbed request, bit by bit."""
    need_native_kernels()
    path = ensure_checkpoint(tmp_path / "model", "tiny", dtype="bfloat16")
    settings = {**SETTINGS, "dtype": "bfloat16", "cpu_kernels": "native", "num_replicas": 2, "cpus_per_host": 0.25}
    settings |= {"structured_output": True, "enable_return_router_gates": True, "max_step_tokens": 64}
    settings |= {"journal": "on", "journal_address": f"127.0.0.1:{journal.port}", "journal_key": KEY.decode()}
    with deployed(path, settings, port=PORT) as fleet, ThreadPoolExecutor(1) as beside:
        wait_until(lambda: is_whole(fleet), within_s=WITHIN_S)
        wanted = answers_of(fleet, GENERATE, {**BODY, "rid": "undisturbed"}, [])
        assert is_complete(wanted)
        half = sum(len(answer["output_ids"]) for answer in wanted.values()) // 2
        assert fleet.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
        told: list[int] = []
        cut = beside.submit(answers_of, fleet, GENERATE, {**BODY, "rid": "killed"}, told)
        wait_until(lambda: sum(num_requests(fleet).values()) > 0)
        counts = num_requests(fleet)
        pid = process_of(max(counts, key=counts.__getitem__))
        assert fleet.post("/continue_generation").status_code == 200
        wait_until(lambda: sum(told) >= half or cut.done(), within_s=WITHIN_S)
        os.kill(pid, signal.SIGKILL)
        assert not is_complete(cut.result()) and sum(told) >= half
        found: dict[int, dict[str, Any]] = {}

        def resume() -> bool:
            found.update(answers_of(fleet, RESUME, {"rid": "killed", "from_token": list(told)}, told))
            return is_complete(found)

        wait_until(resume, within_s=WITHIN_S)
    for choice, answer in wanted.items():
        check_same(found[choice], answer)
        jsonschema.validate(json.loads(answer["text"]), SCHEMA)


def check_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert (found["output_ids"], found["text"]) == (wanted["output_ids"], wanted["text"])
    assert [found["meta_info"][name] for name in COLUMNS] == [wanted["meta_info"][name] for name in COLUMNS]
    assert max(map(len, wanted["meta_info"]["output_token_sampling_mask"])) > 1
    for values in (extract_routed_experts_from_meta_info, extract_router_gates_from_meta_info):
        np.testing.assert_array_equal(values(found), values(wanted))
