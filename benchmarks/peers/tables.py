"""What a comparison with peers looks like as a table, and as a chart against the machine's bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.chart import Chart, Series
from benchmarks.figures import paired_ratio, rate, speed_ratio, spread
from benchmarks.markdown import markdown_table
from benchmarks.workloads import Workload

OURS = "ours"
NAMES = {"ours": "ours", "vllm": "vLLM", "llamacpp": "llama.cpp", "xla": "ours by XLA"}
DECODING = {"W1": 1.0, "W2": 16.0}
"""Workloads that mostly decode, with their streams."""
PREFILLING = "W3"


def peers(measured: Mapping[str, Any]) -> str:
    """Render rates of every side, W3 in prompt tokens; ratios to each peer; and the bound by bandwidth."""
    sides = [OURS, *measured["facts"]]
    others = sides[1:]
    rows = []
    for name, each in measured["workloads"].items():
        workload, runs = Workload(**each["workload"]), each["runs"]
        count = workload.total_prompt_tokens if name == PREFILLING else workload.total_new_tokens
        limit = measured["limits"].get(f"{DECODING[name]:.0f}") if name in DECODING else None
        row = [name, workload, "prompt" if name == PREFILLING else "output"]
        row += [rate(count, runs[side]) for side in sides]
        row += [speed_ratio(runs[OURS], runs[side]) for side in others]
        rows.append([*row, f"{limit:,.0f}" if limit else ""])
    heading = ["", "requests", "tokens/s of"]
    heading += [_title(side, measured["facts"]) for side in sides] + [f"ours / {NAMES[side]}" for side in others]
    bandwidth = measured["read_bytes_per_s"] / 1e9
    rates = markdown_table([*heading, f"bound: reading weights at {bandwidth:.1f} GB/s"], rows)
    return "\n\n".join([rates, *(_build(side, facts) for side, facts in measured["facts"].items() if "build" in facts)])


def _build(side: str, facts: Mapping[str, Any]) -> str:
    """Render how a peer was built, its environment and cores; paths are cut to their last part."""
    parts = [
        f"{name} {' '.join(value) if isinstance(value, list) else value}" for name, value in facts["build"].items()
    ]
    parts += [f"{name}={_last_parts(value)}" for name, value in facts["environment"].items()]
    return f"{NAMES[side]}: {'; '.join(parts)}; on cores {facts['cores']}."


def _last_parts(paths: str) -> str:
    return ":".join(Path(each).name for each in paths.split(":"))


def expert_reading(measured: Mapping[str, Any]) -> str:
    """Render gigabytes of experts that steps read each second, and its share of what the machine reads."""
    bandwidth = measured["read_bytes_per_s"]
    rows = []
    for count, each in measured["streams"].items():
        speeds = [each["bytes"] / seconds for seconds in each["seconds"]]
        milliseconds = spread(1e3 * seconds / measured["steps"] for seconds in each["seconds"])
        megabytes = f"{each['bytes'] / measured['steps'] / 1e6:,.0f}"
        rows.append(
            [count, megabytes, milliseconds, spread(each / 1e9 for each in speeds), paired_ratio(speeds, bandwidth)]
        )
    machine = spread(each / 1e9 for each in bandwidth)
    return markdown_table(["streams", "MB a step", "ms a step", "GB/s", f"of the machine's {machine}"], rows)


def narrow_kl(measured: Mapping[str, Any]) -> str:
    """Render KL between sides and dtypes, of tokens after random ones."""
    rows = [
        [name, f"{of['mean']:.1e}", f"{of['largest']:.1e}", f"{of['other']:.1%}"]
        for name, of in measured["compared"].items()
    ]
    title = f"{measured['size']}, {measured['tokens']} tokens"
    return markdown_table([title, "mean KL", "largest KL", "other top-1 tokens"], rows)


def peers_chart(measured: Mapping[str, Any]) -> dict[str, Chart]:
    """Return output tokens a second of 1 and 16 streams on every side, under the line that bandwidth draws."""
    workloads = {name: each for name, each in measured["workloads"].items() if name in DECODING}
    if not workloads:
        return {}
    series = [
        Series(
            NAMES[side],
            [
                (DECODING[name], rate(Workload(**each["workload"]).total_new_tokens, each["runs"][side]))
                for name, each in workloads.items()
            ],
        )
        for side in [OURS, *measured["facts"]]
    ]
    limit = [(float(count), spread([value])) for count, value in measured["limits"].items()]
    lines = [*series, Series("memory bandwidth", limit)]
    title = "Decoding in bfloat16 on two cores"
    return {"streams": Chart(title, "streams", "output tokens/s", lines, log_x=True, log_y=True)}


def _title(side: str, facts: Mapping[str, Any]) -> str:
    return f"{NAMES[side]} {facts[side]['version']}" if side in facts else NAMES[side]
