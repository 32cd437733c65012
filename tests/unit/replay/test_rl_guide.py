"""The Python of docs/rl (rows.md, trainer.md) that needs no server runs in its order, on answers of the encoders."""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from rayserve_moe.replay.encoding import (
    DIALECTS,
    encode_index,
    encode_rollout,
    gates,
    rollout_rows,
    routed_experts_info,
    routing_from,
    routing_until,
)
from rayserve_moe.replay.index_rows import packed_index
from rayserve_moe.requests.records import GateScale, IndexLayout, RoutedExperts, RoutingLayout
from rayserve_moe.rollouts.schema import Rollout
from tests.support.routing.routing_arrays import random_rows, same
from tests.support.serving.trainer_guide import guide_snippets, guide_text

LAYOUT = RoutingLayout(num_hidden_layers=5, layer_ids=(1, 2, 3, 4), num_experts=64, top_k=4)
TOKENS, OTHER_TOKENS = list(range(30)), [*range(20), *range(50, 56)]
PROMPT_LEN = 20
SHARED = random_rows(LAYOUT, PROMPT_LEN, seed=1)


def whole(num_tokens: int, seed: int) -> RoutedExperts:
    generated = random_rows(LAYOUT, num_tokens - 1 - PROMPT_LEN, seed=seed)
    span = (0, num_tokens - 1)
    return RoutedExperts(
        np.concatenate([SHARED, generated]), source=((*span, "computed"),), weight_version=((*span, "7"),)
    )


def part(routing: RoutedExperts, first: int, last: int) -> RoutedExperts:
    return routing_from(routing_until(routing, last), first)


def answer(routing: RoutedExperts) -> dict:
    fields = {
        "routed_experts": DIALECTS["sglang"].encode(routing, LAYOUT),
        "routed_experts_info": routed_experts_info(routing, LAYOUT),
        "routed_experts_start_len": routing.start,
    }
    return {"text": "", "output_ids": [], "meta_info": fields}


def gated(routing: RoutedExperts) -> dict:
    layered = dataclasses.replace(routing, parts={"gates": np.full(routing.rows.shape, 0.25, np.float32)})
    scale = GateScale("softmax", is_normalized=True, scale=1.0)
    return {
        "router_gates": gates.encode(layered),
        "router_gates_info": gates.describe(layered, layout=LAYOUT, scale=scale),
    }


def test_the_python_of_the_guide_runs():
    routing, other = whole(len(TOKENS), 2), whole(len(OTHER_TOKENS), 3)
    sent = (routing, routing_from(other, PROMPT_LEN))
    chosen = np.tile(np.arange(8, dtype=np.int32), (len(TOKENS) - 1, 2, 1))
    indexed = encode_index(
        dataclasses.replace(routing, parts={"index": packed_index(chosen)}), IndexLayout((0, 3), (0, 1, 2, 3, 4), 8)
    )
    header = {"choices": [{"routed_experts_info": routed_experts_info(each, LAYOUT)} for each in sent]}
    names = {
        "answer": answer(routing),
        "container": encode_rollout(header, [rollout_rows(each, LAYOUT) for each in sent]),
        "turns": [answer(part(routing, 0, 22)), answer(part(routing, 22, 29))],
        "events": [answer(part(routing, 0, 21)), answer(part(routing, 21, 25)), answer(part(routing, 25, 29))],
        "indexed": {"meta_info": dict(zip(("indexer_topk", "indexer_topk_info"), indexed, strict=True))},
        "gated": {"meta_info": gated(routing)},
        "token_ids": TOKENS,
        "other_ids": OTHER_TOKENS,
        "other_routing": other,
        "prompt_len": PROMPT_LEN,
        "model_info": {
            "num_hidden_layers": 5,
            "moe_layer_ids": [1, 2, 3, 4],
            "num_experts": 64,
            "num_experts_per_tok": 4,
        },
    }
    snippets, _ = guide_snippets()
    assert len(snippets) == 9
    for snippet in snippets:
        exec(compile(snippet, "docs/rl", "exec"), names)
    assert names["layout"] == LAYOUT and (names["chosen"] == chosen[:, [0, 0, 0, 1, 1]]).all()
    assert same(names["routing"], routing) and same(names["streamed"], routing) and same(names["second"], other)
    assert names["gates"].shape == (len(TOKENS) - 1, 4, 4)
    assert names["slime"].routed_experts.shape == (2, 30, 5, 4)
    assert names["nemo_rl"].routed_experts.dtype == np.int8
    assert names["replay"].sum() == len(TOKENS) - 1 + len(OTHER_TOKENS) - 1


def test_the_table_of_a_sample_has_every_field():
    section = guide_text().split("## Fields of a sample")[1].split("\n## ")[0]
    listed = {
        name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    properties = {name for name, value in vars(Rollout).items() if isinstance(value, property)}
    assert listed == {field.name for field in dataclasses.fields(Rollout)} | properties


def test_rows_of_a_sample_are_none_where_one_is_missing():
    routing = whole(len(TOKENS), 2)
    rollout = Rollout(
        "p", 0, "7", 0, np.arange(20), np.arange(10), np.zeros(10), ((20, 30, "7"),), "", "stop", routing, LAYOUT
    )
    assert rollout.routed_experts is routing.rows
    missing = dataclasses.replace(routing, missing=((3, 4),))
    assert dataclasses.replace(rollout, routing=missing).routed_experts is None
    assert dataclasses.replace(rollout, routing=None).routed_experts is None
