"""A model of every family on two hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayserve_moe import Engine
from rayserve_moe.text.tokenizer import Tokenizer
from tests.cluster.conftest import SETTINGS
from tests.cluster.test_hosts import OverTransport, assert_same, complete, running, starting_hosts, transport_to
from tests.support.models.families import FAMILY_CASES, FamilyCase, write_family

CASES = [pytest.param(case, id=case.name) for case in FAMILY_CASES if not case.variant]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_hosts_answer_as_one_process_for_a_family(case: FamilyCase, raylets: int, tmp_path: Path) -> None:
    path = write_family(case, tmp_path / case.name, seed=0)
    with Engine(str(path), **SETTINGS) as engine:
        card, wanted = engine.card, complete(engine.loop, engine.tokenizer)
    with starting_hosts(path) as executor:
        started = executor.start()
        workers = OverTransport(transport_to(executor, "sockets"), started.num_pages, page_groups=started.page_groups)
        with running(workers, card) as loop:
            assert_same(complete(loop, Tokenizer(path)), wanted)
