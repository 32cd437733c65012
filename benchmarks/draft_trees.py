"""Tokens per verification and per second with trees of drafts, with chains and without drafts: the calculator with its
EAGLE3 head, as served.

    python -m benchmarks.draft_trees --head DIRECTORY [--problems 128]

The head is one of `python -m examples.train_drafts --out DIRECTORY`. Problems are held-out ones, answered at
temperature 0, 0.7 and 1; every step has drafts. Whatever drafts, the answers must be the same.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from examples.calculator.problems import END, MIX, draw
from rayserve_moe import Engine
from rayserve_moe.engine.speculation.model_drafts import ModelProposer
from rayserve_moe.requests.records import GenerationRequest
from tests.support.engine.run_requests import Way, cycle_for, run_on, speculation_of
from tests.support.engine.workload import request_for

SHAPES: dict[str, dict[str, int]] = {
    "chain of 3": {"speculative_num_steps": 3},
    "tree of 3 levels, 8 nodes": {"speculative_num_steps": 3, "speculative_num_draft_tokens": 8},
    "tree of 3 levels, 16 nodes": {"speculative_num_steps": 3, "speculative_num_draft_tokens": 16},
}
CHILDREN, ROWS, TEMPERATURES = 4, 4, (0.0, 0.7, 1.0)
LEAST_DIGITS = 3
"""Of answers: the first comes without drafts, and what follows on the last cannot be right."""
SETTINGS = {
    "dtype": "float32",
    "cpu_kernels": "off",
    "max_model_len": 64,
    "max_running_requests": ROWS,
    "max_step_tokens": 32 * ROWS,
    "precompile_bs_paddings": [4],
    "page_size": 16,
    "num_pages": 200,
    "structured_output": False,
    "speculative_algorithm": "EAGLE3",
}


def requests_of(num_problems: int, temperature: float) -> list[GenerationRequest]:
    """Held-out problems with long answers, each with a seed of its own."""
    generator = random.Random(0)
    tasks, shares = zip(*MIX, strict=True)
    requests = []
    while len(requests) < num_problems:
        problem = draw(generator.choices(tasks, shares)[0], generator, held_out=True)
        if len(problem.answers[0]) < LEAST_DIGITS:
            continue
        i = len(requests)
        prompt = np.frombuffer(problem.prompt.encode(), np.uint8)
        how = {"max_new_tokens": 16, "temperature": temperature, "seed": i, "stop_token_ids": (ord(END),)}
        requests.append(request_for(prompt, f"{i}", return_routed_experts=False, **how))
    return requests


Measured = tuple[dict[float, float], dict[float, float], dict[float, dict]]
"""Tokens per verification, tokens per second, and answers, each by temperature."""


def measured(head: Path, shape: str, *, num_problems: int) -> Measured:
    """Answer the problems with drafts of a shape, after a few that are not measured."""
    tree = {"speculative_eagle_topk": CHILDREN} if "speculative_num_draft_tokens" in SHAPES[shape] else {}
    lengths, speeds, answers = {}, {}, {}
    given = {**SETTINGS, **SHAPES[shape], **tree, "speculative_draft_model_path": str(head)}
    with Engine(model_path="trained:calculator", **given) as engine:
        speculation = engine.runner.served.settings.speculation
        for temperature in TEMPERATURES:
            requests = requests_of(num_problems, temperature)
            way = Way(
                num_rows=ROWS,
                step_tokens=32,
                chunk_tokens=32,
                num_pages=200,
                with_capture=False,
                proposer=ModelProposer("drafts"),
            )
            cycle = cycle_for(engine.runner, engine.card, replace(way, num_drafts=speculation.max_drafts))
            run_on(cycle, engine.card, requests[:ROWS])
            started = time.perf_counter()
            found = run_on(cycle, engine.card, requests)
            num_tokens = sum(len(outcome.ids) for outcome in found.values())
            speeds[temperature] = num_tokens / (time.perf_counter() - started)
            cycle.scheduler.flush()
            totals = speculation_of(cycle).totals
            lengths[temperature] = 1 + totals.accepted / totals.chains
            answers[temperature] = {key: outcome.ids for key, outcome in found.items()}
    return lengths, speeds, answers


def main() -> None:
    """Measure, and print a line of JSON per shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--problems", type=int, default=128)
    asked = parser.parse_args()
    first = None
    for shape in SHAPES:
        lengths, speeds, answers = measured(asked.head, shape, num_problems=asked.problems)
        first = first or answers
        if answers != first:
            raise RuntimeError(f"{shape}: answers differ")
        figures = {"tokens_per_verification": lengths, "tokens_per_second": speeds}
        print(json.dumps({"shape": shape, **figures}), flush=True)


if __name__ == "__main__":
    main()
