"""Decode, whole requests, prefill and overlap of a shape on an accelerator; routing off, unasked and returned."""

from __future__ import annotations

import statistics
import threading
import time
import uuid
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from benchmarks.accelerator_model import engine_of, experts_expected, step_bytes, token_flops
from rayserve_moe.answers.native import native_routing
from rayserve_moe.engine.cycle import SteadyPace
from rayserve_moe.execution.programs.buckets import device_of
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.requests.results import ChoiceResult

SIDES = {"off": ("off", False), "unasked": ("on", False), "returned": ("on", True)}
"""The engine of a side, and whether its requests ask for routed experts."""
HOST_PARTS = ("schedule_s", "pack_s", "transport_s", "device_s", "commit_s")
FIRST_ID, CONTEXT, NEW_TOKENS = 3, 1000, 64
MEASURED_READ = 0.9
"""Share of the published bandwidth that reading reaches; the share of the bound is of this."""
PREFILL_SEQUENCES = 16


class Saying(Protocol):
    """Writes one result line (`accelerator.Record`)."""

    is_small: bool
    peak_flops: float

    @property
    def left_s(self) -> float: ...

    def say(self, part: str, **values: Any) -> None: ...


class Together:
    """Results of concurrent requests, with totals over the time in which all of them decode."""

    def __init__(self, engine: Engine, count: int) -> None:
        self._loop, self._count = engine.loop, count
        self._begun: set[str] = set()
        self._num_ended = 0
        self.edges: list[tuple[float, dict[str, float]]] = []
        self.results: dict[str, ChoiceResult] = {}
        self.over = threading.Event()

    def receive(self, updates: list[ChoiceResult]) -> None:
        """Take the updates of one request, on the engine's thread."""
        ends = [update for update in updates if update.finish is not None]
        if self._num_ended == 0 and ends and len(self._begun) == self._count:
            self._note()
        self._begun.add(updates[0].request_id)
        if len(self._begun) == self._count and not self.edges:
            self._note()
        self.results.update({update.request_id: update for update in ends})
        self._num_ended += len(ends)
        if self._num_ended == self._count:
            self.over.set()

    def _note(self) -> None:
        self.edges.append((time.perf_counter(), self._loop.statistics()))


def run(engine: Engine, prompts: np.ndarray, *, num_new: int, returned: bool, limit_s: float) -> dict[str, Any]:
    """Run a greedy request for each prompt; return seconds, tokens per second, and host time per step.

    Raises: RuntimeError if they do not end in time, or a row is missing.
    """
    window, requests = Together(engine, len(prompts)), {}
    sampling = SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True)
    begun = time.perf_counter()
    for prompt in prompts:
        request = GenerationRequest(uuid.uuid4().hex, prompt, sampling, return_routed_experts=returned)
        requests[request.request_id] = request
        engine.loop.submit(request, window.receive)
    if not window.over.wait(max(5.0, limit_s + 20.0)):
        raise RuntimeError(f"{len(window.results)} of {len(prompts)} requests ended in time")
    whole = time.perf_counter() - begun
    found: dict[str, Any] = {
        "whole_s": whole,
        "whole_tokens_per_s": len(prompts) * num_new / whole,
        "prompt_tokens_per_s": prompts.size / whole,
    }
    if returned:
        found |= _encoded(engine, requests, window)
    if len(window.edges) == 2:
        (start, before), (end, after) = window.edges
        steps = max(1.0, after["steps"] - before["steps"])
        found["tokens_per_s"] = (after["tokens_sampled"] - before["tokens_sampled"]) / (end - start)
        found["step_ms"] = 1e3 * (end - start) / steps
        found |= {f"{part[:-2]}_us": 1e6 * (after[part] - before[part]) / steps for part in HOST_PARTS}
    return found


