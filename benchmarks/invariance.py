"""Log-probs of sampled tokens against their scores, and speed with `invariant_products` on and off.

    python -m benchmarks.invariance [--parts "native on,xla on,xla off,cost,tpus"] [--tokens 100000] [--size small]
    python -m benchmarks.invariance --parts tpus --only "30B on v6e:2x4, decode, 16 a rank"

Equality: under several versions of the weights, answers of mixed lengths are sampled together with others, and their
prompts with the answers are scored in batches of their own; log-probs are compared to the bit. The ratio of a token is
exp(scored - sampled), which GRPO multiplies by. Cost: the sides take turns, one run each per repeat. Native kernels
have the same bits with the setting on and off. Their sides run the same program, so their ratio shows the noise. On
TPUs steps are estimated from the compiler's schedules; nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conditions import RESULTS, checkpoint_of, conditions, load_before_start, machine_facts, note, save
from benchmarks.engine_runs import in_turn, run_engine
from benchmarks.step_estimate import EstimatedCase, estimated
from benchmarks.table import tables
from benchmarks.workloads import FIRST_PLAIN_ID, WORKLOADS, prompts_of
from rayserve_moe.checkpoints.synthetic import PRESETS, write_checkpoint
from rayserve_moe.inprocess.engine import Engine

SETTINGS_OF: dict[str, dict[str, Any]] = {
    "native": {"dtype": "bfloat16", "cpu_kernels": "native"},
    "xla": {"dtype": "float32", "cpu_kernels": "off"},
}
KEY, PARTS = "invariance", ("native on", "xla on", "xla off", "cost", "tpus")
EQUALITY_SIZE, NUM_VERSIONS, LONGEST_PROMPT, NUM_PROMPTS, CHOICES = "tiny", 4, 96, 32, 4
NEW_TOKENS = 200


def equality(kernels: str, setting: str, *, num_tokens: int) -> dict[str, Any]:
    """Sample and score under each weight version; return the numbers of compared and of differing tokens."""
    counts = {"versions": NUM_VERSIONS, "tokens": 0, "differing": 0, "ratio_not_1": 0, "largest": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        paths = [_version(Path(folder), seed) for seed in range(NUM_VERSIONS)]
        with Engine(str(paths[0]), invariant_products=setting, **SETTINGS_OF[kernels]) as engine:
            for version, path in enumerate(paths):
                engine.update_weights_from_disk(path, weight_version=str(version))
                for sampled, scored in _rounds(engine, version, num_tokens=-(-num_tokens // NUM_VERSIONS)):
                    counts["tokens"] += len(sampled)
                    counts["differing"] += int((sampled != scored).sum())
                    counts["ratio_not_1"] += int((np.exp(scored - sampled) != 1).sum())
                    counts["largest"] = max(counts["largest"], float(np.abs(scored - sampled).max()))
                note(f"{kernels} {setting}, version {version}: {counts}")
    return counts


def _version(folder: Path, seed: int) -> Path:
    return write_checkpoint(folder / str(seed), PRESETS[EQUALITY_SIZE], seed=seed, dtype="float32")


def _rounds(engine: Engine, version: int, *, num_tokens: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield float32 log-probs as sampled and as scored, until enough tokens were compared."""
    generator, count = np.random.default_rng(version), 0
    while count < num_tokens:
        lengths = generator.integers(1, LONGEST_PROMPT, NUM_PROMPTS)
        prompts = [generator.integers(FIRST_PLAIN_ID, engine.card.vocab_size, n).tolist() for n in lengths]
        budgets = generator.integers(1, NEW_TOKENS, NUM_PROMPTS)
        sampling = [
            {"max_new_tokens": int(budget), "n": CHOICES, "temperature": 1.0, "seed": count + i, "ignore_eos": True}
            for i, budget in enumerate(budgets)
        ]
        answers = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        engine.flush_cache()
        whole = [prompts[i // CHOICES] + answer["output_ids"] for i, answer in enumerate(answers)]
        order = generator.permutation(len(answers))
        scores = engine.generate(
            input_ids=[whole[i] for i in order],
            sampling_params={"max_new_tokens": 0, "temperature": 1.0},
            return_logprob=True,
            logprob_start_len=0,
        )
        for place, score in zip(order, scores, strict=True):
            if str(version) != score["meta_info"]["weight_version"]:
                raise RuntimeError(f"scored under version {score['meta_info']['weight_version']}, not {version}")
            sampled = _logprobs(answers[place]["meta_info"]["output_token_logprobs"])
            count += len(sampled)
            yield sampled, _logprobs(score["meta_info"]["input_token_logprobs"][-len(sampled) :])


def _logprobs(entries: list[Any]) -> np.ndarray:
    return np.array([entry[0] for entry in entries], np.float32)


def cost(known: dict[str, Any], size: str, *, repeats: int, save_now: Callable[[], None]) -> None:
    """Run every workload by all kernels with the setting on and off, in turn; write the result file after each."""
    sides = [f"{kernels} {setting}" for kernels in SETTINGS_OF for setting in ("on", "off")]
    path, load = checkpoint_of(size), load_before_start()
    with ExitStack() as stack:
        engines, facts = {}, {}
        for side in sides:
            kernels, setting = side.split()
            engine = stack.enter_context(Engine(str(path), invariant_products=setting, **SETTINGS_OF[kernels]))
            facts[side] = conditions(engine, size=size, repeats=repeats, load_before=load)
            engines[side] = engine
            note(f"{side} started")
        known.update(facts=facts, runs={})
        for name in WORKLOADS:
            known["runs"][name] = _runs(name, engines, repeats=repeats)
            save_now()


def _runs(name: str, engines: Mapping[str, Engine], *, repeats: int) -> dict[str, list[Any]]:
    """Return the runs of a workload by side, without the first of each side."""
    runs: dict[str, list[Any]] = {side: [] for side in engines}
    for repeat in range(-1, repeats):
        for side in in_turn([*engines], repeat + 1):
            prompts = prompts_of(name, repeat, vocab_size=engines[side].card.vocab_size)
            run, _ = run_engine(engines[side], WORKLOADS[name], prompts=prompts, seed=repeat + 1)
            if repeat >= 0:
                runs[side].append(run)
        note(f"{name} {repeat + 1}/{repeats}")
    return runs


def steps_of(name: str, model: str, topology: str, *, layers: int = 4) -> dict[str, EstimatedCase]:
    """Return a decode step of 16 sequences of each rank, and a prefill step, by name; `layers` are compiled, 0: all."""
    prefill = EstimatedCase(model, topology, f"prefill_{PREFILL_TOKENS}", SEQUENCES, layers)
    return {
        f"{name}, decode, {SEQUENCES} a rank": replace(prefill, program=f"decode_{SEQUENCES}"),
        f"{name}, prefill, {PREFILL_TOKENS:,} a rank": prefill,
    }


SEQUENCES, PREFILL_TOKENS = 16, 8192
"""Sequences and prompt tokens of a data rank."""
STEPS_OF_TPUS = {
    **steps_of("30B on v6e:2x4", "qwen3-30b-a3b", "v6e:2x4"),
    **steps_of("gpt-oss 20B on v6e:2x4", "gpt-oss-20b", "v6e:2x4"),
    **steps_of("Qwen3.5 35B on v6e:2x4", "qwen3.5-35b-a3b", "v6e:2x4", layers=0),
}
KEPT = ("step", "layer", "compiled_layers", "num_layers")
"""Fields of an estimate that the result file keeps."""


def on_tpus(known: dict[str, Any], names: Iterable[str], *, save_now: Callable[[], None]) -> None:
    """Estimate these steps with the setting on and off; write the result file after each."""
    for name, setting in product(names, ("off", "on")):
        with tempfile.TemporaryDirectory() as folder:
            options = STEPS_OF_TPUS[name].options(folder)
            found = estimated(f"{name}, {setting}", [*options, "--invariant-products", setting])
        known.setdefault(name, {})[setting] = {key: found[key] for key in KEPT if key in found}
        note(f"{name}, {setting}: {found['step']['seconds'] * 1e3:.2f} ms")
        save_now()


def main() -> None:
    """Measure, write the result file, print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; others stay as they are in the file")
    parser.add_argument("--size", choices=list(PRESETS), default="small", help="synthetic preset for the cost")
    parser.add_argument("--tokens", type=int, default=100_000, help="compared, of each kernels")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=list(STEPS_OF_TPUS), action="append", help="steps of TPUs; may be repeated")
    parser.add_argument("--out", type=Path, default=RESULTS / "invariance.json")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown part {min(unknown)}; known parts: {PARTS}")
    out, load = arguments.out, load_before_start()
    result = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {KEY: {"equality": {}}}
    for part in parts:
        if part == "cost":
            known = result[KEY].setdefault("cost", {})
            cost(known, arguments.size, repeats=arguments.repeats, save_now=partial(save, result, out))
            continue
        if part == "tpus":
            steps = result[KEY].setdefault("tpus", {})
            on_tpus(steps, arguments.only or STEPS_OF_TPUS, save_now=partial(save, result, out))
            continue
        kernels, setting = part.split()
        found = equality(kernels, setting, num_tokens=arguments.tokens)
        result[KEY]["equality"][part] = {"machine": machine_facts(load), **found}
        save(result, out)
    save(result, out)
    print(tables(result))


if __name__ == "__main__":
    main()
