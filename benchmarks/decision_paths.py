"""Decisions of a rollout by path, compared with a plain recomputation.

    python -m benchmarks.decision_paths [--samples N] [--first-seed 0] [--paths stream cached ...] [--out FILE.json]

By default every part has more than 100,000 tokens over all paths.
The calculator answers sums by native kernels, so values are compared bit by bit. The plain recomputation runs one
choice at a time, without cached prompts, drafts or streams. Values that an answer reports as missing are counted
separately.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, save
from benchmarks.rollout_tables import decision_paths as as_table
from examples.calculator.problems import MIX, held_out_problems
from rayserve_moe.checkpoints.model_path import resolve_model_path
from rayserve_moe.config.load import default_cache_directory
from rayserve_moe.engine.extension import extension_of
from rayserve_moe.engine.speculation.policy import Speculation
from rayserve_moe.engine.speculation.proposers import SiblingProposer
from rayserve_moe.engine.speculation.steps import DraftedSteps
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.replay.encoding.ranges import labels_of
from rayserve_moe.rollouts.alignment import decode_answer, join_turns
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from tests.support.engine.schedulers import some_reach
from tests.support.engine.step_gate import wait_for_tokens
from tests.support.serving.http_server import running

NEW_TOKENS, CHOICES, ROWS, MAX_DRAFTS = 48, 4, 16, 3
MIN_UPDATES, PROMPTS_PER_UPDATE = 8, 32
SAMPLING = {
    "max_new_tokens": NEW_TOKENS, "temperature": 1.0, "top_k": 8, "top_p": 0.95, "ignore_eos": True,
}  # fmt: skip
ASKED = {"return_logprob": True, "return_routed_experts": True, "return_router_gates": True}
MASKED = {"return_sampling_mask": True}
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16", "cpu_kernels": "native", "enable_return_routed_experts": True, "page_size": 16,
    "enable_return_router_gates": True, "max_running_requests": ROWS, "precompile_bs_paddings": [ROWS],
    "max_step_tokens": 64,
}  # fmt: skip
PLAIN = {"max_running_requests": 1, "precompile_bs_paddings": [1], "enable_prefix_caching": False}
FEW_PAGES = {"num_pages": 48}
"""Fewer pages than all running requests need."""
DRAFTING = {"speculative_algorithm": "SIBLINGS", "speculative_num_steps": MAX_DRAFTS}
SAMPLES = {"stream": 420, "several choices": 420, "preempted": 420, "cached": 420, "drafts": 2100, "updated": 2100}
"""Samples of each path by default. Only drafts and updates have flags of drafts and versions to compare."""
PATHS = tuple(SAMPLES)
PARTS = ("gates", "masks", "sampling log-probs", "log-probs", "versions", "drafts")
Counts = dict[str, Counter[str]]
"""Numbers of tokens by part: `equal`, `missing` and `differing`."""


@dataclass(frozen=True)
class Asked:
    """Prompts to request with `choices` answers each. Prompt i is sampled with seed `first_seed` + i."""

    prompts: Sequence[Sequence[int]]
    choices: int = 1
    """Choices of each prompt."""
    first_seed: int = 0
    """Seed of the first prompt."""

    def body(self, index: int, **fields: Any) -> dict[str, Any]:
        """Return the body for a prompt."""
        sampling = {**SAMPLING, "sampling_seed": self.first_seed + index, "n": self.choices}
        return {"input_ids": list(self.prompts[index]), "sampling_params": sampling, **ASKED, **fields}


Answers = list[dict[str, Any]]
"""Final answers, one per choice in the order of prompts, with decoded rows as `routing`."""


def prompts_of(count: int) -> list[list[int]]:
    """Return problems, each after three solved ones; eight adjacent prompts share these."""
    problems = held_out_problems(MIX[0][0], limit=count)
    solved = [f"{problem.prompt}{problem.answers[0]}\n" for problem in problems]
    return [
        list(("".join(solved[(i // 8 * 8 + j) % count] for j in range(3)) + problem.prompt).encode())
        for i, problem in enumerate(problems)
    ]


@contextmanager
def served(model: Path, **settings: Any) -> Iterator[tuple[Engine, str]]:
    """Serve the model; with drafts, every step proposes some."""
    with Engine(str(model), **{**SETTINGS, **settings}) as engine:
        drafted = extension_of(engine.loop._cycle.extensions, DraftedSteps)
        if drafted is not None:
            proposer = SiblingProposer(engine.runner.served.settings.speculation)
            table = engine.loop._cycle.scheduler.table
            fixed = Speculation(table, proposer, max_drafts=MAX_DRAFTS, is_fixed=True, reach=some_reach())
            patch.object(drafted, "speculation", fixed).start()
        with running(create_api(ApiState(engine.loop, engine.tokenizer))) as url:
            yield engine, url


def posted(url: str, asked: Asked, **fields: Any) -> Answers:
    """Return the answers to all prompts, requested at the same time."""

    def ask(index: int) -> Answers:
        answer = client.post("/generate", json=asked.body(index, rid=f"{time.time_ns()} {index}", **fields))
        assert answer.status_code == 200, answer.text
        found = answer.json()
        return [{**each, "routing": decode_answer(each)} for each in (found if isinstance(found, list) else [found])]

    with httpx.Client(base_url=url, timeout=600) as client, ThreadPoolExecutor(2 * ROWS) as threads:
        return [each for of_prompt in threads.map(ask, range(len(asked.prompts))) for each in of_prompt]


def streamed(url: str, asked: Asked) -> Answers:
    """Return the last event of each stream, with the joined rows of all events."""

    def ask(index: int) -> dict[str, Any]:
        body = asked.body(index, stream=True, stream_routed_experts=True, **MASKED)
        with client.stream("POST", "/generate", json=body) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines()]
        events = [json.loads(line) for line in lines if line.startswith("{")]
        pieces = [decode_answer(event) for event in events if event["meta_info"].get("router_gates") is not None]
        assert len(pieces) > 1, "rows come in pieces"
        return {**events[-1], "routing": join_turns(pieces)}

    with httpx.Client(base_url=url, timeout=600) as client, ThreadPoolExecutor(2 * ROWS) as threads:
        return list(threads.map(ask, range(len(asked.prompts))))


def updated(engine: Engine, url: str, asked: Asked, *, model: Path) -> tuple[Answers, Counter[str]]:
    """Reload the same weights under new versions while requests run; return the answers and the counts of labels.

    Reloads are spread over the whole run. A pause between two steps gives the number of tokens of every running request
    at each reload.
    """
    found: list[Answers] = []
    begun = int(engine.loop.statistics()["tokens_sampled"])
    thread = threading.Thread(target=lambda: found.append(posted(url, asked, **MASKED)))
    thread.start()
    known: list[tuple[str, dict[str, int]]] = [(engine.card.weight_version, {})]
    num_updates = MIN_UPDATES + len(asked.prompts) // PROMPTS_PER_UPDATE
    for number in range(num_updates):
        due = begun + (number + 1) * len(asked.prompts) * NEW_TOKENS // (num_updates + 1)
        wait_for_tokens(engine.loop, due - int(engine.loop.statistics()["tokens_sampled"]))
        engine.pause_generation("in_place")
        scheduler = engine.loop._cycle.scheduler
        lengths = {each.request.request_id: int(each.num_tokens) for each in scheduler.running}
        version = f"update {len(known)}"
        assert engine.update_weights_from_disk(model, weight_version=version).success
        known.append((version, lengths))
        engine.continue_generation()
        if not lengths:
            break
    thread.join()
    counts: Counter[str] = Counter()
    for answer, prompt in zip(found[0], asked.prompts, strict=True):
        meta = answer["meta_info"]
        bounds = [(lengths[meta["id"]], version) for version, lengths in known if meta["id"] in lengths]
        counts += versions_of(answer, len(prompt), bounds)
    return found[0], counts


def versions_of(answer: dict[str, Any], num_prompt: int, bounds: Sequence[tuple[int, str]]) -> Counter[str]:
    """Count the outputs with right version labels of log-probs and rows, given (length, version) of each change.

    A step samples a token and computes the row of the token before it.
    """
    meta, end = answer["meta_info"], num_prompt + len(answer["output_ids"])
    ranges = meta["logprob_weight_versions"]
    before = ranges[0][2]
    wanted = [before] * num_prompt
    for position in range(num_prompt, end):
        later = [version for length, version in bounds if position >= length]
        wanted.append(later[-1] if later else before)
    labels = {position: label for first, last, label in ranges for position in range(first, last)}
    of_rows = labels_of(answer["routing"].weight_version, 0, count=end - 1)
    counts: Counter[str] = Counter()
    for position in range(num_prompt, end):
        is_right = labels.get(position) == wanted[position] == of_rows[position - 1]
        counts["equal" if is_right else "differing"] += 1
    assert all(before == version or any(length > num_prompt for length, _ in bounds) for *_, version in ranges)
    return counts


def compared(found: Answers, plain: Answers, *, has_masks: bool = True) -> Counts:
    """Count the tokens of each part that equal, differ from, or are missing against the plain run.

    Raises: AssertionError if the ids differ.
    """
    counts: Counts = {part: Counter() for part in PARTS if part != "versions"}
    for one, other in zip(found, plain, strict=True):
        assert one["output_ids"] == other["output_ids"], "ids differ"
        meta, wanted, num_outputs = one["meta_info"], other["meta_info"], len(other["output_ids"])
        are_equal = (one["routing"].gates == other["routing"].gates).all(axis=(1, 2))
        is_missing = np.isnan(one["routing"].gates).any(axis=(1, 2))
        counts["gates"] += Counter(
            {
                "equal": int(are_equal.sum()),
                "missing": int(is_missing.sum()),
                "differing": int((~are_equal & ~is_missing).sum()),
            }
        )
        columns = {"log-probs": "output_token_logprobs"}
        if has_masks:
            columns |= {"masks": "output_token_sampling_mask", "sampling log-probs": "output_token_sampling_logprobs"}
        for part, name in columns.items():
            equal = sum(a == b for a, b in zip(meta[name], wanted[name], strict=True))
            counts[part] += Counter(equal=equal, differing=num_outputs - equal)
        if (drafted := meta.get("output_token_drafted")) is not None:
            is_right = len(drafted) == num_outputs and sum(drafted) == meta["spec_accept_token_num"]
            counts["drafts"]["equal" if is_right else "differing"] += num_outputs
            counts["drafts"]["accepted"] += sum(drafted)
    return counts


def run_path(path: str, model: Path, *, asked: Asked, plain: Answers) -> Counts:
    """Run the prompts on a path, check that the path was taken, and compare with the plain run."""
    settings = {"preempted": FEW_PAGES, "drafts": DRAFTING}.get(path, {})
    with served(model, **settings) as (engine, url):
        if path == "updated":
            found, versions = updated(engine, url, asked, model=model)
            return {**compared(found, plain), "versions": versions}
        if path == "stream":
            return compared(streamed(url, asked), plain)
        if path == "drafts":
            found = posted(url, asked, return_draft_tokens=True)
            counts = compared(found, plain, has_masks=False)
            assert counts["drafts"]["accepted"] > 0, "no draft was accepted"
            return counts
        if path == "cached":
            posted(url, asked)
        found = posted(url, asked, **MASKED)
        is_taken = {
            "several choices": asked.choices > 1,
            "cached": sum(answer["meta_info"]["cached_tokens"] for answer in found) > 0,
            "preempted": engine.loop.statistics()["preemptions"] > 0,
        }
        assert is_taken[path], f"nothing was {path}"
        return compared(found, plain)


def compare_paths(model: Path, *, samples: Mapping[str, int], first_seed: int = 0) -> Iterator[tuple[str, Counts]]:
    """Yield each path of `samples` with its counts, of that many choices."""
    asked = {}
    for path, count in samples.items():
        choices = CHOICES if path == "several choices" else 1
        asked[path] = Asked(tuple(map(tuple, prompts_of(count // choices))), choices=choices, first_seed=first_seed)
    with served(model, **PLAIN) as (_, url):
        plain = {each: posted(url, each, **MASKED) for each in dict.fromkeys(asked.values())}
    for path, each in asked.items():
        yield path, run_path(path, model, asked=each, plain=plain[each])


def main() -> None:
    """Print the counts by path and in total, and save them; exit with an error if any value differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, help="of each path (default: as many as its parts need)")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first prompt; others count up")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS)
    parser.add_argument("--out", type=Path, default=RESULTS / "decision_paths.json")
    arguments = parser.parse_args()
    machine = machine_facts(load_before_start())
    model = resolve_model_path("trained:calculator", cache_directory=default_cache_directory())
    samples = {path: arguments.samples or SAMPLES[path] for path in arguments.paths}
    found: dict[str, Counts] = {}
    for path, counts in compare_paths(model, samples=samples, first_seed=arguments.first_seed):
        found[path] = counts
        print(path, {part: dict(each) for part, each in counts.items() if each}, flush=True)
    result = {"machine": machine, "samples": samples, "first_seed": arguments.first_seed, "paths": found}
    save({"decision_paths": result}, arguments.out)
    print(as_table(result))
    if any(each["differing"] for counts in found.values() for each in counts.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