def _encoded(engine: Engine, requests: dict[str, GenerationRequest], window: Together) -> dict[str, Any]:
    """Encode the rows of all answers; RuntimeError if one has fewer than its tokens."""
    begun, size = time.perf_counter(), 0
    for name, result in window.results.items():
        if result.routing is None or result.routing.missing:
            raise RuntimeError(f"an answer lacks rows: {result.routing}")
        made = native_routing(requests[name], result, card=engine.card)
        size += len(str(made.get("routed_experts", "")))
    rows = [result.routing.rows for result in window.results.values() if result.routing is not None]
    touched = [len(np.unique(np.stack([each[-2, layer] for each in rows]))) for layer in range(rows[0].shape[1])]
    return {
        "encode_s": time.perf_counter() - begun,
        "encoded_MB": size / 1e6,
        "experts_touched": float(np.mean(touched)),
    }


def sizes_that_fit(record: Saying, config: dict[str, Any]) -> list[int]:
    """Return numbers of sequences: 1, 16, 64, 256, or the largest number that the card's memory holds."""
    if record.is_small:
        return [1, 4]
    stats = jax.devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    weights = 2.0 * layers * 3 * hidden * config["moe_intermediate_size"] * config["num_experts"] * 1.06
    of_token = 4.0 * layers * config["num_key_value_heads"] * config["head_dim"]
    # Two engines have a pool each; a step takes about 2 GB beside them.
    fitting = int((free - weights - 3e9) / (2 * of_token * (CONTEXT + NEW_TOKENS + 32)))
    if fitting < 1:
        raise RuntimeError(f"{free / 1e9:.0f} GB are free, and the weights take {weights / 1e9:.0f} GB")
    return sorted({size for size in (1, 16, 64, 256) if size <= fitting} | {min(256, fitting)})


