"""Loads without a server: arguments, prompts, times of requests, figures and the chart."""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from rayserve_moe.bench.chart import chart
from rayserve_moe.bench.client import Outcome
from rayserve_moe.bench.command import add_arguments
from rayserve_moe.bench.prompts import Prompt, RandomLengths, body_of, prompts_of_file, random_prompts
from rayserve_moe.bench.report import Reported, result_of, table_lines
from rayserve_moe.bench.running import starts_of
from rayserve_moe.cli import main

REPORTED = Reported(("ttft", "tpot", "itl", "e2el"), (50.0, 99.0), {"ttft": 150.0})


def answered(started: float, *arrivals: float, num_prompt: int = 3) -> Outcome:
    outcome = Outcome(started, [started + arrival for arrival in arrivals])
    outcome.num_prompt_tokens, outcome.num_output_tokens = num_prompt, len(arrivals)
    return outcome


def failed(error: str) -> Outcome:
    return Outcome(0.0, error=error, message=f"{error} in words")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--max-concurrency", "0"], "--max-concurrency must be at least 1"),
        (["--request-rate", "-1"], "--request-rate must be greater than 0"),
        (["--request-rate", "nan"], "--request-rate must be greater than 0"),
        (["--random-range-ratio", "1"], "--random-range-ratio must lie in [0, 1)"),
        (["--percentile-metrics", "ttft,latency"], "known metrics are ttft"),
        (["--metric-percentiles", "50,many"], "numbers separated by commas"),
        (["--metric-percentiles", "101"], "they lie in [0, 100]"),
        (["--goodput", "itl:5"], "METRIC:MILLISECONDS"),
        (["--goodput", "ttft"], "METRIC:MILLISECONDS"),
        (["--dataset-path", "/no/such.jsonl"], "--dataset-path /no/such.jsonl: no such file"),
        (["--dataset-name", "custom"], "no such file"),
        (["--result-dir", "/no/such"], "--result-dir /no/such: no such directory"),
        (["--plot", "/no/such/a.svg"], "--plot /no/such: no such directory"),
        (["--base-url", "ftp://x"], "not the address of a server"),
    ],
)
def test_wrong_arguments_are_one_sentence(capsys, arguments, message):
    assert main(["bench", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rayserve-moe bench: ") and message in line


def test_prompts_of_a_file_repeat_until_there_are_enough(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 3}\n\n"b"\n{"messages": [{"role": "user", "content": "c"}]}\n')
    found = prompts_of_file(path, num_prompts=5, max_tokens=7)
    messages = [{"role": "user", "content": "c"}]
    assert [prompt.content for prompt in found] == ["a", "b", messages, "a", "b"]
    assert [prompt.max_tokens for prompt in found] == [3, 7, 7, 3, 7]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prompts"),
        ("{", "line 1: not JSON"),
        ('"a"\n5\n', "line 2: neither"),
        ('{"prompt": ""}', "line 1: neither"),
        ('{"prompt": "a", "output_tokens": 0}', "line 1: output_tokens"),
        ('{"prompt": "a", "output_tokens": true}', "line 1: output_tokens"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        prompts_of_file(path, num_prompts=5, max_tokens=7)


def test_random_prompts_have_their_lengths_and_a_common_prefix():
    lengths = RandomLengths(prompt=100, output=20, prefix=8, range_ratio=0.5)
    found = random_prompts(lengths, num_prompts=400, vocab_size=50, seed=1)
    sizes, outputs = [len(prompt.ids) - 8 for prompt in found], [prompt.max_tokens for prompt in found]
    assert (min(sizes), max(sizes)) == (50, 150) and (min(outputs), max(outputs)) == (10, 30)
    assert len({tuple(prompt.ids[:8]) for prompt in found}) == 1
    assert {token for prompt in found for token in prompt.ids} == set(range(50))
    assert found == random_prompts(lengths, num_prompts=400, vocab_size=50, seed=1)
    assert found != random_prompts(lengths, num_prompts=400, vocab_size=50, seed=2)


def test_bodies_ask_for_streams_with_usage():
    def body(content, *, is_chat):
        return body_of(Prompt(content, 5), model="m", is_chat=is_chat, ignores_eos=True, temperature=0.5)

    text = body("a", is_chat=False)
    assert text["prompt"] == "a" and text["stream"] and text["stream_options"] == {"include_usage": True}
    assert (text["max_tokens"], text["temperature"], text["ignore_eos"]) == (5, 0.5, True)
    assert body([1, 2], is_chat=False)["prompt"] == [1, 2]
    messages = [{"role": "user", "content": "a"}]
    assert body("a", is_chat=True)["messages"] == body(messages, is_chat=True)["messages"] == messages
    with pytest.raises(ValueError, match="openai-chat"):
        body(messages, is_chat=False)


def starts(*arguments: str) -> np.ndarray:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return starts_of(parser.parse_args(arguments))


def test_requests_come_at_their_rate():
    assert not starts("--num-prompts", "5").any()
    for burstiness in ("0.5", "1", "100"):
        moments = starts("--num-prompts", "2001", "--request-rate", "20", "--burstiness", burstiness)
        assert moments[0] == 0 and moments[-1] == pytest.approx(100) and (np.diff(moments) >= 0).all()
        # Gamma intervals: their squared deviation is 1 / burstiness of the squared mean.
        spread = np.diff(moments).var() * 20**2 * float(burstiness)
        assert spread == pytest.approx(1, rel=0.25)
    one = starts("--num-prompts", "1", "--request-rate", "20")
    assert one.tolist() == [0]


def test_latencies_are_those_of_their_definitions():
    outcomes = [
        answered(0.0, 0.1, 0.2, 0.4),
        answered(1.0, 0.2),
        failed("HTTP 429"),
        failed("HTTP 429"),
        failed("timeout"),
    ]
    prompts = [Prompt("a", 3)] * 6
    result = result_of(outcomes, prompts=prompts, seconds=2.0, reported=REPORTED)
    assert (result["completed"], result["failed"], result["unsent"]) == (2, 3, 1)
    assert result["errors_by_kind"] == {"HTTP 429": 2, "timeout": 1}
    assert result["error_examples"] == {"HTTP 429": "HTTP 429 in words", "timeout": "timeout in words"}
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (6, 4)
    assert (result["request_throughput"], result["output_throughput"], result["total_token_throughput"]) == (1, 2, 5)
    assert result["mean_ttft_ms"] == pytest.approx(150) and result["p99_ttft_ms"] == pytest.approx(199)
    assert result["mean_tpot_ms"] == pytest.approx(150)  # of the answer with several tokens
    assert result["mean_itl_ms"] == pytest.approx(150) and result["median_itl_ms"] == pytest.approx(150)
    assert result["mean_e2el_ms"] == pytest.approx(300)
    assert result["request_goodput"] == pytest.approx(0.5) and result["max_concurrent_requests"] == 1
    text = "\n".join(table_lines(result, REPORTED))
    assert "2 x HTTP 429: HTTP 429 in words" in text and "Mean TTFT:" in text and "150.00" in text


def test_answers_in_progress_at_a_time_are_counted():
    outcomes = [answered(0.0, 1.0), answered(0.5, 1.0), answered(0.7, 0.1), answered(3.0, 1.0)]
    result = result_of(outcomes, prompts=[Prompt("a", 1)] * 4, seconds=4.0, reported=REPORTED)
    assert result["max_concurrent_requests"] == 3


@pytest.mark.parametrize(
    "outcomes", [[], [failed("timeout")], [answered(0.0, 0.1)], [answered(0.1 * n, 0.1, 0.3) for n in range(300)]]
)
def test_a_report_and_a_chart_can_be_made_of_any_outcomes(outcomes):
    result = result_of(outcomes, prompts=[Prompt("a", 1)] * len(outcomes), seconds=1.0, reported=REPORTED)
    json.dumps(result, allow_nan=False)
    assert list(table_lines(result, REPORTED))
    drawn = chart(outcomes, title="a < b & c")
    assert "nan" not in drawn and ElementTree.fromstring(drawn)[0].text == "a < b & c"
