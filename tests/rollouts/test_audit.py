"""`rayserve-moe audit` over rollout shards: right samples pass, wrong ones are named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rayserve_moe.cli import main
from rayserve_moe.rollouts.answers import SampleRequest
from rayserve_moe.rollouts.client import BlockingRolloutClient
from rayserve_moe.rollouts.schema import Rollout
from rayserve_moe.rollouts.shards import RolloutDirectory
from tests.support.serving.http_server import KEY


@pytest.fixture
def sampled(url: str) -> list[Rollout]:
    requests = [
        SampleRequest(f"p{i}", list(range(20 + i, 40)), {"max_new_tokens": 12, "ignore_eos": True}, seed=i, count=2)
        for i in range(3)
    ]
    with BlockingRolloutClient(url, api_key=KEY) as client:
        return [sample for samples in client.generate(requests) for sample in samples]


def written(directory: Path, rollouts: list[Rollout], **sampling: float) -> Path:
    with RolloutDirectory(directory) as shards:
        shards.agree({"sampling": sampling})
        shards.write_rollouts(rollouts)
    return directory


def late(rollout: Rollout) -> Rollout:
    """Return the rollout with every row delayed by a token."""
    assert rollout.routing is not None
    rows = np.concatenate([rollout.routing.rows[:1], rollout.routing.rows[:-1]])
    return replace(rollout, routing=replace(rollout.routing, rows=rows))


def test_right_shards_pass(url: str, sampled: list[Rollout], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shards, out, plot = written(tmp_path / "right", sampled), tmp_path / "report.json", tmp_path / "chart.svg"
    command = ["audit", str(shards), "--server", url, "--batch", "4", "--out", str(out), "--plot", str(plot)]
    assert main(command) == 0
    report = json.loads(out.read_text())
    assert report["verdicts"] == {"right": 6} and len(report["samples"]) == 6
    assert report["num_tokens"] == sum(len(each.prompt_ids) + 12 for each in sampled)
    assert report["logprobs_audited"] and report["seconds"] > 0
    printed = capsys.readouterr().out
    assert "6 samples of weight version 0: 6 right" in printed and "s per 1,000" in printed
    assert plot.read_text().startswith("<svg")


def test_wrong_samples_are_named(url: str, sampled: list[Rollout], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shards, out, plot = tmp_path / "wrong", tmp_path / "report.json", tmp_path / "chart.svg"
    written(shards, [late(each) if each.prompt_id == "p1" else each for each in sampled])
    command = ["audit", str(shards), "--server", url, "--out", str(out), "--plot", str(plot)]
    assert main(command) == 1
    report = json.loads(out.read_text())
    assert report["verdict"] == "shifted rows" and report["verdicts"] == {"right": 4, "shifted rows": 2}
    assert {each["prompt_id"] for each in report["samples"] if each["verdict"] != "right"} == {"p1"}
    printed = capsys.readouterr().out
    assert "p1 sample 0: shifted rows from token" in printed and "rows of tokens -1" in printed
    assert "2 shifted rows" in plot.read_text()
    assert main(["audit", str(shards), "--server", url, "--max-samples", "1"]) == 0
    assert main(["audit", str(shards), "--server", url, "--gates"]) == 2
    assert "gates are missing" in capsys.readouterr().err


def test_masks_of_shards_are_audited(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sampling = {"max_new_tokens": 12, "ignore_eos": True, "top_k": 20}
    request = SampleRequest("p", list(range(20, 40)), sampling, seed=1, count=2, returns_mask=True)
    with BlockingRolloutClient(url, api_key=KEY) as client:
        first, second = client.generate([request])[0]
    assert main(["audit", str(written(tmp_path / "right", [first, second])), "--server", url]) == 0
    wrong = replace(first, sampling_mask=second.sampling_mask)
    assert main(["audit", str(written(tmp_path / "wrong", [wrong])), "--server", url]) == 1
    assert "p sample 0: wrong mask at token" in capsys.readouterr().out


def test_log_probs_of_another_temperature_are_left_out(
    url: str, sampled: list[Rollout], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Log-probs here are of another temperature, as the job says, so they are not audited."""
    wrong = [replace(each, logprobs=each.logprobs - 1) for each in sampled]
    hot, plain = written(tmp_path / "hot", wrong, temperature=0.7), written(tmp_path / "plain", wrong)
    assert main(["audit", str(hot), "--server", url]) == 0
    assert "left out" in capsys.readouterr().out
    assert main(["audit", str(plain), "--server", url]) == 1
    assert "wrong log-probs" in capsys.readouterr().out
    assert main(["audit", str(plain), "--server", url, "--no-logprobs"]) == 0


def test_what_cannot_be_audited_is_refused(
    url: str, sampled: list[Rollout], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert sampled[0].routing is not None and sampled[0].layout is not None
    versions = tuple((first, last, "7") for first, last, _ in sampled[0].logprob_versions)
    label = ((0, len(sampled[0].routing.rows), "7"),)
    other = replace(
        sampled[0],
        weight_version="7",
        logprob_versions=versions,
        routing=replace(sampled[0].routing, weight_version=label),
    )
    missing = replace(sampled[0], routing=replace(sampled[0].routing, missing=((3, 4),)))
    model = replace(sampled[0], layout=replace(sampled[0].layout, num_experts=99))
    for name, rollout, message in (
        ("version", other, "another weight version than the served one, '0'"),
        ("mixed", replace(other, logprob_versions=sampled[0].logprob_versions), "several weight versions"),
        ("missing", missing, "rows are missing"),
        ("none", replace(sampled[0], routing=None, layout=None), "no rows of routing"),
        ("model", model, "other layers or experts"),
    ):
        assert main(["audit", str(written(tmp_path / name, [rollout])), "--server", url]) == 2, name
        assert message in capsys.readouterr().err, name
    shards = str(tmp_path / "version")
    for arguments, message in (
        (["--weight-version", "8"], "no samples of weight version '8'"),
        (["--batch", "0"], "--batch"),
        (["--max-samples", "-1"], "--max-samples"),
        (["--tie-tolerance", "nan"], "--tie-tolerance"),
        (["--out", str(tmp_path / "nowhere" / "x.json")], "is not a directory"),
    ):
        assert main(["audit", shards, "--server", url, *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main(["audit", shards, "--server", "http://127.0.0.1:9"]) == 2
