"""Prefill steps of models with sparse attention by context, estimated from libtpu's schedules, not measured.

    python -m benchmarks.sparse_prompts [--only NAME] [--out FILE.json]

Each case is a server with a `max_model_len` of 128k. A separate process compiles its step of 1,024 prompt tokens per
data rank once, and prices it at several positions in a prompt. The table also estimates the step without these kernels:
XLA masks attention, and every device of the tensor axis computes the whole index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.compiled_cases import run_cases
from benchmarks.markdown import markdown_table
from rayserve_moe.config.load import set_environment_defaults
from rayserve_moe.execution.programs.compiled import lowered, optimized
from rayserve_moe.execution.programs.specs import programs_of
from rayserve_moe.kernels.reference import attention
from rayserve_moe.kernels.reference.attention import KEYS_PER_SPAN, BlockPlaces, ScoreConfig
from rayserve_moe.kernels.tpu.chosen_attention import attend_chosen, masked_tokens
from rayserve_moe.kernels.tpu.packed_rows import latent_lanes
from rayserve_moe.scheduling.step_plan import PREFILL_BLOCK_TOKENS as BLOCK
from rayserve_moe.tools.compile_check import COMPILER_ENVIRONMENT, estimator_of, use_host_alone
from rayserve_moe.tools.estimate.chips import chip_of
from rayserve_moe.tools.estimate.dump import DumpFolder, Schedules, dump_environment
from rayserve_moe.tools.estimate.links import Slice
from rayserve_moe.tools.estimate.program_ops import Block, Branches, Loop, ProgramReader
from rayserve_moe.tools.estimate.rates import calibrated
from rayserve_moe.tools.estimate.step_time import Pricing
from rayserve_moe.tools.estimate.step_work import SparseWork, StepWork
from rayserve_moe.tools.hlo_text import read_program
from rayserve_moe.tools.served_cases import case_of_model, lay_out

LONGEST, TOKENS, PAGE = 1 << 17, 1024, 128
STARTS = (0, 7 << 10, 31 << 10, 63 << 10, 127 << 10)
"""Prompt tokens computed by earlier steps."""
INDEX, ATTENTION = "token_index", "paged_attention"
LATENT, ROW, TOP_K, POOL_PAGES = 512, 576, 2048, 4096
"""Sizes of latents and of a choice, which are the same in these models; pages of a pool to compile with."""


@dataclass(frozen=True)
class PromptCase:
    """A model on all devices of a topology, by data ranks of `tensor` devices."""

    model: str
    topology: str
    tensor: int
    expert_dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"{self.model}@{self.topology}"


CASES = {
    case.name: case
    for case in (
        PromptCase("deepseek-v3.2", "v5p:2x4x4", 4),
        PromptCase("glm-5.2", "v5p:2x4x4", 4),
    )
}


def compile_here(case: PromptCase, folder: Path) -> dict[str, Any]:
    """Compile the prefill step of a case and price it behind each part of a prompt; schedules go to `folder`."""
    set_environment_defaults(COMPILER_ENVIRONMENT | dump_environment(folder))
    use_host_alone()
    values = {"max_model_len": LONGEST, "max_running_requests": 2, "expert_dtype": case.expert_dtype}
    values |= {"max_step_tokens": TOKENS, "page_size": PAGE}
    laid = case_of_model(case.model, case.topology, tp=case.tensor, values=values)
    served, estimator = lay_out(laid), estimator_of(laid, dump=folder)
    programs = programs_of(served, num_pages=laid.settings.cache.num_pages)
    (program,) = (each for each in programs if each.name == f"prefill_{TOKENS}")
    assert program.shape is not None, "a step has a shape"
    plan, dump, found = served.config.plan, DumpFolder(folder), {}
    compiled = optimized(lowered(program, plan), plan, kernels=served.config.kernels)
    text, memory = read_program(compiled.as_text()), compiled.memory_analysis()
    schedules, sizes = Schedules(text, dump.take()), replace(estimator.sizes, sequences=0, context=LONGEST)
    (heads,) = {own.num_heads // case.tensor for own in served.config.spec.mixers}
    alone = Alone(Mesh(plan.mesh.devices.flat[:1], ("one",)), case.topology, heads, dump)
    masked_by_xla, copied_s, until = alone.masked_by_xla(), alone.copied_s(), alone.masked_until()
    for start in STARTS:
        behind = replace(sizes, singles=program.shape.num_singles, prompt_start=start)
        estimate = replace(estimator, sizes=behind).of_schedules(text, schedules, prompt_tokens=TOKENS)
        index_us, masked_us = (
            sum(op.us for op in estimate.ops_in_layer if op.name.startswith(kernel)) for kernel in (INDEX, ATTENTION)
        )
        own_us = masked_us if start + TOKENS <= until else copied_s * 1e6
        sees_all = start + TOKENS <= TOP_K
        found[str(start + TOKENS)] = {
            "step_ms": estimate.step.seconds * 1e3 + (own_us - masked_us) * estimate.num_layers / 1e3,
            "num_open_ops": estimate.num_open_ops,
            "index_us": index_us,
            "masked_us": masked_us,
            "attention_us": own_us,
            "xla_attention_us": masked_us if sees_all else masked_by_xla(start + TOKENS) * 1e6,
        }
    used = {of: getattr(memory, f"{of}_size_in_bytes") for of in ("argument", "temp")}
    num_layers = served.config.spec.num_layers
    return {
        "case": asdict(case),
        "num_layers": num_layers,
        "heads": heads,
        "memory": used,
        "contexts": found,
    }


@dataclass(frozen=True)
class Alone:
    """Programs of a single device with the attention of a layer of a step, compiled and priced by themselves."""

    mesh: Mesh
    topology: str
    heads: int
    """Heads of a device."""
    dump: DumpFolder

    def masked_by_xla(self) -> Callable[[int], float]:
        """Return a function from a context to the seconds of attention of a step that XLA masks."""
        tree = self._tree(
            attention.attend, blocks=TOKENS // BLOCK, queries=BLOCK, axes=(slice(None), slice(None), None)
        )
        return lambda context: sum(self._pricing.costs(_with_spans(tree, math.ceil(context / KEYS_PER_SPAN))))

    def copied_s(self) -> float:
        """Return the seconds of attention of a step that copies the chosen rows, a block of prompts after another."""
        tree = self._tree(attend_chosen, blocks=BLOCK, queries=1)
        return TOKENS // BLOCK * sum(self._pricing.costs(tree))

    def masked_until(self) -> int:
        """Return the context up to which the kernel masks."""
        with jax.set_mesh(self.mesh):
            return masked_tokens(self.heads, latent_lanes(ROW), LATENT, top_k=TOP_K)

    @property
    def _pricing(self) -> Pricing:
        chip = chip_of(self.topology)
        return Pricing(chip, calibrated(chip))

    def _tree(self, attend: Callable[..., jax.Array], *, blocks: int, queries: int, axes: Any = slice(None)) -> Block:
        """Return the tree of a program that attends blocks of queries of a prompt; `axes` index the pool."""
        shape = jax.ShapeDtypeStruct
        lanes = ROW if attend is attend_chosen else latent_lanes(ROW)
        table, positions, chosen = (
            shape((blocks, *sizes), jnp.int32) for sizes in ((LONGEST // PAGE,), (queries,), (queries, TOP_K))
        )

        def run(queries: jax.Array, pool: jax.Array, places: BlockPlaces) -> jax.Array:
            return attend(queries, pool[axes], places, config=ScoreConfig(scale=0.1), latent_width=LATENT)

        arrays = (
            shape((blocks, queries, self.heads, lanes), jnp.float32),
            shape((POOL_PAGES, PAGE, latent_lanes(ROW)), jnp.bfloat16),
            BlockPlaces(table, positions, chosen_BQK=chosen),
        )
        here = NamedSharding(self.mesh, PartitionSpec())
        given = jax.tree.map(lambda each: shape(each.shape, each.dtype, sharding=here), arrays)
        with jax.set_mesh(self.mesh):
            text = read_program(jax.jit(run).lower(*given).compile().as_text())
        (device,) = self.mesh.devices.flat
        place = Slice(chip_of(self.topology), (tuple(device.coords),))
        work = StepWork(0, 0, {}, 0, 0, sparse=SparseWork(blocks, LONGEST, TOP_K))
        return ProgramReader(text, Schedules(text, self.dump.take()), place, work).tree()


def _with_spans(block: Block, spans: int) -> Block:
    """Return a program's tree with `spans` trips for loops without a static trip count."""
    items: list[Any] = []
    for item in block.items:
        match item:
            case Loop():
                trips = item.trips if item.trips > 1 else spans
                items.append(Loop(_with_spans(item.body, spans), trips, is_layers=False))
            case Branches():
                items.append(Branches([_with_spans(option, spans) for option in item.options]))
            case _:
                items.append(item)
    return Block(items)


def sparse_prompts(cases: Mapping[str, Any]) -> str:
    """Return a row per case and context."""
    heading = ["model and slice", "context", "step calibrated, ms", "index, ms", "attention, ms"]
    heading += ["index on every device, ms", "attention by XLA, ms", "step with both, ms"]
    rows = []
    for name, found in cases.items():
        layers, tensor = found["num_layers"], found["case"]["tensor"]
        for context, each in found["contexts"].items():
            step, index, own = each["step_ms"], each["index_us"], each["attention_us"]
            times = [one * layers / 1e3 for one in (index, own, index * tensor, each["xla_attention_us"])]
            before = step - times[0] - times[1] + times[2] + times[3]
            rows.append([name, f"{int(context):,}", *(f"{one:,.1f}" for one in (step, *times, before))])
    return markdown_table(heading, rows)


def main() -> None:
    """Estimate the cases and print their table."""
    purpose = __doc__.splitlines()[0]
    run_cases("benchmarks.sparse_prompts", purpose, cases=CASES, compile_here=compile_here, table=sparse_prompts)


if __name__ == "__main__":
    main()
