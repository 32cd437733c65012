"""Whole servers, compiled for whole TPU slices, or GPUs: every program of every config, and the sizes in the contract.

    python -m benchmarks.compile_gate [--layers 2] [--only qwen3_30b_a3b_v6e8] [--out FILE.json] [--write-limits]

Each case is checked by `rayserve-moe compile-check` in a process of its own; a run takes about a minute per program on
two cores and needs no TPU. Ends with 1 where a case does not fit, copies weights or KV, copies more activations than
`compile_limits.json` allows, or does not update its state in place. `--write-limits` writes those limits anew.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.table import tables

CONFIGS = {path.stem: ("--config", str(path)) for path in sorted(Path("configs").glob("*.yaml"))}
"""Options of the shipped configs. `compile-check` skips configs for CPU hosts."""

DECODE = "decode_16"
MOVES = f"{DECODE},fetch_slots,swap_layer"
MODELS: dict[str, tuple[str, ...]] = {
    "qwen3-30b-a3b@v6e:2x4": ("--programs", DECODE),
    "qwen3-30b-a3b@v5e:4x4": ("--programs", DECODE),
    "qwen3-235b-a22b@v5p:2x4x4": ("--programs", DECODE),
    "qwen3-235b-a22b@v6e:8x8": ("--programs", DECODE, "--dp", "32", "--tp", "2"),
    "qwen3-30b-a3b@v6e:2x4+32": ("--programs", MOVES),
    "qwen3-30b-a3b@v6e:2x4+128": ("--programs", MOVES),
    "qwen3-235b-a22b@v5p:2x4x4+32": ("--programs", MOVES),
    "qwen3-235b-a22b@v5p:2x4x4+128": ("--programs", MOVES),
}
"""Options by model, topology and redundant experts. Defaults are 16 sequences of 4096 tokens, and a data rank per
device. All exchange rows by `all_to_all`."""

HEADS = Path(__file__).parent / "heads"
VERIFIED = ("--return-routed-experts", "--programs", "decode_128,draft_16")
"""Options for programs with a draft model: the step that verifies seven drafts of each sequence, and drafting."""
EAGLE3 = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(HEADS / "qwen3-30b-a3b-eagle3"))
FEATURES: dict[str, tuple[str, ...]] = {
    "qwen3-30b-a3b@v6e:2x4, EAGLE3": (*EAGLE3, *VERIFIED),
    "deepseek-v3@v5p:4x4x4, NEXTN": ("--speculative-algorithm", "NEXTN", *VERIFIED),
    "qwen3-30b-a3b@v6e:2x4, adapters": (
        *("--max-loras", "8", "--expert-backend", "all_to_all"),
        *("--programs", f"{DECODE}_adapters,prefill_1024_adapters,put_adapter"),
    ),
}
"""Options by model, topology and feature. The number of sequences is as in MODELS."""

CARDS: dict[str, tuple[str, ...]] = {
    f"qwen3-30b-a3b@{card}": ("--programs", DECODE, "--context", "1280", "--return-routed-experts")
    for card in ("h100:2", "h200:1", "h200:2")
}
"""Options of `compile-check` by model and GPUs. They need the extra `gpu-compiler`, and run with `--only`."""

JOBS = 2
"""Programs that compile at a time if only a few layers are compiled. Whole models compile alone, as they are timed."""
KEY = "compile_gate"
LIMITED = ("copied_activation_bytes",)
LIMITS = Path(__file__).parent / "compile_limits.json"
RESULTS = Path(__file__).parent / "results"


def options_of(case: str) -> tuple[str, ...]:
    """Return the options of `compile-check` for a case."""
    if case in CONFIGS:
        return CONFIGS[case]
    if case in FEATURES:
        model, topology = case.partition(", ")[0].split("@")
        return ("--model", model, "--topology", topology, *FEATURES[case])
    if case in CARDS:
        model, topology = case.split("@")
        return ("--model", model, "--topology", topology, *CARDS[case])
    model, slice_and_more = case.split("@")
    topology, _, redundant = slice_and_more.partition("+")
    moves = ("--redundant-experts", redundant) if redundant else ()
    return ("--model", model, "--topology", topology, "--expert-backend", "all_to_all", *moves, *MODELS[case])


def check(case: str, *, num_layers: int = 0, num_jobs: int = JOBS) -> dict[str, Any] | None:
    """Compile a case, with `num_jobs` programs at a time if only a few layers are compiled.

    Returns the report, with the exit status. None where it is skipped.
    """
    command = [sys.executable, "-m", "rayserve_moe.cli", "compile-check", *options_of(case), "--json"]
    limits = [
        "--layers",
        str(num_layers),
        "--jobs",
        str(num_jobs if num_layers else 1),
        *(["--limits", str(LIMITS)] if case in CONFIGS else []),
    ]
    run = subprocess.run([*command, *limits], capture_output=True, text=True, check=False)
    if run.returncode == 0 and not run.stdout.strip():
        return None
    if not run.stdout.strip():
        raise RuntimeError(f"{case}: {run.stderr.strip().splitlines()[-1] if run.stderr.strip() else 'no report'}")
    return {"status": run.returncode, **json.loads(run.stdout)}


def limits_of(report: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return the measures of a report's programs, as limits for later reports."""
    return {program["name"]: {field: program[field] for field in LIMITED} for program in report["programs"]}


def _kept(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report without its long list of copied activations; their bytes stay."""
    programs = [{name: found[name] for name in found if name != "activation_copies"} for found in report["programs"]]
    return report | {"programs": programs}


def main() -> int:
    """Check every case, writing the result file after each; then print its table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", choices=[*CONFIGS, *MODELS, *FEATURES, *CARDS], action="append", help="may be given more than once"
    )
    parser.add_argument("--layers", type=int, default=0, help="only so many layers, and the configs alone")
    parser.add_argument("--jobs", type=int, default=JOBS, help="programs at a time, with few layers")
    parser.add_argument("--out", type=Path, help="default: results/compile_gate.json, with all layers")
    parser.add_argument("--write-limits", action="store_true")
    arguments = parser.parse_args()
    out = arguments.out or (None if arguments.layers else RESULTS / "compile_gate.json")
    known = json.loads(out.read_text(encoding="utf-8")) if out and out.exists() else {KEY: {}}
    limits = json.loads(LIMITS.read_text(encoding="utf-8"))
    status = 0
    for case in arguments.only or (CONFIGS if arguments.layers else [*CONFIGS, *MODELS, *FEATURES]):
        report = check(case, num_layers=arguments.layers, num_jobs=arguments.jobs)
        if report is None:
            print(case, "skipped: it serves on CPU hosts", flush=True)
            continue
        known[KEY][case] = _kept(report)
        if arguments.write_limits and case in CONFIGS:
            limits[report["name"]] = limits_of(report)
            LIMITS.write_text(json.dumps(limits, indent=1) + "\n", encoding="utf-8")
        if out:
            out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        status = 1 if report["faults"] else status
        print(case, "; ".join(report["faults"]) or "fits", flush=True)
    print(tables(known))
    return status


if __name__ == "__main__":
    sys.exit(main())
