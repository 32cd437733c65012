"""One prepared run on an accelerator of minutes: right answers, tokens per second, cost of capture, overlap, drafts.

    python -m benchmarks.accelerator [--out FOLDER] [--budget 570] [--small] [--only correct,decode]

Every part has a share of the time, and ends early rather than late; a part that fails is recorded, and the next one
begins. Each record is a line of JSON with the card's name and the version of jax. `--small` takes tiny shapes and runs
on a CPU: it shows that the script runs. It needs this package alone, with jax 0.10.2 or a newer one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import accelerator_correct as correct
from benchmarks.accelerator_decode import capture, overlap, prefill
from benchmarks.accelerator_model import random_weights, shape_of, write_model
from rayserve_moe.balancing.placement import identity_placement, placement_from
from rayserve_moe.config.load import set_environment_defaults
from rayserve_moe.engine.extension import extension_of
from rayserve_moe.engine.speculation.steps import DraftedSteps

SHARES = {"machine": 0.03, "correct": 0.17, "drafts": 0.17, "eplb": 0.08, "decode": 0.55}
"""Shares of the time by part, in the order of the run."""
MATRIX = 8192
"""Rows and columns of the product that shows the peak."""
MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
"""Share of a GPU's memory, as a server has it: by default jax takes 0.75, and 256 sequences do not fit on an H200."""


@dataclass
class Record:
    """Lines of the result, and the time that is left for a part."""

    out: Path
    is_small: bool
    reference: Path
    started: float = field(default_factory=time.perf_counter)
    ends: float = 0.0
    """Time at which the running part has to end, by `time.perf_counter`."""
    peak_flops: float = 0.0
    """Operations per second of a large product in bfloat16, as measured here."""

    def say(self, part: str, **values: Any) -> None:
        """Write a line: the part, the card, jax and the values."""
        card = jax.devices()[0]
        line = json.dumps(
            {
                "part": part,
                "t": round(time.perf_counter() - self.started, 1),
                "card": card.device_kind,
                "platform": card.platform,
                "jax": jax.__version__,
                **values,
            }
        )
        print(line, flush=True)
        with (self.out / "accelerator.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    @property
    def left_s(self) -> float:
        """Return the seconds that the running part has left."""
        return self.ends - time.perf_counter()


def machine(record: Record) -> None:
    """Record the peak of a product, the rate of a copy, and memory."""
    size = 256 if record.is_small else MATRIX
    matrix = jnp.ones((size, size), jnp.bfloat16)
    array = jnp.ones((1 << 20 if record.is_small else 1 << 30,), jnp.bfloat16)
    record.peak_flops = 2 * size**3 / fastest(jax.jit(lambda x: x @ x), matrix)
    copied = 2 * array.nbytes / fastest(jax.jit(lambda x: x + 1), array)
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    record.say("machine", product_flops=record.peak_flops, copy_bytes_per_s=copied, memory_bytes=memory)


def fastest(call: Callable[[jax.Array], jax.Array], argument: jax.Array) -> float:
    """Return the least seconds of ten calls after the first."""
    jax.block_until_ready(call(argument))
    times = []
    for _ in range(10):
        begun = time.perf_counter()
        jax.block_until_ready(call(argument))
        times.append(time.perf_counter() - begun)
    return min(times)


def expected_of(record: Record) -> Any:
    """Wait for the reference answers of the CPU process."""
    while not record.reference.exists():
        if record.left_s < 0:
            raise TimeoutError("the CPU has not computed its answers in time")
        time.sleep(0.2)
    return np.load(record.reference)


def check_answers(record: Record) -> None:
    """Compare ids and rows with float32 by XLA on the CPU, in float32 and bfloat16."""
    for dtype in ("float32", "bfloat16"):
        answers, facts = correct.calculator(dtype)
        record.say(
            "correct",
            model="calculator",
            dtype=dtype,
            **facts,
            **correct.compare("calculator", answers, expected_of(record)),
        )
    answers, facts = correct.tiny("float32")
    record.say(
        "correct", model="tiny", dtype="float32", **facts, **correct.compare("tiny", answers, expected_of(record))
    )


DRAFTED = {
    "NGRAM": {},
    "EAGLE3": {"speculative_draft_model_path": str(Path(__file__).parent / "heads" / "calculator-eagle3")},
}
FEWER = {"max_num_seqs": 4, "precompile_bs_paddings": [4], "max_step_tokens": 32, "speculative_num_steps": 3}


def check_drafts(record: Record) -> None:
    """Draft in every step: n-grams of the tiny model's loops, and the head of the calculator beyond its answers."""
    for algorithm, more in DRAFTED.items():
        if record.left_s < 5:
            record.say("drafts", algorithm=algorithm, skipped="no time left")
            continue
        model, name = ("synthetic:tiny", "tiny") if algorithm == "NGRAM" else ("trained:calculator", "")
        settings = {**correct.BASE, **FEWER, "speculative_algorithm": algorithm, **more}
        with correct.LLM(model, dtype="float32", **settings) as llm:
            steps = extension_of(llm.engine.loop._cycle.extensions, DraftedSteps)
            assert steps is not None, "speculation is on"
            steps.speculation._fixed = True
            generator = np.random.default_rng(3)
            prompts = (
                [{"prompt_token_ids": generator.integers(3, 512, n).tolist()} for n in correct.PROMPT_LENGTHS]
                if name
                else [f"{a}+{b}=" for a, b in correct.SUMS]
            )
            greedy = correct.SamplingParams(temperature=0, max_tokens=64 if name else 24, ignore_eos=True, logprobs=0)
            answers = llm.generate(prompts, greedy, use_tqdm=False)
            _, totals = llm.engine.loop.drafts
        facts = {"chains": totals.chains, "drafted": totals.drafted, "accepted": totals.accepted}
        compared = correct.compare(name, answers, expected_of(record)) if name else {}
        record.say("drafts", algorithm=algorithm, is_drafted=totals.drafted > 0, **facts, **compared)


def check_eplb(record: Record) -> None:
    """Move experts of one device to a placement by hand while it answers; two ranks need two devices."""
    record.say("eplb", data_ranks=2, impossible="a mesh of jax holds a device once: two ranks need two devices")
    more = {"num_redundant_experts": 8, "enable_eplb": True, "eplb_interval": 1_000_000, "eplb_window": 64}
    with correct.LLM("synthetic:tiny", dtype="float32", **{**correct.BASE, **more}) as llm:
        layout, report, steps = llm.engine.card.routing, llm.engine.loop.start_report, llm.engine.loop.eplb
        first = identity_placement(
            len(layout.layer_ids),
            layout.num_experts,
            ep_size=report.num_expert_ranks,
            num_redundant=report.num_redundant_experts,
        )
        steps.set_target(
            placement_from(
                first.expert_of_slot[:, ::-1], None, num_experts=layout.num_experts, ep_size=report.num_expert_ranks
            )
        )
        generator = np.random.default_rng(3)
        prompts = [{"prompt_token_ids": generator.integers(3, 512, n).tolist()} for n in correct.PROMPT_LENGTHS]
        greedy = correct.SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=0)
        answers = llm.generate(prompts, greedy, use_tqdm=False)
        progress = steps.migration.progress
    facts = {"slots_moved": progress.num_slots, "is_done": progress.is_done}
    record.say("eplb", data_ranks=1, **facts, **correct.compare("tiny", answers, expected_of(record)))


