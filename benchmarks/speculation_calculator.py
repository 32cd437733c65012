"""The calculator with each proposer, against itself without: tokens a verification, and tokens per second.

    python -m benchmarks.speculation_calculator [--eagle3 DIRECTORY] [--nextn DIRECTORY] [--repeats 5]

Held-out problems, 16 sequences at a time: answered once each, greedily and at temperature 1, and in groups of 16
samples at temperature 1. `fixed`: every step has 3 drafts of whoever has any; `chosen`: as the server decides. The
draft models are those of the package, or of the directories that `examples.train_drafts` wrote.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.conditions import RESULTS, conditions, load_before_start, note, save
from benchmarks.engine_runs import in_turn
from benchmarks.speculation import reach_of
from benchmarks.speculation_runs import SpeculationFor, run
from benchmarks.speculation_table import speculation_calculator as as_table
from examples.calculator.problems import MIX
from examples.calculator.problems import draw as draw_problem
from rayserve_moe.config.settings import SpeculationSettings
from rayserve_moe.engine.speculation.model_drafts import proposer_for
from rayserve_moe.engine.speculation.policy import Speculation
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.requests.records import GenerationRequest
from tests.support.engine.workload import request_for

ROWS, GROUP, MOST, MAX_NEW = 16, 16, 3, 8
PROPOSERS = ("NGRAM", "SIBLINGS", "EAGLE3", "NEXTN")
LOADS = {"greedy": (1024, 1, 0.0), "temperature 1": (1024, 1, 1.0), f"groups of {GROUP}": (64, GROUP, 1.0)}
"""Problems, samples of each, temperature."""
SETTINGS: dict[str, Any] = {
    "max_running_requests": ROWS,
    "precompile_bs_paddings": [ROWS],
    "max_step_tokens": 1024,
    "dtype": "bfloat16",
    "cpu_kernels": "native",
    "page_size": 16,
    "max_model_len": 64,
    "speculative_num_steps": MOST,
}
CALCULATOR = "trained:calculator"
HEADS = Path(__file__).parent / "heads"


def main() -> None:
    """Measure, save, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--eagle3", default=str(HEADS / "calculator-eagle3"))
    parser.add_argument("--nextn", default=str(HEADS / "calculator-nextn"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "speculation-calculator.json")
    asked = parser.parse_args()
    load_before, paths = load_before_start(), {"EAGLE3": asked.eagle3, "NEXTN": asked.nextn}
    with ExitStack() as stack:
        engines = {}
        for name in PROPOSERS:
            drafts = {"speculative_draft_model_path": paths[name]} if name in paths else {}
            settings = {**SETTINGS, "speculative_algorithm": name, **drafts}
            engines[name] = stack.enter_context(Engine(model_path=CALCULATOR, **settings))
        result = conditions(engines["NGRAM"], size="calculator", repeats=asked.repeats, load_before=load_before)
        result["speculation_calculator"] = measure(engines, repeats=asked.repeats)
    save(result, asked.out)
    print(as_table(result["speculation_calculator"]))


def requests_of(problems: int, samples: int, temperature: float) -> list[GenerationRequest]:
    """Return problems held out from training, as many for each task as in training."""
    generator, requests = random.Random(0), []
    tasks, shares = zip(*MIX, strict=True)
    for number in range(problems):
        prompt = draw_problem(generator.choices(tasks, shares)[0], generator, held_out=True).prompt
        sampling = {"n": samples, "temperature": temperature, "seed": number, "max_new_tokens": MAX_NEW}
        requests.append(request_for(list(prompt.encode()), f"{number}", ignore_eos=False, **sampling))
    return requests


def measure(engines: dict[str, Engine], *, repeats: int) -> dict[str, Any]:
    """Measure every load with each proposer, always right after a plain run. RuntimeError if ids differ."""
    found: dict[str, Any] = {}
    for engine in engines.values():
        engine.runner.later.wait()  # programs that still compile take a core
    for load, (problems, samples, temperature) in LOADS.items():
        requests, runs = requests_of(problems, samples, temperature), defaultdict(list)
        run(engines["NGRAM"], requests)
        for repeat in range(repeats):
            for side in in_turn([side for side, _, _ in sides(engines)], repeat):
                engine, speculation_for = next(each[1:] for each in sides(engines) if each[0] == side)
                plain, of_side = run(engines["NGRAM"], requests), run(engine, requests, speculation_for)
                if of_side.ids != plain.ids:
                    raise RuntimeError(f"{load}, {side}: ids differ from the plain ones")
                assert of_side.totals is not None, "a side has drafts"
                counts = {"chains": of_side.totals.chains, "accepted": of_side.totals.accepted}
                times = {"seconds": of_side.seconds, "plain_seconds": plain.seconds}
                runs[side].append({**times, "tokens": of_side.num_tokens, **counts})
        found[load] = dict(runs)
        note(as_table({load: found[load]}))
    return found


def sides(engines: dict[str, Engine]) -> Iterator[tuple[str, Engine, SpeculationFor]]:
    """Return each proposer with its engine, once with fixed and once with chosen numbers of drafts."""
    for name, engine in engines.items():
        for kind in ("fixed", "chosen"):
            yield f"{name}, {kind}", engine, _speculation_of(name, engine, is_fixed=kind == "fixed")


def _speculation_of(name: str, engine: Engine, *, is_fixed: bool) -> Callable[..., Speculation]:
    settings = SpeculationSettings(name, num_steps=MOST)
    return lambda table: Speculation(
        table, proposer_for(settings), max_drafts=MOST, is_fixed=is_fixed, **reach_of(engine)
    )


if __name__ == "__main__":
    main()
