"""The auditor on right samples and on planted faults: verdicts, near ties, and seconds per 1,000 tokens.

    python -m benchmarks.audit [--samples 10000] [--others 1000] [--sides native bfloat16 float32] [--out FILE.json]

The calculator samples sums in bfloat16 by native kernels. The same server audits the samples. Servers that compute in
bfloat16 by XLA and in float32 audit the first `--others` of them with wider tolerances; their findings are numerics.
Plain scoring of the same tokens (`/generate` with forced rows and log-probs) is timed next to each audit. One fault is
planted in each of `--faults` samples, which the first server audits.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.rollout_tables import audit as as_table
from examples.calculator.problems import MIX, held_out_problems
from rayserve_moe.checkpoints.model_path import resolve_model_path
from rayserve_moe.config.load import default_cache_directory
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.replay.audit import PASSING
from rayserve_moe.replay.encoding import DIALECTS
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout
from rayserve_moe.rollouts import Rollout
from rayserve_moe.rollouts.answers import SampleRequest
from rayserve_moe.rollouts.client import BlockingRolloutClient
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from tests.support.serving.http_server import running

MODEL = "trained:calculator"
SIDES: dict[str, dict[str, Any]] = {
    "native": {"dtype": "bfloat16", "cpu_kernels": "native"},
    "bfloat16": {"dtype": "bfloat16", "cpu_kernels": "off"},
    "float32": {"dtype": "float32", "cpu_kernels": "off"},
}
"""Servers that audit; the first one has sampled."""
OTHER_NUMERICS = {"tie_tolerance": 0.25, "logprob_tolerance": 1.0}
"""Tolerances for servers whose kernels differ from the sampling server's."""
PROMPTS_OF_CALL, GROUP = 32, 8
NEW_TOKENS = 24


class Planted(NamedTuple):
    """Sample that gets a fault."""

    rows: np.ndarray
    other: np.ndarray
    """Rows of another sample."""
    prompt_len: int
    num_experts: int
    generator: np.random.Generator


@contextmanager
def client_of(side: str, model: Path) -> Iterator[tuple[BlockingRolloutClient, str, RoutingLayout]]:
    """Yield a client of a server in this process, its address, and the layout of its rows."""
    settings = {
        "enable_return_routed_experts": True, "enable_audit": True, "max_running_requests": 64,
        "precompile_bs_paddings": [64], "max_step_tokens": 256, "num_pages": 1024, **SIDES[side],
    }  # fmt: skip
    with Engine(str(model), **settings) as engine:
        app = create_api(ApiState(engine.loop, engine.tokenizer))
        with running(app) as url, BlockingRolloutClient(url) as client:
            yield client, url, engine.card.routing


