"""Step times estimated from the schedules that libtpu writes for a whole model: no TPU is needed, nothing is measured.

    python -m benchmarks.step_estimate [--only "30B on v6e:2x4, decode, 16 sequences"] [--out FILE.json]

Each case is compiled by `rayserve-moe compile-check --estimate` in a process of its own, which takes one to three
minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.published_rows import CODER
from benchmarks.table import tables
from rayserve_moe.tools.plan_slice.made_up import resized, save_config
from rayserve_moe.tools.presets import read_config

CONTEXT = 1024
SEQUENCES = (16, 128, 256, 1024)
LEAST_SINGLES = 2
"""Single tokens that a step on TPUs has, if only of padding."""
PREFILL_TOKENS = 8192
"""Prompt tokens of a data rank in a prefill step, beside 16 sequences."""


@dataclass(frozen=True)
class EstimatedCase:
    """One program of a model that is served on all of a topology, by data ranks of `tensor` devices each."""

    model: str
    topology: str
    program: str
    batch: int
    layers: int
    tensor: int = 1
    expert_dtype: str = "auto"
    expert_products: str = "auto"
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes in place of the model's."""
    in_blocks: bool = False
    """True if files hold experts in fp8 with a scale per 128 x 128."""

    def options(self, folder: str) -> list[str]:
        """Return the options of `compile-check`; a config that is no preset's is written to a folder."""
        model = self.model
        if self.sizes:
            in_files = {"quantization_config": BLOCKS} if self.in_blocks else {}
            save_config(resized(read_config(model), self.sizes) | in_files, folder)
            model = folder
        served = ["--model", model, "--topology", self.topology, "--tp", str(self.tensor)]
        sizes = ["--context", str(CONTEXT), "--batch", str(self.batch), "--prefill-tokens", str(PREFILL_TOKENS)]
        chosen = ["--page-size", "128", "--programs", self.program, "--layers", str(self.layers)]
        experts = ["--expert-dtype", self.expert_dtype, "--expert-products", self.expert_products]
        return [*served, *sizes, *chosen, *experts]


def _cases(
    name: str, model: str, topology: str, *, devices: int, layers: int, expert_dtype: str = "auto"
) -> Iterator[tuple[str, EstimatedCase]]:
    """Decode steps of all layers and a prefill step of three, by name. Where sequences are too few for a data rank on
    every device, devices share the heads.
    """
    for sequences in SEQUENCES:
        ranks = min(devices, sequences)
        batch, tensor = sequences // ranks, devices // ranks
        program = f"decode_{max(batch, LEAST_SINGLES)}"
        case = EstimatedCase(model, topology, program, batch, layers, tensor, expert_dtype)
        yield f"{name} on {topology}, decode, {sequences} sequences", case
    prefill = EstimatedCase(model, topology, f"prefill_{PREFILL_TOKENS}", 16, 3, expert_dtype=expert_dtype)
    yield f"{name} on {topology}, prefill, {PREFILL_TOKENS * devices} tokens", prefill


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def _coder() -> Iterator[tuple[str, EstimatedCase]]:
    """Qwen3-Coder-480B on four v7x: its published load of 64 sequences, with scales of columns and of blocks."""
    topology, devices = "tpu7x:2x2x1", 8
    decode = EstimatedCase("qwen3-235b-a22b", topology, "decode_64", 64, CODER["layers"], devices, "fp8", sizes=CODER)
    prefill = replace(decode, program=f"prefill_{PREFILL_TOKENS}", layers=3)
    for form, in_blocks in (("", False), (", 128 x 128", True)):
        for rows, products in (("", "auto"), (" and rows too", "fp8")):
            name = f"480B fp8{rows}{form} on {topology}"
            options = {"expert_products": products, "in_blocks": in_blocks}
            yield f"{name}, decode, 64 sequences", replace(decode, **options)
            yield f"{name}, prefill, {PREFILL_TOKENS} tokens", replace(prefill, **options)


CASES = dict(
    [
        *_cases("30B", "qwen3-30b-a3b", "v6e:2x4", devices=8, layers=48),
        *_cases("30B int8", "qwen3-30b-a3b", "v6e:2x4", devices=8, layers=48, expert_dtype="int8"),
        *_cases("30B fp8", "qwen3-30b-a3b", "v6e:2x4", devices=8, layers=48, expert_dtype="fp8"),
        *_cases("30B", "qwen3-30b-a3b", "v6e:4x4", devices=16, layers=48),
        *_cases("235B", "qwen3-235b-a22b", "v5p:2x4x4", devices=32, layers=94),
        *_coder(),
    ]
)
"""`int8` and `fp8` are experts of that `expert_dtype`. All layers of a decode step are compiled, which takes hardly
longer than few: they are one loop. A prefill step has tables of experts as small as its layers are few, which is 2 % of
the step.
"""

KEY = "step_estimate"
NUM_KEPT = 10
"""Ops of a layer, and of the rest, that the result file keeps: those that cost most."""
RESULTS = Path(__file__).parent / "results"


def run(case: str) -> dict[str, Any]:
    """Compile one case; returns the estimate. RuntimeError with the last line of the error where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        return estimated(case, CASES[case].options(folder))


def estimated(case: str, options: list[str]) -> dict[str, Any]:
    """Return the estimate of `compile-check` with these options; RuntimeError with its last line without one."""
    command = [sys.executable, "-m", "rayserve_moe.cli", "compile-check", *options]
    done = subprocess.run([*command, "--estimate", "--json"], capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise RuntimeError(f"{case}: {(done.stderr.strip() or 'no report').splitlines()[-1]}")
    (found,) = json.loads(done.stdout)["programs"]
    if found["error"]:
        raise RuntimeError(f"{case}: {found['error']}")
    estimate = found["estimate"]
    return estimate | {name: estimate[name][:NUM_KEPT] for name in ("ops_in_layer", "ops_outside")}


def main() -> None:
    """Estimate every case, writing the result file after each; then print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(CASES), action="append", help="may be given more than once")
    parser.add_argument("--out", type=Path, default=RESULTS / "step_estimate.json")
    arguments = parser.parse_args()
    known = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {KEY: {}}
    for case in arguments.only or CASES:
        known[KEY][case] = run(case)
        known[KEY] = {name: known[KEY][name] for name in CASES if name in known[KEY]}
        arguments.out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(tables(known))


if __name__ == "__main__":
    main()
