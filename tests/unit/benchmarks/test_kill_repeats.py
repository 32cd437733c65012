"""Every way in which an answer can differ is counted as that."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.kill_asking import Answer, Asked, differing
from benchmarks.kill_compared import Undisturbed, compared
from benchmarks.kill_repeats import saved_result, table_of
from rayserve_moe.replay.encoding import encode_packed
from rayserve_moe.replay.encoding.description import routed_experts_info
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout

EXPECTED: list[Answer | str] = [("ab", [-0.1, -0.2], "rows"), ("cd", [-0.3], "more"), ("ef", [], "rest")]


def test_what_differs_is_counted_and_what_is_lost_is_not_compared() -> None:
    assert differing(EXPECTED, EXPECTED) == {"lost": 0, "tokens": 0, "logprobs": 0, "rows": 0, "logprob_gap": 0.0}
    found: list[Answer | str] = [("ax", [-0.1, -0.25], "rows"), "ReadError", ("ef", [], None)]
    counts = {"lost": 1, "tokens": 1, "logprobs": 1, "rows": 1, "logprob_gap": 0.0}
    assert differing(found, EXPECTED) == counts, "log-probs of other tokens are not compared"
    near = [("ab", [-0.1, -0.25], "rows"), *EXPECTED[1:]]
    assert round(differing(near, EXPECTED)["logprob_gap"], 6) == 0.05
    assert differing([("ab", [-0.1], "rows"), *EXPECTED[1:]], EXPECTED)["logprobs"] == 1, "a token too few"


def test_the_table_has_a_line_per_fault() -> None:
    row = {"repeats": 20, "requests": 640, "lost": 0, "tokens": 0, "logprobs": 0, "rows": 0, "p50_s": 4.0, "worst_s": 5}
    assert "| SIGKILL, 1 host | 20 | 640 | 0 | 0 | 0 | 0 | 0 | 4.0 | 5.0 | 0.0e+00 |" in " ".join(
        table_of({"SIGKILL, 1 host": row}).split()
    )


LAYOUT = RoutingLayout(num_hidden_layers=1, layer_ids=(0,), num_experts=16, top_k=1)


def asked_of(tokens: list[int], rows: list[int], spans: list[dict], **labels: tuple) -> tuple[Answer, Asked]:
    """An answer to a prompt of two tokens, and what it was asked as."""
    routing = RoutedExperts(np.array(rows, np.uint8)[:, None, None], **labels)
    fields = {
        "routed_experts": encode_packed(routing, LAYOUT),
        "routed_experts_info": routed_experts_info(routing, LAYOUT),
    }
    choice = {"weight_versions": spans, **fields}
    return ("", [-float(token) for token in tokens], ""), Asked(3, tokens={0: tokens}, choices={0: choice})


@pytest.mark.parametrize(
    ("tokens", "rows", "labels", "differs"),
    [
        ([7, 8, 1], [1, 2, 3, 9], {"weight_version": ((0, 3, "A"), (3, 4, "B"))}, ""),
        ([7, 5, 1], [1, 2, 3, 9], {"weight_version": ((0, 3, "A"), (3, 4, "B"))}, "tokens"),
        ([7, 8, 1], [1, 6, 3, 9], {"weight_version": ((0, 3, "A"), (3, 4, "B"))}, "rows"),
        ([7, 8, 1], [6, 6, 3, 9], {"weight_version": ((0, 2, "B"), (2, 3, "A"), (3, 4, "B"))}, "rows"),
        (
            [7, 8, 1],
            [6, 6, 3, 9],
            {"weight_version": ((0, 2, "B"), (2, 3, "A"), (3, 4, "B")), "source": ((0, 2, "recomputed"),)},
            "",
        ),
    ],
)
def test_what_crossed_an_update_is_held_to_what_came_before_it(
    tokens: list[int], rows: list[int], labels: dict, differs: str
) -> None:
    """Two outputs under A, one under B; rows of B before that are those that say that they are recomputed."""
    whole = [{"version": "A", "start": 0, "end": 3}]
    wanted, undisturbed = asked_of([7, 8, 9], [1, 2, 3, 4], whole, weight_version=((0, 4, "A"),))
    spans = [{"version": "A", "start": 0, "end": 2}, {"version": "B", "start": 2, "end": 3}]
    found, asked = asked_of(tokens, rows, spans, **labels)
    counts = compared([found], asked, {"A": Undisturbed([wanted], undisturbed)})
    assert counts["crossed"] == 1
    assert {name for name in ("lost", "tokens", "rows") if counts[name]} == ({differs} - {""})


def test_rows_of_other_faults_stay_with_their_loads(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert saved_result(path) == {"rows": {}, "loads": {}}
    path.write_text(json.dumps({"machine": {"load_before": 2.5}, "rows": {"SIGKILL, 1 host": {"lost": 0}}}))
    assert saved_result(path) == {"rows": {"SIGKILL, 1 host": {"lost": 0}}, "loads": {"SIGKILL, 1 host": 2.5}}
    path.write_text(json.dumps({"machine": {"load_before": 9}, "loads": {"a": 1}, "rows": {"a": {}}}))
    assert saved_result(path)["loads"] == {"a": 1}