def capture(record: Saying, path: Path, config: dict[str, Any]) -> dict[str, Engine]:
    """Measure decode and whole requests of each number of sequences, sides in turn; return both engines."""
    sizes = sizes_that_fit(record, config)
    context, num_new = (24, 8) if record.is_small else (CONTEXT, NEW_TOKENS)
    most, longest = max(sizes), -(-(context + num_new + 16) // 256) * 256
    settings: dict[str, Any] = {
        "dtype": "float32" if record.is_small else "bfloat16",
        "max_running_requests": most,
        "precompile_bs_paddings": sizes,
        "max_model_len": longest,
        "page_size": 16,
        "num_pages": most * (-(-(context + num_new) // 16) + 1) + 1200,
        "max_step_tokens": 64 if record.is_small else 2048,
    }
    engines: dict[str, Engine] = {}
    for name in ("off", "on"):
        begun = time.perf_counter()
        engines[name] = engine_of(path, **settings, enable_return_routed_experts=name == "on")
        report = engines[name].loop.start_report
        facts = {"compile_s": report.compile_s, "kernels": dict(report.kernels)}
        record.say("start", engine=name, start_s=time.perf_counter() - begun, sizes=sizes, **facts)
    drawn = np.random.default_rng(5).integers(FIRST_ID, config["vocab_size"], (most, context)).astype(np.int32)
    results: dict[tuple[int, str], list[dict[str, Any]]] = {}
    until = 0.45 * record.left_s
    for repeat in range(-1, 5):
        for size in sizes:
            for side in _in_turn(list(SIDES), repeat + size):
                if record.left_s < until and repeat > 0:
                    break
                engine, returned = engines[SIDES[side][0]], SIDES[side][1]
                found = run(engine, drawn[:size], num_new=num_new, returned=returned, limit_s=record.left_s)
                if repeat >= 0:
                    results.setdefault((size, side), []).append(found)
                    record.say("run", sequences=size, side=side, repeat=repeat, **found)
    _say_decode(record, results, config=config, context=context + num_new // 2)
    return engines


def _in_turn(names: list[str], turn: int) -> list[str]:
    first = turn % len(names)
    return names[first:] + names[:first]


def _say_decode(
    record: Saying, results: dict[tuple[int, str], list[dict[str, Any]]], *, config: dict[str, Any], context: int
) -> None:
    """Record each side, with the share of the bound, and the ratios of sides."""
    card = device_of(jax.devices()[0], num_devices=1)
    for (size, side), runs in results.items():
        touched = [one["experts_touched"] for one in results.get((size, "returned"), []) if "experts_touched" in one]
        experts = statistics.median(touched) if touched else experts_expected(config, size)
        num_bytes = step_bytes(config, sequences=size, context=context, experts_touched=experts)
        bound_ms = 1e3 * num_bytes / (MEASURED_READ * card.bytes_per_s)
        found = _medians(runs)
        found.pop("experts_touched", None)
        share = bound_ms / found["step_ms"][0] if "step_ms" in found else None
        bound = {"step_GB": num_bytes / 1e9, "bound_ms": bound_ms, "share_of_bound": share}
        record.say("decode", sequences=size, side=side, repeats=len(runs), experts_touched=experts, **bound, **found)
        if side == "off":
            continue
        for key in ("tokens_per_s", "whole_tokens_per_s"):
            ratio = _ratio(runs, results.get((size, "off"), []), key)
            record.say("capture", sequences=size, side=side, of=key, ratio_to_off=ratio)


def _medians(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the median, the least and the greatest of each figure."""
    columns = {name: [one[name] for one in runs if name in one] for name in runs[0]}
    return {
        name: [round(each, 4) for each in (statistics.median(values), min(values), max(values))]
        for name, values in columns.items()
        if values
    }


def _ratio(runs: list[dict[str, Any]], others: list[dict[str, Any]], key: str) -> float | None:
    """Return the median ratio of neighbouring runs of two sides."""
    pairs = [one[key] / other[key] for one, other in zip(runs, others, strict=False) if key in one and key in other]
    return statistics.median(pairs) if pairs else None


def prefill(record: Saying, engines: dict[str, Engine], config: dict[str, Any]) -> None:
    """Measure prompts that nothing has cached, sides in turn."""
    context, count = (24, 2) if record.is_small else (CONTEXT, PREFILL_SEQUENCES)
    generator, results = np.random.default_rng(6), dict[str, list[dict[str, Any]]]()
    until = 0.4 * record.left_s
    for repeat in range(-1, 4):
        for side in _in_turn(list(SIDES), repeat + 1):
            if record.left_s < until and repeat > 0:
                break
            name, returned = SIDES[side]
            prompts = generator.integers(FIRST_ID, config["vocab_size"], (count, context)).astype(np.int32)
            found = run(engines[name], prompts, num_new=1, returned=returned, limit_s=record.left_s)
            if repeat >= 0:
                results.setdefault(side, []).append(found)
    for side, runs in results.items():
        rates = [one["prompt_tokens_per_s"] for one in runs]
        flops = statistics.median(rates) * token_flops(config)
        share = flops / record.peak_flops if record.peak_flops else None
        figures = {"prompt_tokens_per_s": [statistics.median(rates), min(rates), max(rates)], "flops": flops}
        record.say("prefill", sequences=count, side=side, repeats=len(rates), share_of_peak=share, **figures)


def overlap(record: Saying, engines: dict[str, Engine]) -> None:
    """Measure decode with overlapping steps and without, in turn, with routing off."""
    engine = engines["off"]
    rows = engine.runner.served.num_rows
    context, num_new = (24, 8) if record.is_small else (CONTEXT, NEW_TOKENS)
    drawn = np.random.default_rng(5).integers(FIRST_ID, engine.card.vocab_size, (rows, context)).astype(np.int32)
    for size in sorted({1, min(16, rows), rows}):
        results: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for repeat in range(2):
            for overlaps in (True, False) if repeat else (False, True):
                if record.left_s < 5 and results[True] and results[False]:
                    break
                engine.loop._cycle._pacing = SteadyPace(overlaps=overlaps)
                results[overlaps].append(run(engine, drawn[:size], num_new=num_new, returned=False, limit_s=30.0))
        engine.loop._cycle._pacing = SteadyPace()
        ratio = _ratio(results[True], results[False], "tokens_per_s")
        record.say("overlap", sequences=size, on=_medians(results[True]), off=_medians(results[False]), on_to_off=ratio)
