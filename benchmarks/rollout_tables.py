"""Tables of the measurements of rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.figures import paired_ratio, rate, speed_ratio, spread
from benchmarks.markdown import markdown_table
from rayserve_moe.replay.audit import PASSING

READING_TITLES = {
    "routing": "shards, routing alone",
    "everything": "shards, every column",
    "json": "JSON, routing alone in base64 of int32",
}
JOB_TITLES = {
    "engine": "the engine alone, in one process",
    "replica": "the engine alone, its worker in another process",
    "server": "the job against a server",
    "own": "the job with an engine of its own",
}


def rollout_reading(measured: Mapping[str, Any]) -> str:
    """Render seconds until there is an array per rollout, and how many times as long JSON takes."""
    seconds, sizes = measured["seconds"], measured["bytes"]
    rows = [
        [title, f"{sizes['json' if side == 'json' else 'shards'] / 1e6:,.0f}"]
        + [f"{figure:.3f}" for figure in vars(spread(seconds[side])).values()]
        + [paired_ratio(seconds["json"], seconds[side])]
        for side, title in READING_TITLES.items()
    ]
    tokens, layers, top_k = measured["rows"]
    title = f"{measured['rollouts']:,} rollouts x {tokens} tokens x {layers} layers x top {top_k}"
    return markdown_table([title, "files, MB", "s", "least", "greatest", "JSON / this"], rows)


AUDIT_TITLES = {
    "native": "the server that sampled: bfloat16, native",
    "bfloat16": "bfloat16 by XLA",
    "float32": "float32 by XLA",
}


def audit(measured: Mapping[str, Any]) -> str:
    """Render verdicts about right samples by each auditor with its seconds, and where planted faults were found."""
    rows = [
        [
            AUDIT_TITLES[side],
            f"{sum(each['verdicts'].values()):,}",
            f"{1 - sum(each['verdicts'].get(name, 0) for name in PASSING) / sum(each['verdicts'].values()):.2%}",
            f"{each['differing'] / each['decisions']:.3%}",
            f"{each['max_logprob_difference']:.1e}",
            f"{1000 * each['seconds']['audit'] / each['tokens']:.2f}",
            f"{each['seconds']['audit'] / each['seconds']['scores']:.2f}",
        ]
        for side, each in measured["sides"].items()
    ]
    heads = ["samples", "failing", "decisions that differ", "log-probs, at most", "s / 1,000 tokens", "/ plain scores"]
    faults = [[name, each["samples"], each["failing"], each["located"]] for name, each in measured["faults"].items()]
    return "\n\n".join(
        [
            markdown_table(["right samples, by", *heads], rows),
            markdown_table(["planted fault", "samples", "failing", "found at its token and layer"], faults),
        ]
    )


TEACHER_TITLES = {
    "scores": "log-probs of the tokens",
    "top": "and the 8 likeliest tokens",
    "states": "and states of two layers",
    "rows": "and routing rows",
    "all": "all of them",
}


def teacher(measured: Mapping[str, Any]) -> str:
    """Render tokens per second of a teacher's pass, with the bytes of its answer."""
    plain = measured["seconds"]["scores"]
    rows = [
        [
            title,
            f"{measured['tokens'] / spread(measured['seconds'][side]).median:,.0f}",
            paired_ratio(measured["seconds"][side], plain),
            f"{measured['bytes'][side] / measured['tokens']:,.0f}",
        ]
        for side, title in TEACHER_TITLES.items()
    ]
    title = f"{measured['tokens']:,} tokens, `{measured['size']}`, {measured['width']} wide"
    return markdown_table([title, "tokens/s", "time / log-probs alone", "bytes/token"], rows)


def decision_paths(measured: Mapping[str, Any]) -> str:
    """Render the tokens of each part by path, and how many of them differ or are missing."""
    parts = list(dict.fromkeys(part for counts in measured["paths"].values() for part in counts))
    states = ("equal", "differing", "missing")
    total = {part: Counter[str]() for part in parts}
    rows = []
    for path, counts in measured["paths"].items():
        sums = [sum(counts.get(part, {}).get(state, 0) for state in states) for part in parts]
        rows.append([path, *(f"{count:,}" if count else "" for count in sums)])
        for part in parts:
            total[part].update(counts.get(part, {}))
    for title, counted in (("all", states), ("differing", states[1:2]), ("missing", states[2:])):
        rows.append([title, *(f"{sum(total[part][state] for state in counted):,}" for part in parts)])
    return markdown_table(["tokens", *parts], rows)


def rollout_job(measured: Mapping[str, Any]) -> str:
    """Render output tokens per second of the same samples, and each side's share of the engine's."""
    runs, num_tokens = measured["runs"], measured["output_tokens"]
    rows = [
        [
            JOB_TITLES[side],
            rate(num_tokens, each),
            speed_ratio(each, runs["engine"]),
            speed_ratio(each, runs["replica"]),
        ]
        for side, each in runs.items()
    ]
    prompts = "sums" if measured["sums"] else f"prompts of {measured['prompt_len']}"
    num_each = num_tokens / measured["prompts"] / measured["n"]
    title = f"{measured['prompts']} {prompts}, n = {measured['n']}, {num_each:.0f} out in the mean"
    return markdown_table([title, "output tokens/s", "/ one process", "/ two processes"], rows)
