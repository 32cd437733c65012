"""Whole models of other families on TPU slices that hold them: what a decode step holds, copies and exchanges.

    python -m benchmarks.families [--sizes] [--only gpt-oss-120b@v6e:4x4] [--out FILE.json]

16 sequences of 4096 tokens per data rank (2048 where the model is served with dense attention up to that length), all
layers compiled by `rayserve-moe compile-check --estimate`, each in a process of its own; no TPU is needed, nothing is
measured. Ends with 1 where a model does not fit, copies weights or
pages, or has more than `MOST_TEMPORARIES` bytes of temporaries. With `--sizes` nothing is compiled: weights and cache
are those that a server would lay out, next to what a program may use.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.estimate_table import milliseconds, share
from benchmarks.markdown import markdown_table
from rayserve_moe.config.load import set_environment_defaults
from rayserve_moe.execution.memory import bytes_on_device
from rayserve_moe.tools.compile_check import COMPILER_ENVIRONMENT, use_host_alone
from rayserve_moe.tools.estimate.chips import chip_of
from rayserve_moe.tools.served_cases import case_of_model, lay_out

SEQUENCES, CONTEXT = 16, 4096
MOST_TEMPORARIES = 200_000_000
GROUPED_BYTES = 2 * 8 * 128 * 2
"""Of a token in a layer of grouped-query attention with 8 KV heads of 128, in bfloat16: what latents stand beside."""


@dataclass(frozen=True)
class Family:
    """A model on all devices of a topology, by data ranks of `tensor` devices; experts are in `expert_dtype`."""

    model: str
    topology: str
    tensor: int = 1
    expert_dtype: str = "bfloat16"
    context: int = CONTEXT

    @property
    def name(self) -> str:
        return f"{self.model}@{self.topology}" + (f", tp {self.tensor}" if self.tensor > 1 else "")

    def options(self) -> list[str]:
        """Return the options of `compile-check`."""
        served = ["--model", self.model, "--topology", self.topology, "--tp", str(self.tensor)]
        sizes = ["--batch", str(SEQUENCES), "--context", str(self.context), "--expert-dtype", self.expert_dtype]
        return [*served, *sizes, "--programs", f"decode_{SEQUENCES}", "--estimate", "--json"]


DENSE_CONTEXT = 2048
"""Context of models with sparse attention up to which they are dense: their index selects every token."""
CASES = {
    case.name: case
    for case in (
        Family("deepseek-v3", "v5p:4x4x4"),
        Family("deepseek-v3", "v5p:4x4x4", 4),
        Family("gpt-oss-120b", "v6e:4x4"),
        Family("glm-4.5-air", "v6e:2x4", 8),
        Family("glm-4.5-air", "v6e:2x4", 2, "int8"),
        Family("glm-4.5-air", "v6e:2x2", 4, "int8"),
        Family("glm-4.5-air", "v5p:2x2x1"),
        Family("minimax-m2", "v6e:2x4", 8, "int8"),
        Family("minimax-m2", "v6e:4x4", 8),
        Family("gpt-oss-20b", "v6e:2x4"),
        Family("qwen3.5-35b-a3b", "v6e:2x2"),
        Family("qwen3.5-35b-a3b", "v6e:2x4"),
        Family("qwen3-next-80b-a3b", "v6e:2x4"),
        Family("qwen3.5-397b-a17b", "v5p:4x4x4"),
        Family("qwen3.5-397b-a17b", "tpu7x:2x2x1", 1, "fp8"),
        Family("hy3", "v6e:4x4", 8, "int8"),
        Family("hy3", "v5p:2x2x2", 2),
        Family("minimax-m3", "v6e:4x4", 8, "int8", DENSE_CONTEXT),
        Family("mistral-small-4", "v6e:2x2", 4, "int8"),
        Family("mistral-small-4", "v6e:2x4", 8),
        Family("glm-5.2", "v6e:4x8", 8, "int8", DENSE_CONTEXT),
        Family("deepseek-v3.2", "v6e:4x8", 8, "int8", DENSE_CONTEXT),
        Family("deepseek-v3.2", "v5p:2x2x4", 4, "bfloat16", DENSE_CONTEXT),
        Family("gemma-4-26b-a4b", "v6e:2x2"),
        Family("mimo-v2-flash", "v6e:4x4", 4, "int8"),
        Family("mimo-v2-flash", "v6e:4x8", 8),
        Family("mimo-v2-flash", "v5p:2x2x1", 4, "int8"),
        Family("kimi-linear-48b-a3b", "v6e:2x2"),
        Family("kimi-linear-48b-a3b", "v6e:2x4"),
        Family("kimi-linear-48b-a3b", "v5p:2x2x1"),
        Family("nemotron-3-nano-30b-a3b", "v6e:2x2"),
        Family("nemotron-3-nano-30b-a3b", "v6e:2x4"),
        Family("nemotron-3-nano-30b-a3b", "v5p:2x2x1"),
        Family("nemotron-3-super-120b-a12b", "v6e:2x4", 8, "int8"),
        Family("nemotron-3-super-120b-a12b", "v6e:4x4", 8),
        Family("nemotron-3-super-120b-a12b", "v5p:2x2x1"),
        Family("ling-3.0-flash", "v6e:4x4"),
        Family("ling-3.0-flash", "v5p:2x2x2"),
        Family("granite-4.0-h-small", "v6e:2x2"),
        Family("granite-4.0-h-small", "v6e:2x4"),
    )
}
KEY = "families"
RESULTS = Path(__file__).parent / "results" / "families.json"


def run(case: Family) -> dict[str, Any]:
    """Compile one case; returns what is kept of its report. RuntimeError with the last line of the error if none."""
    command = [sys.executable, "-m", "rayserve_moe.cli", "compile-check", *case.options()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise RuntimeError(f"{case.name}: {(done.stderr.strip() or 'no report').splitlines()[-1]}")
    report = json.loads(done.stdout)
    (program,) = report["programs"]
    kept = ("error", "memory", "copied_bytes", "collectives", "kernels", "copies")
    estimate = program["estimate"] or {}
    return {
        **{name: report[name] for name in ("num_layers", "dp", "tp", "weights_bytes", "kv_pool_bytes", "faults")},
        "expert_dtype": case.expert_dtype,
        "context": case.context,
        **{name: program[name] for name in kept},
        "estimate": {name: estimate.get(name) for name in ("layer", "step", "roofline", "bound", "share_of_roofline")},
    }


def sizes(cases: Mapping[str, Family]) -> str:
    """Render a row per model, without compiling it; GB are 1e9 bytes of one device."""
    set_environment_defaults(COMPILER_ENVIRONMENT)
    use_host_alone()
    rows = []
    for name, case in cases.items():
        values = {"max_model_len": case.context, "max_running_requests": SEQUENCES, "expert_dtype": case.expert_dtype}
        laid = case_of_model(case.model, case.topology, tp=case.tensor, values=values)
        served = lay_out(laid)
        plan, layers = served.config.plan, served.config.spec.num_layers
        cached = bytes_on_device(served.state(laid.settings.cache.num_pages).pools)
        held, capacity = bytes_on_device(served.weights), chip_of(case.topology).device_capacity
        of_token = cached / (SEQUENCES * case.context)
        gigabytes = (f"{each / 1e9:.2f}" for each in (held, cached, held + cached, capacity))
        split = f"dp {plan.data_size} x tp {plan.tensor_size}"
        share = f"{of_token / (GROUPED_BYTES * layers):.3f}"
        rows.append([f"{name}, {layers} layers", split, case.expert_dtype, *gigabytes, f"{of_token:,.0f}", share])
    heading = ["model and slice", "split", "experts", "weights, GB", "KV, GB", "together", "may use"]
    return markdown_table([*heading, "cache of a token, bytes", "of 8 KV heads of 128"], rows)


def faults_of(found: Mapping[str, Any]) -> list[str]:
    """Return the faults of a case."""
    memory = found["memory"] or {}
    over = memory.get("temporaries", 0) > MOST_TEMPORARIES
    return [*found["faults"], *([f"{memory['temporaries'] / 1e9:.2f} GB of temporaries"] if over else [])]


def families(cases: Mapping[str, Any]) -> str:
    """Render a row per model; GB are 1e9 bytes of one device."""
    heading = ["model and slice", "split", "experts", "weights, GB", "KV, GB", "peak, GB", "limit, GB"]
    heading += ["temporaries, GB", "weights or KV copied, bytes", "XLA's exchanges, MB a step", "kernels"]
    heading += ["cache of a token, bytes", "of 8 KV heads of 128", "step calibrated, ms", "share of the bound"]
    return markdown_table(heading, [_row(case, found) for case, found in cases.items()])


def _row(case: str, found: Mapping[str, Any]) -> list[str]:
    split = f"dp {found['dp']} x tp {found['tp']}"
    memory, step = found["memory"], found["estimate"]["step"]
    if not memory:
        return [case, split, found["expert_dtype"], found["error"], *[""] * 11]
    cached = found["kv_pool_bytes"] / (SEQUENCES * found["context"])
    exchanged = sum(each["num_bytes"] * each["times"] for each in found["collectives"])
    return [
        f"{case}, {found['num_layers']} layers",
        split,
        found["expert_dtype"],
        *(f"{found[name] / 1e9:.2f}" for name in ("weights_bytes", "kv_pool_bytes")),
        *(f"{memory[name] / 1e9:.2f}" for name in ("peak", "limit")),
        f"{memory['temporaries'] / 1e9:.3f}",
        f"{sum(found['copied_bytes'].values()):,}",
        f"{exchanged / 1e6:,.1f}",
        ", ".join(found["kernels"]),
        f"{cached:,.0f}",
        f"{cached / (GROUPED_BYTES * found['num_layers']):.3f}",
        milliseconds(step) if step else "",
        share(max(found["estimate"]["roofline"].values()), step) if step else "",
    ]


def main() -> int:
    """Check every case, writing the result file after each; then print its table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(CASES), action="append", help="may be given more than once")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--sizes", action="store_true", help="without compiling")
    arguments = parser.parse_args()
    if arguments.sizes:
        print(sizes({name: CASES[name] for name in arguments.only or CASES}))
        return 0
    known = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {KEY: {}}
    faults: dict[str, list[str]] = {}
    for name in arguments.only or CASES:
        known[KEY][name] = run(CASES[name])
        known[KEY] = {case: known[KEY][case] for case in CASES if case in known[KEY]}
        arguments.out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        faults[name] = faults_of(known[KEY][name])
    print(families(known[KEY]), *(f"{name}: {'; '.join(each)}" for name, each in faults.items() if each), sep="\n")
    return 1 if any(faults.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
