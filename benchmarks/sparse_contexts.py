"""Decode steps of models with sparse attention by context, estimated from libtpu's schedules: nothing is measured.

    python -m benchmarks.sparse_contexts [--only NAME] [--out FILE.json]

Each case is a server with a `max_model_len` of 128k. Its decode step is compiled once, in a process of its own, and
priced with all sequences at each of the contexts that fit: a pool for them is added to the memory of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.compiled_cases import run_cases
from benchmarks.markdown import markdown_table
from rayserve_moe.config.load import set_environment_defaults
from rayserve_moe.execution.memory import bytes_on_device
from rayserve_moe.execution.programs.compiled import lowered, optimized
from rayserve_moe.execution.programs.specs import programs_of
from rayserve_moe.tools.compile_check import COMPILER_ENVIRONMENT, estimator_of, use_host_alone
from rayserve_moe.tools.estimate.chips import chip_of
from rayserve_moe.tools.estimate.dump import DumpFolder, Schedules, dump_environment
from rayserve_moe.tools.hlo_text import read_program
from rayserve_moe.tools.served_cases import case_of_model, lay_out

LONGEST = 1 << 17
CONTEXTS = (1024, 2048, 8192, 1 << 16, LONGEST)
PAGE_SIZE = 128
KERNELS = ("token_index", "chosen_attention", "paged_attention")
"""Kernels of sparse attention, the last for tokens that see all."""


@dataclass(frozen=True)
class SparseCase:
    """A model on all devices of a topology, by data ranks of `tensor` devices with `batch` sequences each."""

    model: str
    topology: str
    tensor: int
    batch: int
    sequences: int
    """Sequences of all data ranks."""
    expert_dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"{self.model}@{self.topology}, {self.sequences} sequences"


CASES = {
    case.name: case
    for case in (
        SparseCase("deepseek-v3.2", "v5p:2x4x4", 4, 2, 16),
        SparseCase("deepseek-v3.2", "v5p:2x4x4", 1, 2, 64),
        SparseCase("deepseek-v3.2", "v5p:2x4x4", 1, 8, 256),
        SparseCase("deepseek-v3.2", "v5p:4x4x4", 4, 4, 64),
        SparseCase("deepseek-v3.2", "v5p:4x4x4", 1, 4, 256),
        SparseCase("deepseek-v3.2", "v6e:8x8", 4, 4, 64, "int8"),
        SparseCase("deepseek-v3.2", "v6e:4x8", 8, 4, 16, "int8"),
        SparseCase("glm-5.2", "v5p:2x4x4", 4, 2, 16),
        SparseCase("glm-5.2", "v5p:2x4x4", 1, 2, 64),
        SparseCase("glm-5.2", "v6e:4x8", 8, 4, 16, "int8"),
    )
}
"""Cases in bfloat16 if it fits; v6e:4x8 is the smallest v6e slice that holds the models."""


def compile_here(case: SparseCase, folder: Path) -> dict[str, Any]:
    """Compile the decode step of a case and price it at each context that fits; schedules go to `folder`."""
    set_environment_defaults(COMPILER_ENVIRONMENT | dump_environment(folder))
    use_host_alone()
    values = {"max_model_len": LONGEST, "max_running_requests": case.batch, "expert_dtype": case.expert_dtype}
    laid = case_of_model(case.model, case.topology, tp=case.tensor, values=values | {"page_size": PAGE_SIZE})
    served, estimator = lay_out(laid), estimator_of(laid, dump=folder)
    plan, name = served.config.plan, f"decode_{max(2, case.batch)}"
    num_pages = {context: case.batch * context // PAGE_SIZE + 1 for context in CONTEXTS}
    (program,) = (each for each in programs_of(served, num_pages=num_pages[CONTEXTS[0]]) if each.name == name)
    dump = DumpFolder(folder)
    compiled = optimized(lowered(program, plan), plan, kernels=served.config.kernels)
    text, peak = read_program(compiled.as_text()), compiled.memory_analysis().peak_memory_in_bytes
    pools = {context: bytes_on_device(served.state(count).pools) for context, count in num_pages.items()}
    schedules, limit, contexts = Schedules(text, dump.take()), chip_of(case.topology).device_capacity, {}
    for context in CONTEXTS:
        needed = peak + pools[context] - pools[CONTEXTS[0]]
        sized = replace(estimator, sizes=replace(estimator.sizes, context=context))
        step = _kept(asdict(sized.of_schedules(text, schedules))) if needed <= limit else {}
        contexts[str(context)] = {"needed_bytes": needed, **step}
    return {"case": asdict(case), "dp": plan.data_size, "limit_bytes": limit, "contexts": contexts}


def _kept(estimate: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of an estimate: the step, its bounds, and the kernels of a layer."""
    ops = [op for op in estimate["ops_in_layer"] if any(op["name"].startswith(name) for name in KERNELS)]
    kept = ("name", "times", "us", "bundles", "hbm_bytes", "is_least")
    return {
        "step": estimate["step"],
        "roofline": estimate["roofline"],
        "share_of_roofline": estimate["share_of_roofline"],
        "num_layers": estimate["num_layers"],
        "num_open_ops": estimate["num_open_ops"],
        "kernels": [{name: op[name] for name in kept} for op in ops],
    }


def sparse_contexts(cases: Mapping[str, Any]) -> str:
    """Return a row per case and context; GB are 1e9 bytes of one device."""
    heading = ["model, slice and sequences", "split, experts", "context", "memory, GB", "limit, GB"]
    heading += ["step calibrated, ms", "of the step at 2,048", "HBM of the step, GB", "share of the bound"]
    heading += ["bundles of the index", "bundles of attention"]
    rows = []
    for name, found in cases.items():
        case, contexts = found["case"], found["contexts"]
        split = f"dp {found['dp']} x tp {case['tensor']}, {case['expert_dtype']}"
        at_2048 = contexts["2048"].get("step")
        for context, each in contexts.items():
            needed, limit = (f"{size / 1e9:.2f}" for size in (each["needed_bytes"], found["limit_bytes"]))
            cells = _cells(each, at_2048) if "step" in each else ["does not fit", *[""] * 5]
            rows.append([name, split, f"{int(context):,}", needed, limit, *cells])
    return markdown_table(heading, rows)


def _cells(found: Mapping[str, Any], at_2048: Mapping[str, float] | None) -> list[str]:
    """Return the cells of a context that fits."""
    step, layers = found["step"], found["num_layers"]
    bundles = {
        kernel: sum(op["bundles"] for op in found["kernels"] if op["name"].startswith(kernel)) * layers
        for kernel in KERNELS
    }
    return [
        f"{step['seconds'] * 1e3:.2f}",
        f"{step['seconds'] / at_2048['seconds']:.2f}" if at_2048 else "",
        f"{step['hbm_bytes'] / 1e9:.1f}",
        f"{found['share_of_roofline']:.0%}",
        f"{bundles['token_index']:,.0f}",
        f"{bundles['chosen_attention'] + bundles['paged_attention']:,.0f}",
    ]


def main() -> None:
    """Estimate the cases and print their table."""
    purpose = __doc__.splitlines()[0]
    run_cases("benchmarks.sparse_contexts", purpose, cases=CASES, compile_here=compile_here, table=sparse_contexts)


if __name__ == "__main__":
    main()
