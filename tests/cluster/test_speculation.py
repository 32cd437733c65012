"""Drafts of a group of two hosts: chosen on the first or made by all, and nothing of them to be seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayserve_moe import Engine
from rayserve_moe.engine.speculation.model_drafts import ModelProposer
from rayserve_moe.engine.speculation.proposers import Proposer
from tests.cluster.conftest import SETTINGS
from tests.cluster.test_hosts import OverTransport, assert_nothing_was_compiled, transport_to, two_hosts
from tests.support.engine.outputs import Outcomes, assert_same
from tests.support.engine.run_requests import run_together
from tests.support.speculation.draft_checkpoints import write_eagle_head
from tests.support.speculation.oracle_proposer import Oracle
from tests.support.speculation.random_requests import (
    DRAFTS,
    PLAIN,
    VOCAB_SIZE,
    known_to_devices,
    max_drafts,
    random_requests,
)

NGRAM: dict[str, Any] = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_steps": DRAFTS,
    "structured_output": True,
    "enable_return_hidden_states": True,
    "logit_processors": "examples.logit_processors",
}
PAGES = {"page_size": 16, "num_pages": SETTINGS["num_pages"]}


@pytest.mark.slow
@pytest.mark.parametrize("num_data_ranks", [1, 2])
def test_drafts_of_the_first_host_do_not_show(num_data_ranks: int, raylets: int, checkpoint: Path) -> None:
    check_law(
        checkpoint,
        *(lambda plain, share=share: Oracle(plain, share=share, vocab_size=VOCAB_SIZE) for share in (0.5, 0.95)),
        data_parallel_size=num_data_ranks,
        **NGRAM,
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_data_ranks", [1, 2])
def test_drafts_of_a_model_on_both_hosts_do_not_show(
    num_data_ranks: int, raylets: int, checkpoint: Path, tmp_path: Path
) -> None:
    head = write_eagle_head(tmp_path / "head", json.loads((checkpoint / "config.json").read_text()), num_words=100)
    drafts = {**NGRAM, "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(head)}
    check_law(checkpoint, lambda _: ModelProposer("drafts"), data_parallel_size=num_data_ranks, **drafts)


def check_law(checkpoint: Path, *proposers: Callable[[Outcomes], Proposer], **speculates: Any) -> None:
    """Two hosts with drafts come to what one process without them does."""
    with (
        Engine(str(checkpoint), **{**SETTINGS, **PAGES, **speculates}, devices_per_host=4) as engine,
        two_hosts(checkpoint, **speculates) as (executor, _),
    ):
        plain_way = replace(PLAIN, step_tokens=32, chunk_tokens=32, **PAGES)
        requests = random_requests(1, count=24, layout=engine.card.routing)
        for some in (requests, [known_to_devices(request) for request in requests[:12]]):
            plain = run_together(engine.runner, engine.card, some, way=plain_way)
            for proposer_for in proposers:
                over = OverTransport(transport_to(executor, "sockets"), PAGES["num_pages"])
                way = replace(plain_way, proposer=proposer_for(plain), num_drafts=max_drafts(engine), executor=over)
                found = run_together(engine.runner, engine.card, some, way=way)
                assert found.keys() == plain.keys()
                for key, outcome in plain.items():
                    assert_same(found[key], outcome, routing=outcome.routing is not None)
                over.release()
        assert_nothing_was_compiled(executor)
