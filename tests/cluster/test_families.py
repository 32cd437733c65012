"""Families whose cache, router and experts differ most from those of the other tests, on two hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rayserve_moe import Engine
from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.checkpoints.synthetic_models import SyntheticModel
from rayserve_moe.text.tokenizer import Tokenizer
from tests.cluster.conftest import SETTINGS
from tests.cluster.test_hosts import OverTransport, assert_same, complete, running, transport_to, two_hosts
from tests.support.family_cases import FAMILY_CASES, config_of


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3-0", "gpt_oss-0"])
def test_two_hosts_answer_as_one_process_for_a_family(name: str, raylets: int, tmp_path: Path) -> None:
    case = next(case for case in FAMILY_CASES if case.name == name)
    config = config_of(replace(case, config={**case.config, "vocab_size": 512}))
    path = write_checkpoint(tmp_path / name, SyntheticModel(config, scale=0.12, norm_jitter=0.2), dtype="float32")
    with Engine(str(path), **SETTINGS) as engine:
        card, wanted = engine.card, complete(engine.loop, engine.tokenizer)
    with (
        two_hosts(path) as (executor, num_pages),
        running(OverTransport(transport_to(executor, "sockets"), num_pages), card) as loop,
    ):
        assert_same(complete(loop, Tokenizer(path)), wanted)
