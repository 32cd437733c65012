"""Scoring pass of a teacher: log-probs alone, and with likeliest tokens, layer states and rows.

    python -m benchmarks.teacher [--prompts 64] [--tokens 256] [--repeats 5] [--size tiny] [--out FILE.json]

All prompts of a request are scored at once over HTTP, in a random checkpoint with native kernels where they run. Sides
take turns.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.conditions import RESULTS, checkpoint_of, load_before_start, machine_facts, note, save
from benchmarks.rollout_tables import teacher as as_table
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from tests.support.serving.http_server import running

TOP, ROWS = {"top_logprobs_num": 8}, {"return_routed_experts": True}
SIDES: dict[str, dict[str, Any]] = {
    "scores": {},
    "top": TOP,
    "states": {"return_layer_states": True},
    "rows": ROWS,
    "all": {**TOP, **ROWS, "return_layer_states": True},
}


def seconds_of(url: str, prompts: list[list[int]], fields: dict[str, Any]) -> tuple[float, int]:
    """Return the seconds from the request to the scored answer, and the answer's bytes."""
    body = {
        "input_ids": prompts, "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True, "logprob_start_len": 0, **fields,
    }  # fmt: skip
    started = time.perf_counter()
    answer = httpx.post(f"{url}/generate", json=body, timeout=600)
    seconds = time.perf_counter() - started
    answer.raise_for_status()
    return seconds, len(answer.content)


def main() -> None:
    """Measure, print the table, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--out", type=Path, default=RESULTS / "teacher.json")
    arguments = parser.parse_args()
    machine = machine_facts(load_before_start())
    prompts = np.random.default_rng(0).integers(3, 250, (arguments.prompts, arguments.tokens)).tolist()
    settings = {
        "enable_return_routed_experts": True, "hidden_state_layers": [1, 2], "max_step_tokens": 512,
        "num_pages": 4096, "max_model_len": 2 * arguments.tokens,
    }  # fmt: skip
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    num_bytes = {}
    with Engine(str(checkpoint_of(arguments.size)), **settings) as engine:
        with running(create_api(ApiState(engine.loop, engine.tokenizer))) as url:
            for repeat in range(arguments.repeats + 1):  # the first one fills caches of the process
                for side, fields in SIDES.items():
                    engine.loop.flush()
                    taken, num_bytes[side] = seconds_of(url, prompts, fields)
                    seconds[side] += [taken] if repeat else []
                note(f"repeat {repeat}: {seconds}")
        result = {
            "machine": machine, "size": arguments.size, "tokens": arguments.prompts * arguments.tokens,
            "layers": len(settings["hidden_state_layers"]), "width": engine.card.evidence.state_size,
            "seconds": seconds, "bytes": num_bytes,
        }  # fmt: skip
        save({"teacher": result}, arguments.out)
    print(as_table(result))


if __name__ == "__main__":
    main()