def measure_shape(record: Record) -> None:
    """Measure decode, whole requests, prefill and overlap at the shape of Qwen3-30B-A3B."""
    config = shape_of(is_small=record.is_small)
    with tempfile.TemporaryDirectory() as folder, random_weights():
        path = write_model(Path(folder) / "model", config)
        engines = capture(record, path, config)
        try:
            prefill(record, engines, config)
            overlap(record, engines)
        finally:
            for engine in engines.values():
                engine.shutdown()


PARTS: dict[str, Callable[[Record], None]] = {
    "machine": machine,
    "correct": check_answers,
    "drafts": check_drafts,
    "eplb": check_eplb,
    "decode": measure_shape,
}


COMPARED = {"correct", "drafts", "eplb"}
"""Parts that compare with the answers of the CPU."""


def cpu_answers(reference: Path) -> subprocess.Popen[bytes]:
    """Start a process that writes the answers of the CPU."""
    command = [sys.executable, "-m", "benchmarks.accelerator_correct", str(reference)]
    return subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=subprocess.DEVNULL)


def main() -> None:
    """Run the parts; the exit status is 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build/accelerator")))
    parser.add_argument("--budget", type=float, default=570.0, help="seconds of the whole run")
    parser.add_argument("--small", action="store_true", help="tiny shapes, also on a CPU")
    parser.add_argument("--only", default="", help=f"parts, separated by commas, of {', '.join(PARTS)}")
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name]
    if unknown := set(only) - PARTS.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}; known parts: {', '.join(PARTS)}")
    set_environment_defaults(MEMORY)
    options.out.mkdir(parents=True, exist_ok=True)
    reference = options.out / "cpu.npz"
    reference.unlink(missing_ok=True)
    record, has_failed = Record(options.out, options.small, reference), False
    if jax.devices()[0].platform == "cpu" and not options.small:
        sys.exit("jax has a CPU alone: `--small` shows that the script runs")
    chosen = [name for name in PARTS if not only or name in only]
    beside = cpu_answers(reference) if set(chosen) & COMPARED else None
    try:
        for name in chosen:
            share = SHARES[name] / sum(SHARES[each] for each in chosen)
            unused = max(0.0, record.left_s) if record.ends else 0.0
            record.ends = time.perf_counter() + unused + share * options.budget
            try:
                PARTS[name](record)
            except Exception as error:  # noqa: BLE001 (the other parts are worth as much)
                has_failed = True
                traceback.print_exc()
                record.say(name, error=type(error).__name__, text=str(error)[-800:])
    finally:
        if beside is not None:
            beside.terminate()
            beside.wait()
    record.say("done", seconds=round(time.perf_counter() - record.started, 1), failed=has_failed)
    sys.stdout.flush()
    os._exit(int(has_failed))


if __name__ == "__main__":
    main()