def sampled(client: BlockingRolloutClient, count: int) -> list[Rollout]:
    """Return answers to sums and continuations, drawn at temperature 1 from the 8 likeliest tokens, with masks."""
    problems = held_out_problems(MIX[0][0], limit=-(-count // GROUP))
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "top_k": 8, "ignore_eos": True}
    found: list[Rollout] = []
    for first in range(0, len(problems), PROMPTS_OF_CALL):
        requests = [
            SampleRequest(
                str(number), list(problem.prompt.encode()), sampling, seed=number, count=GROUP, returns_mask=True
            )
            for number, problem in enumerate(problems[first : first + PROMPTS_OF_CALL], first)
        ]
        found += [rollout for group in client.generate(requests) for rollout in group]
    return found[:count]


def body_of(rollout: Rollout, layout: RoutingLayout, rows: np.ndarray | None = None) -> dict[str, Any]:
    """Return a sample for `/audit`, with `rows` in place of its own if given."""
    assert rollout.routing is not None and rollout.sampling_mask is not None, "rows and masks were requested"
    routing = rollout.routing if rows is None else RoutedExperts(rows)
    return {
        "input_ids": [*rollout.prompt_ids.tolist(), *rollout.output_ids.tolist()],
        "prompt_len": len(rollout.prompt_ids),
        "forced_routed_experts": DIALECTS["packed"].encode(routing, layout),
        "logprobs": rollout.logprobs.tolist(),
        "sampling_mask": rollout.sampling_mask.tolist(),
    }


def audited(
    client: BlockingRolloutClient,
    samples: Sequence[dict[str, Any]],
    *,
    url: str,
    batch: int,
    tolerances: dict[str, float],
) -> dict[str, Any]:
    """Return reports of the samples, with the seconds of the audit and of plain scores of the same tokens."""
    entries: list[dict[str, Any]] = []
    seconds = {"audit": 0.0, "scores": 0.0}
    for first in range(0, len(samples), batch):
        part = samples[first : first + batch]
        started = time.perf_counter()
        entries += client.audit(part, **tolerances)["samples"]
        audit_end = time.perf_counter()
        scored(url, part)
        seconds["audit"] += audit_end - started
        seconds["scores"] += time.perf_counter() - audit_end
    return {"entries": entries, "seconds": seconds}


def scored(url: str, samples: Sequence[dict[str, Any]]) -> None:
    """Score the tokens under the same rows, without an audit."""
    body = {
        "input_ids": [sample["input_ids"] for sample in samples],
        "forced_routed_experts": [sample["forced_routed_experts"] for sample in samples],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    httpx.post(f"{url}/generate", json=body, timeout=600).raise_for_status()


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a side."""
    entries = found["entries"]
    return {
        "verdicts": dict(Counter(entry["verdict"] for entry in entries)),
        "tokens": sum(entry["num_tokens"] for entry in entries),
        "decisions": sum(entry["num_decisions"] for entry in entries),
        "differing": sum(entry["num_differing"] for entry in entries),
        "ties": sum(entry["num_ties"] for entry in entries),
        "max_logprob_difference": max(entry["max_logprob_difference"] for entry in entries),
        "seconds": found["seconds"],
    }


def one_expert(sample: Planted) -> np.ndarray:
    """Replace an expert in one decision."""
    rows, generator = sample.rows, sample.generator
    token, layer = int(generator.integers(len(rows))), int(generator.integers(rows.shape[1]))
    others = sorted({*range(sample.num_experts)} - {*rows[token, layer].tolist()})
    changed = rows.copy()
    changed[token, layer, int(generator.integers(rows.shape[2]))] = generator.choice(others)
    return changed


def late(sample: Planted, first: int = 0) -> np.ndarray:
    """Delay rows by a token from a position on."""
    return np.concatenate([sample.rows[: first + 1], sample.rows[first:-1]])


def early(sample: Planted) -> np.ndarray:
    """Give every token the row of the next one."""
    return np.concatenate([sample.rows[1:], sample.rows[-1:]])


def layers_swapped(sample: Planted) -> np.ndarray:
    """Permute the layers."""
    return np.ascontiguousarray(sample.rows[:, sample.generator.permutation(sample.rows.shape[1])])


def physical_ids(sample: Planted) -> np.ndarray:
    """Replace expert ids by slot ids."""
    return sample.generator.permutation(sample.num_experts)[sample.rows].astype(sample.rows.dtype)


def padding_row(sample: Planted) -> np.ndarray:
    """Replace the rows of a token by the experts that trainers fill padding with: 0, 1, 2, and so on."""
    changed = sample.rows.copy()
    token = changed[int(sample.generator.integers(len(changed)))]
    token[:] = (np.arange(token.size) % sample.num_experts).reshape(token.shape)
    return changed


ROW_FAULTS: dict[str, Callable[[Planted], np.ndarray]] = {
    "one expert": one_expert,
    "a token late": late,
    "outputs a token late": lambda sample: late(sample, sample.prompt_len),
    "a token early": early,
    "layers swapped": layers_swapped,
    "ids of slots": physical_ids,
    "rows of another sample": lambda sample: np.resize(sample.other, sample.rows.shape),
    "a row of padding": padding_row,
}
OUTPUT_FAULTS = {"a wrong mask": "first_mask", "a wrong log-prob": "first_logprob"}
"""Faults of an output, with the field of a report that locates them."""


def faulty_rows(
    rollouts: Sequence[Rollout], layout: RoutingLayout, *, plant: Callable[[Planted], np.ndarray]
) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Yield samples whose rows differ after planting, with the first token and layer that do."""
    generator = np.random.default_rng(0)
    for rollout, other in zip(rollouts, np.roll(np.arange(len(rollouts)), GROUP), strict=True):
        own, others = rollout.routing, rollouts[other].routing
        assert own is not None and others is not None, "rows were requested"
        rows = plant(Planted(own.rows, others.rows, len(rollout.prompt_ids), layout.num_experts, generator))
        differs = (np.sort(rows, -1) != np.sort(own.rows, -1)).any(-1)
        if differs.any():
            token, layer = (int(index) for index in np.argwhere(differs)[0])
            yield body_of(rollout, layout, rows), [token, layout.layer_ids[layer]]


def faulty_outputs(
    rollouts: Sequence[Rollout], layout: RoutingLayout, *, field: str
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield samples with a mask that lacks its output, or with a log-prob that is wrong by 0.2, and the position."""
    generator = np.random.default_rng(0)
    for rollout in rollouts:
        body, index = body_of(rollout, layout), int(generator.integers(len(rollout.output_ids)))
        if field == "first_mask":
            body["sampling_mask"][index].remove(int(rollout.output_ids[index]))
            if not body["sampling_mask"][index]:
                continue  # an empty mask is none
        else:
            body["logprobs"][index] -= 0.2
        yield body, len(rollout.prompt_ids) + index


def planted(
    client: BlockingRolloutClient, rollouts: Sequence[Rollout], layout: RoutingLayout, *, batch: int
) -> dict[str, dict[str, int]]:
    """Return, by fault, the numbers of samples, of failing samples, and of faults located exactly."""
    faults: dict[str, tuple[list[tuple[dict[str, Any], Any]], Callable[[dict[str, Any]], Any]]] = {
        name: (list(faulty_rows(rollouts, layout, plant=plant)), _first_place) for name, plant in ROW_FAULTS.items()
    }
    for name, field in OUTPUT_FAULTS.items():
        faults[name] = list(faulty_outputs(rollouts, layout, field=field)), itemgetter(field)
    counts = {}
    for name, (samples, place_of) in faults.items():
        entries = [
            entry
            for first in range(0, len(samples), batch)
            for entry in client.audit([body for body, _ in samples[first : first + batch]])["samples"]
        ]
        counts[name] = {
            "samples": len(samples),
            "failing": sum(entry["verdict"] not in PASSING for entry in entries),
            "located": sum(place_of(entry) == place for entry, (_, place) in zip(entries, samples, strict=True)),
        }
        note(f"{name}: {counts[name]}")
    return counts


def _first_place(entry: dict[str, Any]) -> list[int] | None:
    return entry["places"][0] if entry["places"] else None


def main() -> None:
    """Measure, print the table, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--others", type=int, default=1000, help="samples that servers after the first one audit")
    parser.add_argument("--faults", type=int, default=200, help="samples with each planted fault")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="servers; the first one samples")
    parser.add_argument("--out", type=Path, default=RESULTS / "audit.json")
    arguments = parser.parse_args()
    machine = machine_facts(load_before_start())
    model = resolve_model_path(MODEL, cache_directory=default_cache_directory())
    rollouts: list[Rollout] = []
    sides, faults = {}, {}
    for side in arguments.sides:
        with client_of(side, model) as (client, url, layout):
            rollouts = rollouts or sampled(client, arguments.samples)
            is_first = not sides
            chosen = rollouts if is_first else rollouts[: arguments.others]
            samples = [body_of(rollout, layout) for rollout in chosen]
            tolerances = {} if is_first else OTHER_NUMERICS
            sides[side] = summary(audited(client, samples, url=url, batch=arguments.batch, tolerances=tolerances))
            note(f"{side}: {sides[side]}")
            faults = faults or planted(client, rollouts[: arguments.faults], layout, batch=arguments.batch)
    result = {"machine": machine, "samples": len(rollouts), "sides": sides, "faults": faults}
    print(as_table(result))
    save({"audit": result}, arguments.out)


if __name__ == "__main__":
    main()
