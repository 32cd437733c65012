"""Decisions beside routing rows in the binary form, over HTTP, against rows alone on a server without them.

    python -m benchmarks.decisions [--size small] [--repeats 5] [--out FILE.json]

Sides take turns, one call each per repeat, each time with another one first, on the same prompts and seeds; all must
give the same ids. Servers cache no prefixes, so that every run computes its prompts.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conditions import RESULTS, checkpoint_of, conditions, load_before_start, note, save
from benchmarks.engine_runs import in_turn
from benchmarks.figures import Run, speed_ratio
from benchmarks.table import tables
from benchmarks.weight_sending import serving
from benchmarks.workloads import FIRST_PLAIN_ID
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.rollouts.answers import SampleRequest
from rayserve_moe.rollouts.client import BlockingRolloutClient

SAMPLING = {"temperature": 1.0, "top_k": 40, "top_p": 0.95, "ignore_eos": True}
WITHOUT, WITH = "without gates", "with gates"
SIDES: dict[str, tuple[str, dict[str, bool]]] = {
    "rows": (WITHOUT, {}),
    "unasked": (WITH, {}),
    "gates": (WITH, {"returns_gates": True}),
    "masks": (WITH, {"returns_mask": True}),
    "gates_masks": (WITH, {"returns_gates": True, "returns_mask": True}),
}
"""Server and requested parts of each side."""


def run_side(client: BlockingRolloutClient, prompts: list[list[int]], fields: dict[str, bool], *, length: int) -> Any:
    """Sample every prompt; returns the run and the output ids."""
    requests = [
        SampleRequest(str(place), prompt, {**SAMPLING, "max_new_tokens": length}, seed=place, **fields)
        for place, prompt in enumerate(prompts)
    ]
    started = time.perf_counter()
    samples = [sample for of_prompt in client.generate(requests) for sample in of_prompt]
    seconds = time.perf_counter() - started
    for sample in samples:
        if sample.routed_experts is None or ("returns_gates" in fields) != (sample.router_gates is not None):
            raise RuntimeError("an answer has no rows, or not the gates that were requested")
        if ("returns_mask" in fields) != (sample.sampling_mask is not None):
            raise RuntimeError("an answer does not have the masks that were requested")
    return {"seconds": seconds}, [sample.output_ids.tolist() for sample in samples]


def differing(found: list[list[int]], wanted: list[list[int]]) -> list[tuple[int, int]]:
    """Return (prompt, first differing token) for each prompt whose outputs differ."""
    pairs = enumerate(zip(found, wanted, strict=True))
    return [(place, int(np.argmax(np.not_equal(a, b)))) for place, (a, b) in pairs if a != b]


def compare(
    clients: dict[str, BlockingRolloutClient], *, vocab_size: int, repeats: int, sizes: dict[str, int]
) -> dict[str, list[Run]]:
    """Run all sides in turn, after an uncounted round; returns the runs by side."""
    runs: dict[str, list[Run]] = {name: [] for name in SIDES}
    for repeat in range(-1, repeats):
        generator, ids = np.random.default_rng(repeat + 1), {}
        prompts = generator.integers(FIRST_PLAIN_ID, vocab_size, (sizes["num_prompts"], sizes["prompt_len"])).tolist()
        for name in in_turn(list(SIDES), repeat + 1):
            server, fields = SIDES[name]
            run, ids[name] = run_side(clients[server], prompts, fields, length=sizes["num_new_tokens"])
            runs[name].append(run)
        for name, found in ids.items():
            if different := differing(found, ids["rows"]):
                raise RuntimeError(f"outputs of {name} differ from those of rows at (prompt, token): {different}")
        ratios = (f"{name} {speed_ratio(runs[name][-1:], runs['rows'][-1:]).median:.3f}" for name in SIDES)
        note(f"{repeat + 1}/{repeats}: {', '.join(ratios)} of the speed of rows")
    return {name: each[1:] for name, each in runs.items()}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=["tiny", "small", "mid"], default="small")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "decisions.json")
    return parser.parse_args()


def main() -> None:
    """Measure, write the result file, print its tables."""
    arguments = parse_arguments()
    load_before, path = load_before_start(), checkpoint_of(arguments.size)
    sizes = {
        "num_prompts": arguments.prompts,
        "prompt_len": arguments.prompt_len,
        "num_new_tokens": arguments.new_tokens,
    }
    settings: dict[str, Any] = {
        "max_running_requests": arguments.prompts,
        "enable_prefix_caching": False,
        "enable_return_routed_experts": True,
    }
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(Engine(str(path), enable_return_router_gates=name == WITH, **settings))
            for name in (WITHOUT, WITH)
        }
        clients = {
            name: stack.enter_context(BlockingRolloutClient(stack.enter_context(serving(engine))))
            for name, engine in engines.items()
        }
        # Returns once an engine has compiled all its programs; compiling slows down the side that runs meanwhile.
        described = {
            name: conditions(engine, size=arguments.size, repeats=arguments.repeats, load_before=load_before)
            for name, engine in engines.items()
        }
        runs = compare(clients, vocab_size=engines[WITH].card.vocab_size, repeats=arguments.repeats, sizes=sizes)
        result = {
            **described[WITH],
            "decisions": {**sizes, "runs": runs},
        }
    save(result, arguments.out)
    print(tables(result))


if __name__ == "__main__":
    main()
