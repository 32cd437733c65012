"""W2 on the in-process engine: overlap on and off, routing returned and not, and how long the devices wait.

    python -m benchmarks.engine [--size small] [--devices 1] [--workload W2] [--repeats 5] [--out FILE.json]

The sides take turns, one run each per repeat, each time with another one first. Sides with the same prompts must give
the same ids. Watched runs, which show how long the devices wait for the host, are runs of their own.
"""

from __future__ import annotations

import argparse
import re
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.conditions import RESULTS, checkpoint_of, conditions, load_before_start, note, save
from benchmarks.device_wait import StepWatch, waited_seconds
from benchmarks.engine_runs import in_turn, run_engine
from benchmarks.figures import Run
from benchmarks.table import tables
from benchmarks.workloads import WORKLOADS, prompts_of
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.requests.records import RoutingLayout

OTHER_PROMPTS = 500
"""Added to the repeat number, gives prompts that no other side has had: the cache of a shared engine must not help."""


@dataclass(frozen=True)
class Side:
    """An engine, by its settings, and what is asked of it."""

    settings: dict[str, Any] = field(default_factory=dict)
    return_routed_experts: bool = False
    has_own_prompts: bool = False

    @property
    def engine(self) -> str:
        """Sides with equal settings share an engine."""
        return repr(self.settings)


ROUTING = {"enable_return_routed_experts": True}
SIDES = {
    "plain": Side(),
    "no_overlap": Side({"overlap_steps": False}),
    "routing_unasked": Side(ROUTING, has_own_prompts=True),
    "routing_returned": Side(ROUTING, return_routed_experts=True),
}
WATCHED = ("plain", "no_overlap")


def compare(
    name: str, engines: dict[str, Engine], *, repeats: int, with_waits: bool
) -> tuple[dict[str, list[Run]], dict[str, list[Run]]]:
    """Run every side in turn; returns the runs by side, and the watched ones. RuntimeError where ids differ."""
    runs: dict[str, list[Run]] = {side: [] for side in SIDES}
    waits: dict[str, list[Run]] = {side: [] for side in WATCHED}
    for repeat in range(-1, repeats):
        ids = {}
        for side in in_turn(list(SIDES), repeat + 1):
            run, ids[side] = run_side(side, engines[SIDES[side].engine], workload=name, repeat=repeat)
            runs[side].append(run)
        check_same(ids)
        rates = ", ".join(
            f"{side} {WORKLOADS[name].total_new_tokens / runs[side][-1]['seconds']:.1f}" for side in SIDES
        )
        note(f"{name} {repeat + 1}/{repeats}: {rates} output tokens/s")
    for repeat in range(repeats if with_waits else 0):
        for side in in_turn(list(WATCHED), repeat):
            waits[side].append(watch_side(side, engines[SIDES[side].engine], workload=name, repeat=repeat))
            note(f"{name} {repeat + 1}/{repeats}: {side}, devices waited {100 * waits[side][-1]['waited_share']:.2f} %")
    return {side: each[1:] for side, each in runs.items()}, waits


def run_side(side: str, engine: Engine, *, workload: str, repeat: int) -> tuple[Run, list[list[int]]]:
    """Run a side once; repeat -1 is the warm-up."""
    chosen = repeat + OTHER_PROMPTS if SIDES[side].has_own_prompts else repeat
    prompts = prompts_of(workload, chosen, vocab_size=engine.card.vocab_size)
    wants_routing = SIDES[side].return_routed_experts
    return run_engine(
        engine, WORKLOADS[workload], prompts=prompts, seed=repeat + 1, return_routed_experts=wants_routing
    )


def watch_side(side: str, engine: Engine, *, workload: str, repeat: int) -> Run:
    """Watch a run; return the seconds from its first step to the end of its last, and the waiting share."""
    with StepWatch(engine.runner.programs) as watch:
        run_side(side, engine, workload=workload, repeat=repeat + 2 * OTHER_PROMPTS)
    seconds, waited_s = watch.spans[-1].ready - watch.spans[0].started, waited_seconds(watch.spans)
    return {
        "seconds": seconds,
        "steps": len(watch.spans),
        "waited_s": waited_s,
        "waited_share": waited_s / seconds,
    }


def check_same(ids: dict[str, list[list[int]]]) -> None:
    """Refuse runs on the same prompts that differ in a token."""
    for side, found in ids.items():
        if not SIDES[side].has_own_prompts and found != ids["plain"]:
            different = sum(a != b for a, b in zip(found, ids["plain"], strict=True))
            raise RuntimeError(f"{different} outputs of {side} differ from those of plain")


def program_facts(engine: Engine) -> dict[str, int]:
    """Return the outputs of the largest compiled step, and the number of arrays of all routing ids in its text."""
    shape, step = max(engine.runner.programs.steps.items(), key=lambda item: item[0].num_tokens)
    text = step.as_text()
    return {
        "step_tokens": shape.num_tokens,
        "instructions": text.count(" = "),
        "routing_arrays": routing_arrays(text, engine.card.routing, num_tokens=shape.num_tokens),
    }


def routing_arrays(program: str, layout: RoutingLayout, *, num_tokens: int) -> int:
    """Count the places in an optimised program with an array [MoE layers, tokens, k], of whatever type."""
    num_layers, top_k = layout.row_shape
    return len(re.findall(rf"\w+\[{num_layers},{num_tokens},{top_k}\]", program))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=["tiny", "small", "mid"], default="small")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="W2")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1, help="devices of each engine; on a CPU, emulated ones")
    parser.add_argument("--no-waits", action="store_true", help="leave out the watched runs")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/engine-SIZE.json")
    return parser.parse_args()


def main() -> None:
    """Measure, write the result file, print its tables."""
    arguments = parse_arguments()
    load_before = load_before_start()
    path = checkpoint_of(arguments.size)
    with ExitStack() as stack:
        engines = {
            side.engine: stack.enter_context(Engine(str(path), devices_per_host=arguments.devices, **side.settings))
            for side in {side.engine: side for side in SIDES.values()}.values()
        }
        runs, waits = compare(arguments.workload, engines, repeats=arguments.repeats, with_waits=not arguments.no_waits)
        plain = engines[SIDES["plain"].engine]
        result = {
            **conditions(plain, size=arguments.size, repeats=arguments.repeats, load_before=load_before),
            "sides": {"name": arguments.workload, "workload": asdict(WORKLOADS[arguments.workload]), "runs": runs},
            "programs": {side: program_facts(engines[SIDES[side].engine]) for side in ("plain", "routing_returned")},
        }
    if not arguments.no_waits:
        result["waits"] = waits
    save(result, arguments.out or RESULTS / f"engine-{arguments.size}.json")
    print(tables(result))


if __name__ == "__main__":
    main()
