"""Rows that peers have measured on TPUs, on the computed clock: scheduler and steps with prefill, sampling and host.

    python -m benchmarks.published_rows [--only NAME] [--out FILE.json]

As many requests as a row names run at once, each replaced when it ends; the product's own scheduler plans every step,
and the estimate of `rayserve-moe plan-slice` says how long it takes on the best split of the slice. No TPU is needed,
and nothing of ours was measured. Takes seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.markdown import markdown_table
from benchmarks.simulation.costs import EstimatedSteps
from benchmarks.simulation.replica import SimulatedReplica
from benchmarks.simulation.workloads import FIRST_ID, LAST_ID
from rayserve_moe.config.load import set_environment_defaults
from rayserve_moe.config.settings import ExpertSettings
from rayserve_moe.execution.weights.placing import model_config
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.scheduling.scheduler import StepLimits
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.tools.compile_check import COMPILER_ENVIRONMENT, use_host_alone
from rayserve_moe.tools.estimate.rates import STEP_SPREAD
from rayserve_moe.tools.plan_slice.candidates import Candidate
from rayserve_moe.tools.plan_slice.command import ranked
from rayserve_moe.tools.plan_slice.made_up import resized
from rayserve_moe.tools.plan_slice.options import Assumptions, Traffic
from rayserve_moe.tools.presets import read_config
from rayserve_moe.tools.served_cases import devices_of

KEY = "published_rows"
RESULTS = Path(__file__).parent / "results" / "published_rows.json"
PAGE_SIZE, STEP_TOKENS, ROUNDS = 128, 1024, 3
HOST_S = 0.3e-3
"""Host time of a step that the device does not hide: all of a decode step of 256 sequences (`host_time`)."""
CODER = {"layers": 62, "width": 6144, "heads": 96, "kv_heads": 8, "experts": 160, "top_k": 8, "expert_width": 2560}
"""Sizes of Qwen3-Coder-480B."""


@dataclass(frozen=True)
class Row:
    """A run that a peer has published."""

    model: str
    topology: str
    requests: int
    tokens_per_s: float
    """Output tokens of all chips."""
    token_ms: float
    """Between tokens of a request."""
    source: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes in place of the model's."""
    prompt: int = 1024
    output: int = 1024
    expert_dtype: str = "auto"


COOKBOOK = "sglang-jax, cookbook"
ROWS = {
    "30B, 4 v7x, 128": Row("qwen3-30b-a3b", "tpu7x:2x2x1", 128, 6179, 18.9, COOKBOOK),
    "30B, 16 v6e, 16": Row("qwen3-30b-a3b", "v6e:4x4", 16, 1476, 10.8, COOKBOOK),
    "GLM-4.5-Air, 4 v7x, 128": Row("glm-4.5-air", "tpu7x:2x2x1", 128, 4013, 28.8, COOKBOOK),
    "Qwen3-Coder-480B fp8, 4 v7x, 64": Row(
        "qwen3-235b-a22b", "tpu7x:2x2x1", 64, 1996, 32.1, "tpu-recipes", CODER, expert_dtype="fp8"
    ),
}
"""Prompts and answers are of 1,024 tokens. Time between tokens of the last row: requests / tokens per second."""


@dataclass
class Request:
    """When the tokens of a request came."""

    arrived_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0


class HostAndDevices:
    """Steps of a slice, with the host's part of each beside them."""

    def __init__(self, steps: EstimatedSteps) -> None:
        self._steps, self.request_s = steps, steps.request_s

    def seconds(self, load: Any) -> float:
        """Return the seconds from one step's results to the next's."""
        return self._steps.seconds(load) + HOST_S


def best_of(row: Row) -> Candidate:
    """Return the best split of the slice for a row's traffic. Raises ValueError if the model does not fit."""
    given = Assumptions(prefill_tokens=STEP_TOKENS, expert_dtype=row.expert_dtype)
    traffic = Traffic(row.prompt, row.output, row.requests)
    candidates = ranked(spec_of(row), [row.topology], traffic=traffic, given=given)
    if not candidates:
        raise ValueError(f"{row.model} does not fit {row.topology}")
    return candidates[0]


def spec_of(row: Row) -> Any:
    """Return the model of a row."""
    config = read_config(row.model)
    return spec_from_config(resized(config, row.sizes) if row.sizes else config)


