"""Low-latency dispatch, interpreted on eight emulated devices, next to the product in blocks on one.

    python -m tests.support.kernels.low_latency_dispatch CASE ...

prints what came out of each case, as JSON. It is a process of its own: an interpreted kernel on several devices blocks
threads of XLA's pool, which is as large as NPROC says before jax starts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from rayserve_moe.checkpoints.synthetic import Drawn, write_checkpoint
from rayserve_moe.kernels.candidates import Candidate
from rayserve_moe.kernels.narrow_weights import NARROW
from rayserve_moe.kernels.operations import Kernels, PoolKernels
from rayserve_moe.kernels.reference.expert_products import (
    ExpertWeights,
    LayerExperts,
    ProductConfig,
    multiply_in_blocks,
    sum_results,
)
from rayserve_moe.kernels.table import CPU, KERNELS, PAGED, TPU, grouped_attention
from rayserve_moe.kernels.tpu import dispatch_weights, low_latency_dispatch, paged_attention
from rayserve_moe.kernels.tpu.dispatch_sizes import TILE_ROWS, DispatchSizes, unsupported_reason
from tests.support.engine.host_runners import TWO_SHAPES, WAY, card_of, prepared_runner
from tests.support.engine.run_requests import preempt_every, run_alone, run_together
from tests.support.engine.workload import draw_prompt, request_for
from tests.support.experts.moe_layer import MoeCase, MoeRun, dense, placements_for, plan_of
from tests.support.experts.quantized_experts import random_experts
from tests.support.kernels.interpreter import FAULTS_FOUND, INTERPRETED, Outcome, print_outcomes, run_cases
from tests.support.kernels.interpreter import interpreted as interpreted_operation
from tests.support.models.core import CORE_CONFIG
from tests.support.session.xla_flags import process_flags

SIZES = DispatchSizes(6, 3, 256, 128, 2, (("data", 4), ("tensor", 2)))
IN_BLOCKS, ON_TWO_CORES, BY_DEVICE, FEW_TOKENS = "in blocks: ", "on two cores: ", "by device: ", "few tokens: "
NARROW_ROWS = "rows in 8 bits: "
"""Prefixes of cases: experts are read in two blocks, and rows of a slot in groups of one tile; a device has two cores
and three slots; results are added up device by device; slots often have no rows; rows are rounded to e4m3.
"""
WIDTHS: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2}
DRAWN = Drawn(scale=0.05, norm_jitter=0.2)
"""Of models whose experts the kernel takes."""
OWN: dict[str, Callable[..., Any]] = {
    "attend": paged_attention.attend,
    "attend_new": paged_attention.attend_new,
}
LONGEST_S, LONGEST_WHOLE_S = 300.0, 1800.0
"""Of a case, most of which take less than a tenth, and of a layer or an engine."""


def run_dispatch(*names: str) -> dict[str, Outcome]:
    """Run cases in a process of its own, which ranks that do not meet may end or hang."""
    timeout_s = sum(LONGEST_WHOLE_S if name in WHOLE else LONGEST_S for name in names)
    flags = process_flags(is_quick=False)
    return run_cases("tests.support.kernels.low_latency_dispatch", *names, timeout_s=timeout_s, XLA_FLAGS=flags)


def sizes_of(name: str) -> DispatchSizes:
    """Return the sizes of a case, by what is before its load and after it."""
    dtype, _, in_blocks = name.partition(", ")[2].partition(" ")
    sizes = replace(SIZES, weight_dtype=dtype or "bfloat16", in_blocks=bool(in_blocks))
    if ON_TWO_CORES in name:
        sizes = replace(sizes, num_slots=3, num_cores=2)
    sizes = replace(sizes, adds_by_device=BY_DEVICE in name, num_tokens=2 if FEW_TOKENS in name else 6)
    sizes = replace(sizes, narrows_rows=NARROW_ROWS in name)
    return replace(sizes, inner=256, given_block=128) if IN_BLOCKS in name else sizes


def weights_of(sizes: DispatchSizes) -> ExpertWeights:
    """Random experts of two layers of all ranks: [ranks * 2 * slots, ...], rank after rank."""
    num_slots = 2 * sizes.num_ranks * sizes.num_slots
    if sizes.weight_dtype in NARROW:
        form = {"dtype": sizes.weight_dtype, "has_blocks": sizes.in_blocks}
        return random_experts(num_slots, sizes.width, sizes.inner, seed=6, **form)[0]
    up, down = (num_slots, sizes.width, sizes.inner), (num_slots, sizes.inner, sizes.width)
    generator = np.random.default_rng(6)
    return ExpertWeights(*(jnp.asarray(generator.standard_normal(s) / 8, sizes.weight_dtype) for s in (up, up, down)))


def slots_of(load: str, sizes: DispatchSizes) -> np.ndarray:
    """Slots of all tokens of all ranks, by what is odd about them."""
    generator, nowhere = np.random.default_rng(4), sizes.num_ranks * sizes.num_slots
    slots = generator.integers(0, nowhere, (sizes.num_ranks * sizes.num_tokens, sizes.top_k))
    match load:
        case "mostly one slot":
            return np.where(generator.random(slots.shape) < 0.8, 3, slots)
        case "all to one slot":
            return np.full_like(slots, 5)
        case "ranks without tokens or without rows":
            slots[: 2 * sizes.num_tokens] = nowhere
            return np.where(slots // sizes.num_slots == 6, nowhere, slots)
        case "nothing at all":
            return np.full_like(slots, nowhere)
    return slots


def outcome_of(slots: np.ndarray, sizes: DispatchSizes) -> Outcome:
    """Push the rows of all tokens to `slots`, with weights of a second layer."""
    weights, interpreter = weights_of(sizes), replace(INTERPRETED, num_cores_or_threads=sizes.num_cores)
    generator = np.random.default_rng(len(slots))
    hidden_TD = jnp.asarray(generator.standard_normal((len(slots), sizes.width)), jnp.bfloat16)
    gates_TK = jnp.asarray(generator.random(slots.shape), jnp.float32)
    slots_TK = jnp.asarray(slots, jnp.int32)

    def on_device(hidden_TD, slots_TK, gates_TK, weights):
        of_layer = LayerExperts(weights, sizes.num_slots, ProductConfig(sizes.num_slots, 8.0))
        push = partial(low_latency_dispatch.dispatch_experts, sizes=sizes, interpret=interpreter)
        return push(hidden_TD, slots_TK, gates_TK, of_layer)

    split, (data, tensor) = PartitionSpec(("data", "tensor")), (size for _, size in sizes.axes)
    mesh = plan_of(data, tensor).mesh
    run = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
    found = np.asarray(run(hidden_TD, slots_TK, gates_TK, weights), np.float32)
    layers = (sizes.num_ranks, 2, sizes.num_slots)
    of_layer = jax.tree.map(lambda w: w.reshape(*layers, *w.shape[1:])[:, 1].reshape(-1, *w.shape[1:]), weights)
    product = ProductConfig(sizes.num_ranks * sizes.num_slots, 8.0, narrows_rows=sizes.narrows_rows)
    experts = LayerExperts(of_layer, 0, product)
    expected = sum_results(hidden_TD, slots_TK, gates_TK, experts, multiply=multiply_in_blocks).astype(jnp.bfloat16)
    if sizes.adds_by_device:
        results_TKD = np.asarray(multiply_in_blocks(hidden_TD, slots_TK, experts), np.float32)
        expected = sum_by_device(results_TKD, slots, np.asarray(gates_TK), sizes)
    difference = np.abs(found - np.asarray(expected, np.float32)).max()
    return FAULTS_FOUND.outcome(difference, np.abs(np.asarray(expected, np.float32)).max())


def sum_by_device(
    results_TKD: np.ndarray, slots_TK: np.ndarray, gates_TK: np.ndarray, sizes: DispatchSizes
) -> np.ndarray:
    """Sums in the order of slots, in float32, rounded for each device, and at the end."""
    total_TD = np.zeros(results_TKD[:, 0].shape, np.float32)
    for token, (slots, gates) in enumerate(zip(slots_TK, gates_TK, strict=True)):
        for device in range(sizes.num_ranks):
            own = np.zeros_like(total_TD[0])
            for k in np.argsort(slots, kind="stable"):
                if slots[k] // sizes.num_slots == device:
                    own = own + gates[k] * results_TKD[token, k]
            total_TD[token] += own.astype(jnp.bfloat16).astype(np.float32)
    return total_TD.astype(jnp.bfloat16)


def interpreted(name: str, *, traced: list[str]) -> Kernels:
    """The kernels of CPUs with low-latency dispatch; `traced` gets the dtype of weights that it is called with."""

    def push(*arguments: Any, sizes: DispatchSizes) -> jax.Array:
        traced.append(sizes.weight_dtype)
        return low_latency_dispatch.dispatch_experts(*arguments, sizes=sizes, interpret=INTERPRETED)

    low_latency = Candidate("low_latency_dispatch", push, partial(unsupported_reason, interpret=True))
    experts = replace(CPU.experts, low_latency=low_latency)
    return replace(CPU, name=name, experts=experts)


def layer_outcome() -> Outcome:
    """A MoE layer with redundant slots and placements of its own, padding, and tokens of tensor groups in parts."""
    traced: list[str] = []
    KERNELS["interpreted"] = interpreted("interpreted", traced=traced)
    case, plan = MoeCase(num_tokens=7, width=256, inner=128, dtype="bfloat16"), plan_of(4, 2)
    run = MoeRun(case, plan, backend="low_latency_dispatch", num_redundant=16, kernels="interpreted")
    expected, worst = dense(case, 4), 0.0
    for placement in placements_for(case, plan, 16)[1:]:
        found = run(placement)
        assert (found.ids == expected.ids).all() and (found.counts == expected.counts).all()
        worst = max(worst, float(np.abs(found.out.astype(np.float64) - expected.out).max()))
    assert set(traced) == {"bfloat16"}
    return FAULTS_FOUND.outcome(worst, np.abs(expected.out).max())


def engine_outcome(expert_dtype: str = "bfloat16") -> Outcome:
    """Sequences of two data ranks of two devices each, next to the same by an exchange: ids, routing, log-probs."""
    traced: list[str] = []
    KERNELS["cpu"] = interpreted("cpu", traced=traced)
    config = replace(CORE_CONFIG, **WIDTHS, drawn=DRAWN)
    generator = np.random.default_rng(5)
    requests = [request_for(draw_prompt(generator, n), f"r{n}", max_new_tokens=3) for n in (1, 9, 20)]
    settings = {**TWO_SHAPES, "dtype": "bfloat16", "cpu_kernels": "off", "num_redundant_experts": 4}
    settings["expert_dtype"] = expert_dtype
    settings["compile_cache"] = "off"  # programs with callbacks of the interpreter cannot be kept
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder) / "model", config, seed=0, dtype="bfloat16")
        for backend in ("all_to_all", "low_latency_dispatch"):
            values = {**settings, "expert_backend": backend, "enable_return_routed_experts": True}
            runner = prepared_runner(path, mesh=(2, 2), **values)
            found[backend] = run_together(runner, card_of(path), requests, way=WAY)
    assert set(traced) == {expert_dtype}
    pairs = [(outcome, found["low_latency_dispatch"][key]) for key, outcome in found["all_to_all"].items()]
    assert all(one.ids == other.ids and np.array_equal(one.rows, other.rows) for one, other in pairs)
    differences = [np.abs(np.subtract(one.logprobs, other.logprobs)).max() for one, other in pairs]
    return FAULTS_FOUND.outcome(max(differences), 1.0)


def all_interpreted(traced: list[str]) -> Kernels:
    """Return a table with our TPU kernels of a step in place of the CPU kernels."""
    paged_attention.cores_of_device = lambda _=None: 1
    own = {name: partial(kernel, interpret=INTERPRETED) for name, kernel in OWN.items()}
    by_our_own = {"decode": own["attend"], "prefill": own["attend"], "write_and_decode": own["attend_new"]}
    attention = replace(
        grouped_attention(**by_our_own, project=interpreted_operation(PAGED.project)),
        describe_singles=paged_attention.describe_singles,
        norm_and_project=interpreted_operation(PAGED.norm_and_project),
        has_packed_rows=True,
    )
    cpu = interpreted("cpu", traced=traced)
    experts = replace(cpu.experts, choose=interpreted_operation(TPU.experts.choose))
    add_norm = interpreted_operation(TPU.add_norm)
    return replace(cpu, attention=attention, add_norm=add_norm, experts=experts, pool=PoolKernels())


def laws_outcome(mesh: tuple[int, int]) -> Outcome:
    """Sequences by all kernels of our own, together, one by one, and in other chunks with preemption: equal to the bit.
    The difference is that of log-probs from float32; the largest, how far those by the kernels of CPUs are from it.
    AssertionError for other ids, or other rows than by the kernels of CPUs."""
    config = replace(CORE_CONFIG, **WIDTHS, head_dim=128, num_experts=128, drawn=DRAWN)
    generator = np.random.default_rng(8)
    requests = [request_for(draw_prompt(generator, n), f"r{n}", max_new_tokens=3) for n in (2, 9, 20, 37)]
    settings = {**TWO_SHAPES, "dtype": "bfloat16", "cpu_kernels": "off", "compile_cache": "off"}
    settings |= {"num_redundant_experts": 8, "enable_return_routed_experts": True}
    found, traced = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder) / "model", config, seed=0, dtype="bfloat16")
        card = card_of(path)
        for dtype, backend in (
            ("float32", "all_to_all"),
            ("bfloat16", "all_to_all"),
            ("bfloat16", "low_latency_dispatch"),
        ):
            if backend == "low_latency_dispatch":
                KERNELS["cpu"] = all_interpreted(traced)
            values = {**settings, "dtype": dtype, "expert_backend": backend}
            runner = prepared_runner(path, mesh=mesh, **values)
            found.append(run_together(runner, card, requests, way=WAY))
        found.append(run_alone(runner, card, requests[:2], way=WAY))
        other = replace(WAY, chunk_tokens=7, intervene=preempt_every(3), caches_prefixes=False)
        found.append(run_together(runner, card, requests[1:3], way=other))
    assert set(traced) == {"bfloat16"} and runner.config.kernels.attention.has_packed_rows
    wide, by_cpus, own, *again = found
    assert all(wide[key].ids == by_cpus[key].ids == one.ids for key, one in own.items())
    assert all(np.array_equal(one.rows, by_cpus[key].rows) for key, one in own.items())
    pairs = [(own[key], other) for others in again for key, other in others.items()]
    assert all(one.ids == other.ids and np.array_equal(one.rows, other.rows) for one, other in pairs)
    assert all(np.array_equal(one.logprobs, other.logprobs) for one, other in pairs)
    from_wide, of_cpus = (
        max(np.abs(np.subtract(one.logprobs, wide[key].logprobs)).max() for key, one in outcomes.items())
        for outcomes in (own, by_cpus)
    )
    return FAULTS_FOUND.outcome(from_wide, of_cpus)


def devices_of_other_slots() -> None:
    ordered = low_latency_dispatch.in_slot_order
    low_latency_dispatch.in_slot_order = lambda slots, places, num_local: ordered(
        slots, places, num_local=num_local + 1
    )


def two_senders_to_the_same_rows() -> None:
    table_rows = low_latency_dispatch.table_rows

    def wrong(rank_counts, **sizes):
        rows, num_ranks = table_rows(rank_counts, **sizes), len(rank_counts)
        return [*rows[:num_ranks], *[rows[num_ranks]] * num_ranks, *rows[2 * num_ranks :]]

    low_latency_dispatch.table_rows = wrong


def no_wait_for_arrivals() -> None:
    multiply_slot, wait_for = low_latency_dispatch.multiply_slot, low_latency_dispatch.wait_for

    def wrong(*arguments) -> Any:
        low_latency_dispatch.wait_for = lambda *_: None
        turn = multiply_slot(*arguments)
        low_latency_dispatch.wait_for = wait_for
        return turn

    low_latency_dispatch.multiply_slot = wrong


def no_wait_for_rows_from_hbm() -> None:
    low_latency_dispatch._copy = lambda rows, to, refs: pltpu.make_async_copy(
        rows, to, refs.semaphores.moved.at[2]
    ).start()


def both_cores_as_the_first() -> None:
    slots_of_core = low_latency_dispatch.slots_of_core
    low_latency_dispatch.slots_of_core = lambda slots, _, sizes: slots_of_core(slots, jnp.int32(0), sizes)


def no_barrier() -> None:
    semaphore_wait = low_latency_dispatch.meet.__globals__["pl"].semaphore_wait
    low_latency_dispatch.meet.__globals__["pl"].semaphore_wait = lambda semaphore, _: semaphore_wait(semaphore, 0)


def no_wait_for_weights() -> None:
    next_weights, weight_copies = low_latency_dispatch.next_weights, dispatch_weights.weight_copies

    def wrong(*arguments, turn) -> jax.Array:
        # The next block is begun before the block itself is waited for.
        calls: list[Any] = []
        dispatch_weights.weight_copies = lambda *place, half: (
            [] if calls else calls.append(place) or weight_copies(*place, half=half)
        )
        half = next_weights(*arguments, turn=turn)
        dispatch_weights.weight_copies = weight_copies
        return half

    low_latency_dispatch.next_weights = wrong


def copy_as_soon_as_begun() -> None:
    """Let the interpreter make copies when they begin; by default it skips copies that nothing waits for."""
    dispatch = low_latency_dispatch.dispatch_experts
    low_latency_dispatch.dispatch_experts = lambda *arguments, interpret, **sizes: dispatch(
        *arguments, interpret=replace(interpret, dma_execution_mode="eager"), **sizes
    )


def early_weights_never_waited_for() -> None:
    """Skip the wait for early weights: if the first slot has no rows, other weights overwrite them in flight."""
    read_first, first_copies = low_latency_dispatch.read_first_weights, dispatch_weights._first_copies
    copy_as_soon_as_begun()

    def wrong(*arguments) -> None:
        dispatch_weights._first_copies = lambda *place: [Unawaited(copy) for copy in first_copies(*place)]
        read_first(*arguments)
        dispatch_weights._first_copies = first_copies

    low_latency_dispatch.read_first_weights = wrong


@dataclass(frozen=True)
class Unawaited:
    """Copy that starts, but is never waited for."""

    copy: Any

    def start(self) -> None:
        self.copy.start()

    def wait(self) -> None:
        """Return at once."""


def early_weights_read_again() -> None:
    """Begin the copies of the first slot's weights once more when its rows are known."""
    read_first = low_latency_dispatch.read_first_weights
    copy_as_soon_as_begun()
    low_latency_dispatch.read_first_weights = lambda *arguments: read_first(*arguments[:-1], 0)


