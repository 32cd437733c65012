"""A model of every family on two hosts."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray

from rayserve_moe import Engine
from rayserve_moe.cluster.step_transport import StepTransport
from rayserve_moe.scheduling.step_plan import StartReport
from rayserve_moe.text.tokenizer import Tokenizer
from tests.cluster.conftest import SETTINGS
from tests.cluster.test_hosts import (
    REPLACED_WITHIN_S,
    OverTransport,
    assert_same,
    complete,
    running,
    starting_hosts,
    transport_to,
)
from tests.support.engine.outputs import LOGPROB_TOLERANCE, RECURRENT_TOLERANCE
from tests.support.models.families import FAMILY_CASES, FamilyCase, write_family

FIRST = [case for case in FAMILY_CASES if not case.variant]
HYBRID = (
    *("qwen3_next-0", "qwen3_5_moe_text-0", "kimi_linear-0", "bailing_hybrid-0", "nemotron_h-0", "granitemoehybrid-0"),
)
"""Cases with recurrent layers."""
CASES = [pytest.param(case, id=case.name) for case in FIRST]
KILLED = [pytest.param(case, id=case.name) for case in FIRST if case.name in HYBRID or case.has_index]
pytestmark = pytest.mark.slow


def captured(case: FamilyCase) -> dict[str, object]:
    """Settings for one process and for hosts, with index rows."""
    return {**SETTINGS, "enable_return_indexer_topk": case.has_index}


def over(transport: StepTransport, started: StartReport) -> OverTransport:
    """Return an executor over hosts that have reported their start."""
    return OverTransport(
        transport, started.num_pages, page_groups=started.page_groups, entry_groups=started.entry_groups
    )


@pytest.mark.parametrize("case", CASES)
def test_two_hosts_answer_as_one_process_for_a_family(case: FamilyCase, raylets: int, tmp_path: Path) -> None:
    """Use four tensor ranks over both hosts, or two within each if four do not divide the groups of Mamba-2 layers."""
    num_ranks = 2 if case.num_groups_of_mixers % 4 else 1
    path = write_family(case, tmp_path / case.name, seed=0)
    tolerance = RECURRENT_TOLERANCE if case.name in HYBRID else LOGPROB_TOLERANCE
    with Engine(str(path), **captured(case)) as engine:
        card, wanted = engine.card, complete(engine.loop, engine.tokenizer)
    with starting_hosts(path, **captured(case), data_parallel_size=num_ranks) as executor:
        started = executor.start()
        with running(over(transport_to(executor, "sockets"), started), card, num_data_ranks=num_ranks) as loop:
            assert_same(complete(loop, Tokenizer(path)), wanted, tolerance=tolerance)


@pytest.mark.parametrize("case", KILLED)
def test_states_and_index_rows_outlive_a_host_that_is_killed(case: FamilyCase, raylets: int, tmp_path: Path) -> None:
    """Two data ranks of two devices each, a host per rank: their requests start anew from their tokens.

    Two prompts of three are shorter than 64 tokens; answers pass that number before the host is lost, or after.
    """
    path = write_family(case, tmp_path / case.name, seed=0)
    tolerance = RECURRENT_TOLERANCE if case.name in HYBRID else LOGPROB_TOLERANCE
    with Engine(str(path), **captured(case)) as engine:
        card, wanted = engine.card, complete(engine.loop, engine.tokenizer)
    with starting_hosts(path, **captured(case), data_parallel_size=2) as executor:
        started = executor.start()
        with running(over(executor, started), card, num_data_ranks=2, rebuilder=executor) as loop:
            tokenizer = Tokenizer(path)
            assert_same(complete(loop, tokenizer), wanted, tolerance=tolerance)
            step = loop.statistics()["steps"]
            with ThreadPoolExecutor(1) as beside:
                found = beside.submit(complete, loop, tokenizer)
                while loop.statistics()["steps"] < step + 20:
                    assert not found.done(), found.exception()
                    time.sleep(0.001)
                os.kill(ray.get(executor.workers[1].process.remote()).pid, signal.SIGKILL)
                assert_same(found.result(REPLACED_WITHIN_S), wanted, tolerance=tolerance)
            assert loop.recovery is not None and loop.recovery.num_rebuilds == 1 and loop.recovery.num_carried > 0
            assert_same(complete(loop, tokenizer), wanted, tolerance=tolerance)
