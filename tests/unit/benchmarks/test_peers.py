"""Peers rest while they are not asked, and what bandwidth allows follows from the sizes of a model."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict

import pytest

from benchmarks.peers.bandwidth import bytes_per_step, most_tokens_per_s
from benchmarks.peers.process import PeerProcess
from benchmarks.workloads import Workload
from rayserve_moe.checkpoints.synthetic import PRESETS
from rayserve_moe.model.families.qwen3_moe import spec_from_hf
from rayserve_moe.model.parameters import parameter_specs

COUNTING = """
import json, sys, threading, time
ticks = [0]
def tick():
    while True:
        ticks[0] += 1
        time.sleep(0.001)
threading.Thread(target=tick, daemon=True).start()
print(json.dumps({"version": sys.argv[1]}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    count = len(request["prompts"]) * request["n"] * request["num_new_tokens"] - request["seed"]
    print(json.dumps({"seconds": 0.5, "num_new_tokens": count, "ticks": ticks[0]}), flush=True)
"""
WORKLOAD = Workload(2, 3, 4)
PROMPTS = [[1, 2, 3], [4, 5, 6]]


@pytest.fixture
def peer():
    with PeerProcess([sys.executable, "-c", COUNTING, "a-model"], environment={}) as started:
        yield started


def test_a_peer_rests_between_its_runs(peer: PeerProcess):
    assert peer.facts == {"version": "a-model"}
    before = peer.run(WORKLOAD, PROMPTS, seed=0)
    time.sleep(0.5)
    after = peer.run(WORKLOAD, PROMPTS, seed=0)
    assert after["seconds"] == 0.5
    assert after["ticks"] - before["ticks"] < 100, "half a second has 500 ticks"


def test_a_peer_that_does_less_is_refused(peer: PeerProcess):
    with pytest.raises(RuntimeError, match="7 tokens came out"):
        peer.run(WORKLOAD, PROMPTS, seed=1)


def test_a_peer_that_ends_is_told():
    with pytest.raises(RuntimeError, match="has ended"):
        PeerProcess([sys.executable, "-c", ""], environment={})


@pytest.mark.parametrize("size", ["small", "mid"])
def test_a_step_of_many_streams_reads_every_weight(size):
    config = asdict(PRESETS[size])
    tree = parameter_specs(spec_from_hf(config), dtype="bfloat16")
    per_token = ("table_VD", "final_norm_D", "norm_LD", "q_norm_Lh", "k_norm_Lh", "scale", "router_MDE")
    sizes = {name: param for group in tree.values() for name, param in group.items() if name not in per_token}
    total = 0
    for param in sizes.values():
        elements = 2
        for dim in param.shape:
            elements *= dim
        total += elements
    assert bytes_per_step(config, 10_000) == pytest.approx(total)
    few = bytes_per_step(config, 1)
    assert few < bytes_per_step(config, 2) < total
    assert most_tokens_per_s(config, 1, bytes_per_s=few) == 1.0
