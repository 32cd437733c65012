"""LoRA adapters beside the weights: decoding and prompts of requests with and without, against a server without them.

    python -m benchmarks.adapters [--size mid] [--rank 16] [--experts] [--repeats 5] [--out FILE.json]

Sides run in turn. `off` is an engine without adapters. The other sides share an engine with eight resident adapters of
all adapted matrices, and of experts with `--experts`. Their requests name no adapter (`none`), adapters in turn (`one`,
`four`, `eight`), or one of eight in every other request (`half`). Decoding is 16 prompts of 16 tokens and 96 new
tokens; prompts are 16 x 512 tokens. `off` and `none` must give the same ids. It takes about five minutes on two quiet
cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from benchmarks.conditions import RESULTS, checkpoint_of, conditions, load_before_start, note, save
from benchmarks.engine_runs import in_turn, run_engine
from benchmarks.figures import Run, rate, speed_ratio
from benchmarks.markdown import markdown_table
from benchmarks.workloads import FIRST_PLAIN_ID, Workload
from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.checkpoints.names import tensor_places
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.model.adapters import adapted_matrices
from rayserve_moe.model.family_table import rules_of, spec_from_config
from rayserve_moe.model.parameters import parameter_specs, parameters_in_files

NUM_ADAPTERS, STREAMS = 8, 16
PARTS = {"decode": Workload(STREAMS, 16, 96), "prefill": Workload(STREAMS, 512, 1)}
SIDES: dict[str, list[str | None]] = {
    "off": [None],
    "none": [None],
    "one": ["a0"],
    "four": [f"a{number}" for number in range(4)],
    "eight": [f"a{number}" for number in range(NUM_ADAPTERS)],
    "half": [name for number in range(NUM_ADAPTERS) for name in (None, f"a{number}")],
}
"""Adapters of the requests of a side, in turn."""
TITLES = {
    "off": "server without adapters",
    "none": "no adapter in a request",
    "one": "one adapter",
    "four": "four adapters",
    "eight": "eight adapters",
    "half": "eight, in every other request",
}


def write_adapter(checkpoint: Path, directory: Path, *, rank: int, seed: int, experts: bool = False) -> Path:
    """Write a random adapter of all adapted matrices; `experts` includes experts with a tensor each in their files."""
    files, random = open_checkpoint(checkpoint), np.random.default_rng(seed)
    spec, rules = spec_from_config(files.config), rules_of(files.config, files.tensors)
    specs = parameter_specs(spec, dtype="bfloat16")
    adapted = {(each.group, each.name) for each in adapted_matrices(specs, spec, experts=experts)}
    tensors = {}
    for name, places in tensor_places(parameters_in_files(specs, rules, spec=spec), rules).items():
        if any((place.path[0], place.path[-1]) in adapted for place in places):
            outputs, inputs = places[0].spec.file_shape
            module = f"base_model.model.{name.removesuffix('.weight')}"
            for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                tensors[f"{module}.lora_{side}.weight"] = random.normal(0, 0.01, shape).astype(np.float32)
    directory.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def measure(engines: Mapping[str, Engine], *, repeats: int) -> dict[str, dict[str, list[Run]]]:
    """Return the runs of every part and side. RuntimeError where `off` and `none` give other ids."""
    found: dict[str, dict[str, list[Run]]] = {part: {side: [] for side in SIDES} for part in PARTS}
    vocab_size = engines["off"].card.vocab_size
    for part, workload in PARTS.items():
        for repeat in range(-1, repeats):  # the first is the warm-up
            random = np.random.default_rng([repeat + 1, workload.prompt_len])
            prompts = random.integers(FIRST_PLAIN_ID, vocab_size, (STREAMS, workload.prompt_len)).tolist()
            ids = {}
            for side in in_turn(list(SIDES), repeat + 1):
                names = [SIDES[side][place % len(SIDES[side])] for place in range(STREAMS)]
                run, ids[side] = run_engine(
                    engines[side], workload, prompts=prompts, seed=0, lora_path=None if side == "off" else names
                )
                if repeat >= 0:
                    found[part][side].append(run)
            if ids["off"] != ids["none"]:
                raise RuntimeError("requests without an adapter depend on the feature")
        note(adapters({"rank": 0, "parts": {part: found[part]}}))
    return found


def adapters(measured: Mapping[str, Any]) -> str:
    """Return a table with the rates of every side, and their ratio to requests without an adapter."""
    parts = measured["parts"]
    rows = []
    for side, title in TITLES.items():
        cells = [title]
        for part, runs in parts.items():
            workload = PARTS[part]
            count = workload.total_new_tokens if part == "decode" else workload.total_prompt_tokens
            cells += [str(rate(count, runs[side])), str(speed_ratio(runs[side], runs["none"]))]
        rows.append(cells)
    heads = [head for part in parts for head in (f"{part}, tokens/s", f"{part} / no adapter")]
    adapted = "experts too, " if measured.get("experts") else ""
    return markdown_table([f"{adapted}rank {measured['rank']}", *heads], rows)


def main() -> None:
    """Measure, save, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="mid", help="synthetic preset (default: mid)")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--experts", action="store_true", help="adapters change experts too")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "adapters.json")
    asked = parser.parse_args()
    load_before, checkpoint = load_before_start(), checkpoint_of(asked.size)
    settings: dict[str, Any] = {
        "max_running_requests": STREAMS,
        "precompile_bs_paddings": [STREAMS],
        "max_step_tokens": 512,
        "max_model_len": 1024,
        "num_pages": 1200,
        "structured_output": False,
        "enable_prefix_caching": False,
        "dtype": "bfloat16",
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        off = stack.enter_context(Engine(str(checkpoint), **settings))
        beside = {"max_loras": NUM_ADAPTERS, "max_lora_rank": asked.rank, "lora_experts": asked.experts}
        on = stack.enter_context(Engine(str(checkpoint), **settings, **beside))
        for number in range(NUM_ADAPTERS):
            path = write_adapter(checkpoint, folder / f"{number}", rank=asked.rank, seed=number, experts=asked.experts)
            outcome = on.load_lora_adapter(path, lora_name=f"a{number}")
            assert outcome.success, outcome.message
        result = conditions(off, size=asked.size, repeats=asked.repeats, load_before=load_before)
        if on.runner.later is not None:
            on.runner.later.wait()
        engines = {side: off if side == "off" else on for side in SIDES}
        parts = measure(engines, repeats=asked.repeats)
        slot_bytes = sum(array.nbytes for array in jax.tree.leaves(on.runner.adapters.stacks)) // NUM_ADAPTERS
        result["adapters"] = {"rank": asked.rank, "experts": asked.experts, "slot_bytes": slot_bytes, "parts": parts}
    save(result, asked.out)
    print(adapters(result["adapters"]))


if __name__ == "__main__":
    main()
