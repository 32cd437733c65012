"""Tables of the measurements of rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.figures import paired_ratio, rate, speed_ratio, spread
from benchmarks.markdown import markdown_table

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
    """Seconds until there is an array per rollout, and how many times as long JSON takes."""
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


def rollout_job(measured: Mapping[str, Any]) -> str:
    """Output tokens per second of the same samples, and each side's share of the engine's."""
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
