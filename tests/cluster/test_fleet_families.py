"""Two replicas of a model with recurrent layers: requests of one that is killed go on at the other one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cluster.conftest import SETTINGS
from tests.cluster.test_fleet import check_a_loss
from tests.support.cluster.deployed_server import deployed
from tests.support.cluster.ports import free_port
from tests.support.engine.workload import draw_prompt
from tests.support.kernels.native_kernels import need_native_kernels
from tests.support.models.families import FAMILY_CASES, FamilyCase, write_family
from tests.support.serving.journal_server import KEY, OwnJournal

PORT = free_port()
PROMPT_LENGTHS = (3, 40, 62, 63, 64, 65, 100, 127)
"""An answer of a hundred tokens passes a multiple of 64 once or twice."""
KILLED_AT = 40
"""Tokens that a stream has told when its replica, or the other one, is killed."""
CASES = ("qwen3_5_moe_text-0", "kimi_linear-0", "bailing_hybrid-0", "nemotron_h-0", "granitemoehybrid-0")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in FAMILY_CASES if case.name in CASES]),
]


@pytest.fixture
def journal() -> Iterator[OwnJournal]:
    journal = OwnJournal()
    yield journal
    journal.end()


def asked(number: int, *, name: str) -> dict[str, Any]:
    """Return one of sixteen requests: half of them are streams, half are drawn."""
    length = PROMPT_LENGTHS[number % len(PROMPT_LENGTHS)]
    prompt = draw_prompt(np.random.default_rng(number), length).tolist()
    sampling = {"max_new_tokens": 100 + number, "temperature": float(number // 2 % 2), "ignore_eos": True}
    parts = {"return_logprob": True, "return_routed_experts": True, "stream": number % 2 == 0}
    return {
        "input_ids": prompt,
        "sampling_params": sampling | {"sampling_seed": number},
        "rid": f"{name} {number}",
        **parts,
    }


def test_requests_of_a_killed_replica_go_on_with_the_same_states(
    case: FamilyCase, raylets: int, journal: OwnJournal, tmp_path: Path
):
    """By native kernels log-probs are equal to the bit."""
    need_native_kernels()
    path = write_family(case, tmp_path / "model", seed=5, dtype="bfloat16")
    settings = {**SETTINGS, "dtype": "bfloat16", "cpu_kernels": "native", "num_replicas": 2, "cpus_per_host": 0.25}
    settings |= {"journal": "on", "journal_address": f"127.0.0.1:{journal.port}", "journal_key": KEY.decode()}
    with deployed(path, settings, port=PORT) as fleet:
        check_a_loss(fleet, asked, url=f"http://127.0.0.1:{PORT}", tolerance=0.0, killed_at=KILLED_AT)