def scales_of_the_next_slot() -> None:
    weight_copies = dispatch_weights.weight_copies

    def wrong(refs, sizes, slot, block, **how) -> list[Any]:
        own, next_ones = (weight_copies(refs, sizes, one, block, **how) for one in (slot, slot ^ 1))
        return own[:3] + next_ones[3:]

    dispatch_weights.weight_copies = wrong


def scales_of_other_rows() -> None:
    operand_of = low_latency_dispatch.operand_of

    def wrong(rows, **how) -> Any:
        narrow, scales = operand_of(rows, **how)
        return narrow, jnp.roll(scales, 1)

    low_latency_dispatch.operand_of = wrong


def weights_over_those_that_are_multiplied() -> None:
    weight_copies = dispatch_weights.weight_copies
    dispatch_weights.weight_copies = lambda *arguments, half, **how: weight_copies(*arguments, half=half * 0, **how)


WHOLE: dict[str, Callable[[], Outcome]] = {
    "a layer with placements": layer_outcome,
    "an engine": engine_outcome,
    "an engine, int8": partial(engine_outcome, "int8"),
    "laws on four devices": partial(laws_outcome, (2, 2)),
    "laws on eight devices": partial(laws_outcome, (4, 2)),
}
FAULTS: dict[str, Callable[[], None]] = {
    "two senders to the same rows": two_senders_to_the_same_rows,
    "no wait for arrivals": no_wait_for_arrivals,
    "no barrier": no_barrier,
    "weights over those that are multiplied": weights_over_those_that_are_multiplied,
    "no wait for weights, int8": no_wait_for_weights,
    "scales of the next slot, int8": scales_of_the_next_slot,
    "early weights never waited for: all to one slot": early_weights_never_waited_for,
    "early weights read again: any": early_weights_read_again,
    IN_BLOCKS + "no wait for rows from HBM": no_wait_for_rows_from_hbm,
    ON_TWO_CORES + "both as the first": both_cores_as_the_first,
    BY_DEVICE + "devices of other slots": devices_of_other_slots,
    NARROW_ROWS + "scales of other rows, float8_e4m3fn": scales_of_other_rows,
}


def case_of(name: str) -> Callable[[], Outcome]:
    """Return what runs a case, with its fault planted if it is one."""
    if name in WHOLE:
        return WHOLE[name]
    if name in FAULTS:
        FAULTS[name]()
    sizes = sizes_of(name)
    if IN_BLOCKS in name:
        low_latency_dispatch.GROUP_ROWS = TILE_ROWS
    return partial(outcome_of, slots_of(name.partition(", ")[0].split(": ")[-1], sizes), sizes)


if __name__ == "__main__":
    print_outcomes(case_of)
