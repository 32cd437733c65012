"""Steps with drafts that are right with a known probability, against plain ones: tokens per second.

    python -m benchmarks.speculation [--size small] [--streams 1 4 16] [--shares 0.5 0.7 0.9 0.95] [--tokens 256 192 96]

One device, sides in turn over one runner. An oracle that knows the plain answers drafts; 1, 3, 5 and 7 are fixed
numbers of drafts and run once, `chosen` is what the server does, from its start. Every side must give the same ids.
The clock starts when all prompts are computed.

`of the bound`: how many times as fast as plain steps it was, over accepted length x t(1) / t(k + 1), summed over steps
of different k; t(n) are plain steps of n sequences, timed in the same run ahead of the sides. Drifts of the machine
between a side and its plain neighbour cancel, those within t(n) do not. Results are added to those that the file has of
the same size.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.conditions import RESULTS, checkpoint_of, conditions, load_before_start, note, save
from benchmarks.engine_runs import in_turn
from benchmarks.speculation_runs import Run, run
from benchmarks.speculation_table import speculation as as_table
from rayserve_moe.engine.speculation.policy import Speculation
from rayserve_moe.engine.speculation.step_times import ExpertReach
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.requests.records import GenerationRequest
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import Sequence
from tests.support.engine.outputs import Outcome, Outcomes
from tests.support.engine.workload import request_for
from tests.support.speculation.oracle_proposer import Oracle

PROMPT_TOKENS, MOST = 64, 7
FIXED = (1, 3, 5, 7)
SIDES = ("plain", *FIXED, "chosen")
STEPS_TIMED, SIZES = 24, (1, 2, 4, 6, 8, 16, 24, 32, 64, 96, 128)
"""Plain steps, by their number of sequences, whose times are the bound."""


def main() -> None:
    """Measure, save, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="small")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.7, 0.9, 0.95])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 192, 96], help="for each of --streams")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    load_before, out = load_before_start(), asked.out or RESULTS / f"speculation-{asked.size}.json"
    most_rows = (1 + MOST) * max(asked.streams)
    sizes = [size for size in SIZES if size <= most_rows]
    settings = {"max_running_requests": most_rows, "precompile_bs_paddings": sizes, "max_step_tokens": 1024}
    settings |= {"speculative_algorithm": "NGRAM", "dtype": "bfloat16", "cpu_kernels": "native", "page_size": 16}
    with Engine(str(checkpoint_of(asked.size)), **settings, max_model_len=512) as engine:
        result = conditions(engine, size=asked.size, repeats=asked.repeats, load_before=load_before)
        known = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
        result["speculation"] = known.get("speculation", {})
        for streams, num_new in zip(asked.streams, asked.tokens, strict=True):
            times = plain_times(engine, [size for size in sizes if streams <= size <= (1 + MOST) * streams])
            requests = requests_of(streams, num_new)
            for share in asked.shares:
                found = measure(engine, requests, share=share, repeats=asked.repeats, times=times)
                result["speculation"][f"{streams}, {share}"] = found
                note(as_table({f"{streams}, {share}": found}))
                save(result, out)
    print(as_table(result["speculation"]))


class Prepared:
    """Drafts of an oracle for sequences that have one choice, made before the clock starts."""

    name = "oracle"

    def __init__(self, known: Outcomes, *, share: float, vocab_size: int) -> None:
        oracle, self._drafts = Oracle(known, share=share, vocab_size=vocab_size), {}
        for (name, choice), outcome in known.items():
            request = SimpleNamespace(request_id=name)
            for place in range(len(outcome.ids)):
                sequence = SimpleNamespace(request=request, choice_index=choice, num_outputs=place)
                self._drafts[name, place] = oracle.propose(sequence, MOST)  # ty: ignore[invalid-argument-type]

    def propose(self, sequence: Sequence, count: int) -> np.ndarray:
        """Propose the following tokens, or others."""
        return self._drafts[sequence.request.request_id, sequence.num_outputs][:count]

    def end(self, sequence: Sequence) -> None:
        """Do nothing."""


def requests_of(streams: int, num_new: int, *, seed: int = 0) -> list[GenerationRequest]:
    """Return random prompts, greedily answered, routing unrequested."""
    generator = np.random.default_rng([seed, streams])
    prompts = generator.integers(10, 1000, (streams, PROMPT_TOKENS)).astype(np.int32)
    requests = [request_for(p, f"{i}", max_new_tokens=num_new) for i, p in enumerate(prompts)]
    return [replace(request, return_routed_experts=False) for request in requests]


def plain_times(engine: Engine, sizes: list[int]) -> dict[int, float]:
    """Return median seconds of overlapped steps by their number of sequences, without drafts."""
    return {size: median(run(engine, requests_of(size, STEPS_TIMED)).step_seconds) for size in sizes}


def measure(
    engine: Engine, requests: list[GenerationRequest], *, share: float, repeats: int, times: dict[int, float]
) -> dict[str, Any]:
    """Measure all sides in turn. RuntimeError if ids differ."""
    plain = run(engine, requests).ids
    known: Outcomes = {(name, 0): Outcome(ids=ids) for name, ids in plain.items()}
    oracle = Prepared(known, share=share, vocab_size=engine.card.vocab_size)
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for repeat in range(repeats):
        for side in in_turn([str(side) for side in SIDES], repeat):
            if repeat and side.isdigit():
                continue

            def speculation_for(table: RowTable, side: str = side) -> Speculation:
                most = int(side) if side.isdigit() else MOST
                return Speculation(table, oracle, max_drafts=most, is_fixed=side.isdigit(), **reach_of(engine))

            found = run(engine, requests, None if side == "plain" else speculation_for)
            if found.ids != plain:
                raise RuntimeError(f"{side}: ids differ from the plain ones")
            runs[side].append(_kept(found, times))
    return dict(runs)


def reach_of(engine: Engine) -> dict[str, Any]:
    """Return the reach of drafts that the server derives from the model."""
    routing = engine.card.routing
    return {"reach": ExpertReach(routing.num_experts, routing.top_k)}


def _kept(found: Run, times: dict[int, float]) -> dict[str, Any]:
    """Return the figures of a run that a result keeps."""
    sizes, seconds = list(times), list(times.values())
    bound = float(np.interp(found.step_tokens, sizes, seconds).sum())
    drafts = found.totals
    return {
        "seconds": found.seconds,
        "tokens": found.num_tokens,
        "bound_seconds": bound,
        "steps": len(found.step_tokens),
        "drafts_of_steps": {str(most): number for most, number in sorted(Counter(found.step_drafts).items())},
        **({} if drafts is None else {"chains": drafts.chains, "accepted": drafts.accepted, "draft_s": drafts.draft_s}),
    }


if __name__ == "__main__":
    main()
