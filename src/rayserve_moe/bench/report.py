"""Figures of a load: latencies in ms, throughput, and errors by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayserve_moe.bench.client import Outcome
from rayserve_moe.bench.prompts import Prompt

TITLES = {
    "ttft": "Time to first token (TTFT)",
    "tpot": "Time per output token after the first (TPOT)",
    "itl": "Time between tokens (ITL)",
    "e2el": "End-to-end latency (E2EL)",
}
MS = 1e3
_WIDTH = 58


@dataclass(frozen=True)
class Reported:
    """What is reported of latencies."""

    metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    goodput: Mapping[str, float]
    """Maximum ms of a request that counts for goodput, by metric."""


def latencies_of(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Return the seconds of complete answers, by metric."""
    done = [one for one in outcomes if one.is_ok]
    return {
        "ttft": [one.ttft for one in done],
        "tpot": [one.tpot for one in done if one.tpot is not None],
        "itl": [itl for one in done for itl in one.itls],
        "e2el": [one.e2el for one in done],
    }


def result_of(
    outcomes: Sequence[Outcome], *, prompts: Sequence[Prompt], seconds: float, reported: Reported
) -> dict[str, Any]:
    """Return the result of a run, with the keys of `vllm bench serve`."""
    done = [one for one in outcomes if one.is_ok]
    num_input = sum(one.num_prompt_tokens for one in done)
    num_output = sum(one.num_output_tokens for one in done)
    errors = Counter(one.error for one in outcomes if not one.is_ok)
    examples = {one.error: one.message for one in reversed(outcomes) if not one.is_ok}
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "unsent": len(prompts) - len(outcomes),
        "errors_by_kind": dict(errors.most_common()),
        "error_examples": examples,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        "max_concurrent_requests": _max_concurrent(done),
    }
    if reported.goodput:
        result["request_goodput"] = sum(_is_good(one, reported.goodput) for one in done) / seconds
    for metric, found in latencies_of(outcomes).items():
        if metric in reported.metrics:
            result |= _statistics(metric, found, reported.percentiles)
    return result


def _statistics(metric: str, seconds: list[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    ms = np.asarray(seconds) * MS
    names = [f"p{percentile:g}" for percentile in percentiles]
    if not len(ms):
        return {f"{name}_{metric}_ms": None for name in ("mean", "median", "std", *names)}
    values = {"mean": ms.mean(), "median": np.median(ms), "std": ms.std()}
    values |= dict(zip(names, np.percentile(ms, percentiles), strict=True))
    return {f"{name}_{metric}_ms": float(value) for name, value in values.items()}


def _is_good(outcome: Outcome, bounds: Mapping[str, float]) -> bool:
    return all((getattr(outcome, metric) or 0.0) * MS <= bound for metric, bound in bounds.items())


def _max_concurrent(done: Sequence[Outcome]) -> int:
    """Return the largest number of answers that were in progress at a time."""
    changes = sorted([(one.started, 1) for one in done] + [(one.arrivals[-1], -1) for one in done])
    return int(max(np.cumsum([change for _, change in changes]), default=0))


def table_lines(result: Mapping[str, Any], reported: Reported) -> Iterator[str]:
    """Yield the result for a terminal."""
    yield f"{' Result of the load ':=^{_WIDTH}}"
    counts = {
        "Requests completed": result["completed"],
        "Requests failed": result["failed"],
        "Duration (s)": result["duration"],
        "Input tokens": result["total_input_tokens"],
        "Output tokens": result["total_output_tokens"],
        "Requests per second": result["request_throughput"],
        "Output tokens per second": result["output_throughput"],
        "Tokens per second": result["total_token_throughput"],
        "Most requests in flight": result["max_concurrent_requests"],
    }
    if result["unsent"]:
        counts["Requests without an end"] = result["unsent"]
    if reported.goodput:
        counts["Goodput, requests per second"] = result["request_goodput"]
    yield from (_row(name, value) for name, value in counts.items())
    for metric in reported.metrics:
        yield f"{f' {TITLES[metric]}, ms ':-^{_WIDTH}}"
        for name in ("mean", "median", *(f"p{percentile:g}" for percentile in reported.percentiles)):
            yield _row(f"{name.capitalize()} {metric.upper()}", result[f"{name}_{metric}_ms"])
    if result["errors_by_kind"]:
        yield f"{' Errors ':-^{_WIDTH}}"
        for kind, count in result["errors_by_kind"].items():
            yield f"{count} x {kind}: {result['error_examples'][kind]}"
    yield "=" * _WIDTH


def _row(name: str, value: float | None) -> str:
    shown = "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
    return f"{name + ':':<{_WIDTH - 18}}{shown:>18}"