def run(row: Row) -> dict[str, Any]:
    """Play a row on the computed clock; returns rates and times of requests that arrived after the first round."""
    best = best_of(row)
    devices = devices_of(row.topology)
    experts = ExpertSettings(num_redundant=best.split.redundant, weight_dtype=row.expert_dtype)
    model = model_config(spec_of(row), plan_for(devices, data_size=best.split.dp), experts=experts)
    steps = EstimatedSteps(model, topology=row.topology, imbalance=best.imbalance)
    length = row.prompt + row.output
    limits = StepLimits(
        num_rows=best.split.rows,
        step_tokens=STEP_TOKENS,
        chunk_tokens=STEP_TOKENS,
        page_size=PAGE_SIZE,
        num_pages=best.split.rows * (length // PAGE_SIZE + 1) + 1,
        max_tokens=length + 1,
        num_data_ranks=best.split.dp,
    )
    ended = closed_loop(SimulatedReplica(limits, HostAndDevices(steps)), row)
    return {"split": asdict(best.split), **figures_of(ended, num_requests=row.requests)}


def closed_loop(replica: SimulatedReplica, row: Row) -> list[Request]:
    """Keep a row's requests running, each replaced when it ends; returns those that ended."""
    draw = np.random.default_rng(0)
    running: dict[Sequence, Request] = {}
    ended: list[Request] = []
    started = 0

    def begin(now: float) -> None:
        nonlocal started
        prompt = draw.integers(FIRST_ID, LAST_ID, row.prompt).astype(np.int32)
        running[replica.add(str(started), prompt, num_answer=row.output)] = Request(now)
        started += 1

    for _ in range(row.requests):
        begin(0.0)
    while len(ended) < ROUNDS * row.requests:
        given, done = replica.step(replica.clock.now)
        for sequence in given:
            request = running[sequence]
            request.first_s = request.first_s or replica.clock.now
            request.last_s, request.num_tokens = replica.clock.now, request.num_tokens + 1
        for sequence in done:
            ended.append(running.pop(sequence))
            begin(replica.clock.now)
    return ended


def figures_of(ended: list[Request], *, num_requests: int) -> dict[str, float]:
    """Return rates and times of the requests after the first `num_requests`."""
    steady = ended[num_requests:]
    span = max(one.last_s for one in steady) - min(one.arrived_s for one in steady)
    return {
        "tokens_per_s": sum(one.num_tokens for one in steady) / span,
        "token_s": statistics.mean((one.last_s - one.first_s) / (one.num_tokens - 1) for one in steady),
        "first_token_s": statistics.median(one.first_s - one.arrived_s for one in steady),
    }


def published_rows(rows: Mapping[str, Any]) -> str:
    """Return a row per published run, with ours beside it."""
    heading = ["model, chips, requests", "split, rows", "published: tok/s", "a token, ms", "source"]
    heading += ["computed: tok/s", "a token, ms", "first token, ms", "computed / published"]
    return markdown_table(heading, [_row(ROWS[name], name, found) for name, found in rows.items() if name in ROWS])


def _row(row: Row, name: str, found: Mapping[str, Any]) -> list[str]:
    low, high = STEP_SPREAD.min_ratio, STEP_SPREAD.max_ratio
    split, rate, token_s = found["split"], found["tokens_per_s"], found["token_s"]
    return [
        name,
        f"{split['dp']} x {split['tp']}, {split['rows']}",
        f"{row.tokens_per_s:,.0f}",
        f"{row.token_ms:.1f}",
        row.source,
        f"{rate / high:,.0f} to {rate / low:,.0f}",
        f"{token_s * low * 1e3:.1f} to {token_s * high * 1e3:.1f}",
        f"{found['first_token_s'] * 1e3:,.0f}",
        f"{rate / high / row.tokens_per_s:.1f} to {rate / low / row.tokens_per_s:.1f}",
    ]


def main() -> None:
    """Compute every row, writing the result file after each; then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(ROWS), action="append", help="may be given more than once")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    set_environment_defaults(COMPILER_ENVIRONMENT)
    use_host_alone()
    known = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {KEY: {}}
    for name in arguments.only or ROWS:
        known[KEY][name] = run(ROWS[name])
        known[KEY] = {row: known[KEY][row] for row in ROWS if row in known[KEY]}
        arguments.out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(published_rows(known[KEY]))


if __name__ == "__main__":
    main()
