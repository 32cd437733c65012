"""Bytes of tokens that cross devices in one MoE layer, counted while it runs on emulated devices, by expert backend.

    python -m benchmarks.exchange_bytes [--tokens 64,512] [--devices 8] [--slices 1] [--out FILE.json]

Every token chooses its experts evenly at random. Counted is what leaves a device for another one: rows that hold a
token or a result, and what is said about them. The reference is top-k rows of bfloat16 out and back per token, as if
every expert lay elsewhere. The capacity of the operations is given beside it as the shapes of their operands.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.table import tables
from rayserve_moe.experts import all_to_all
from rayserve_moe.experts.backends import choose_backend
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.router_spec import RouterSpec
from rayserve_moe.experts.slot_mapping import PlacedExperts
from rayserve_moe.experts.tokens import RoutedTokens
from rayserve_moe.kernels.reference.expert_products import ExpertWeights
from rayserve_moe.kernels.table import CPU
from rayserve_moe.parallel.mesh import local_devices, plan_for, use_cpu_devices
from rayserve_moe.parallel.sharding import ParallelPlan

NUM_EXPERTS, TOP_K, WIDTH, INNER = 128, 8, 2048, 16
"""Experts, choices and width of Qwen3-30B-A3B; the expert width has no part in what is sent."""


class Tap:
    """Counts bytes that leave a device as the program runs, by kind, summed over all devices."""

    def __init__(self, num_devices: int) -> None:
        self.sent: Counter[str] = Counter()
        self.operands: dict[str, dict[str, None]] = {}
        self._num_devices = num_devices

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Have whatever is traced meanwhile count what its exchanges and collectives send."""
        originals = (all_to_all.ragged_all_to_all, jax.lax.all_gather, jax.lax.psum_scatter)
        all_to_all.ragged_all_to_all = partial(self._exchange, originals[0])
        jax.lax.all_gather = partial(self._collective, originals[1], "gathered")
        jax.lax.psum_scatter = partial(self._collective, originals[2], "summed")
        try:
            yield
        finally:
            all_to_all.ragged_all_to_all, jax.lax.all_gather, jax.lax.psum_scatter = originals

    def _exchange(self, original: Any, operand: jax.Array, output: jax.Array, slices: Any, **options: Any) -> jax.Array:
        me = jax.lax.axis_index(options["axis_name"])
        num_rows = jnp.sum(slices.send_sizes_R) - slices.send_sizes_R[me]
        row_bytes = math.prod(operand.shape[1:]) * operand.dtype.itemsize
        jax.debug.callback(lambda rows: self._note("rows", int(rows) * row_bytes), num_rows)
        self._describe("exchanged", f"{operand.dtype.name}{list(operand.shape)} to {list(output.shape)}")
        return original(operand, output, slices, **options)

    def _collective(self, original: Any, kind: str, operand: jax.Array, *args: Any, **options: Any) -> jax.Array:
        """Count the bytes of a collective: each device sends its operand, or its parts of a sum, to all others."""
        share = self._num_devices - 1 if kind == "gathered" else (self._num_devices - 1) / self._num_devices
        num_bytes = int(operand.size * operand.dtype.itemsize * share)
        jax.debug.callback(lambda _: self._note(kind, num_bytes), jnp.zeros((), jnp.int32))
        self._describe(kind, f"{operand.dtype.name}{list(operand.shape)}")
        return original(operand, *args, **options)

    def _describe(self, kind: str, shape: str) -> None:
        self.operands.setdefault(kind, {})[shape] = None

    def _note(self, kind: str, num_bytes: int) -> None:
        self.sent[kind] += num_bytes


def count(backend: str, tokens_per_device: int, *, plan: ParallelPlan) -> dict[str, Any]:
    """Run one layer once; returns bytes per token by kind, their ratio to the reference, and operand shapes."""
    config = ExpertConfig(RouterSpec(NUM_EXPERTS, TOP_K, True), CPU, plan, backend=backend)
    tap, num_tokens = Tap(plan.mesh.size), tokens_per_device * plan.mesh.size

    def on_device(tokens: RoutedTokens, weights: ExpertWeights) -> jax.Array:
        experts = PlacedExperts(weights, jnp.zeros((), jnp.int32), None)
        chosen = choose_backend(tokens, experts, config=config).candidate
        assert chosen is not None, "a named backend is chosen"
        return chosen.run(tokens, experts, config=config)

    over_data, over_all = PartitionSpec("data"), PartitionSpec(("data", "tensor"))
    run = jax.jit(
        jax.shard_map(on_device, mesh=plan.mesh, in_specs=(over_data, over_all), out_specs=over_data, check_vma=False)
    )
    arguments = (_uniform_tokens(num_tokens), _weights())
    with tap.installed():
        traced = run.trace(*arguments)
    jax.block_until_ready(traced.lower().compile()(*arguments))
    jax.effects_barrier()
    reference = num_tokens * 2 * TOP_K * WIDTH * jnp.dtype(jnp.bfloat16).itemsize
    return {
        "bytes_per_token": {kind: num_bytes / num_tokens for kind, num_bytes in sorted(tap.sent.items())},
        "of_reference": sum(tap.sent.values()) / reference,
        "operands": {kind: list(shapes) for kind, shapes in tap.operands.items()},
    }


def _uniform_tokens(num_tokens: int) -> RoutedTokens:
    random = np.random.default_rng(0)
    ids = np.argsort(random.random((num_tokens, NUM_EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    gates = np.full((num_tokens, TOP_K), 1 / TOP_K, np.float32)
    hidden = random.standard_normal((num_tokens, WIDTH)).astype(jnp.bfloat16)
    return RoutedTokens(*map(jnp.asarray, (hidden, ids, gates, np.ones(num_tokens, np.bool_))))


def _weights() -> ExpertWeights:
    up, down = (NUM_EXPERTS, WIDTH, INNER), (NUM_EXPERTS, INNER, WIDTH)
    return ExpertWeights(*(jnp.zeros(shape, jnp.bfloat16) for shape in (up, up, down)))


def main() -> None:
    """Count, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="64,512", help="tokens per device, comma-separated")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--slices", type=int, default=1, help="slices that the devices stand for")
    parser.add_argument("--out", type=Path, default=RESULTS / "exchange-bytes.json")
    arguments = parser.parse_args()
    use_cpu_devices(arguments.devices)
    load_before = load_before_start()
    plan = replace(plan_for(local_devices(arguments.devices), data_size=arguments.devices), num_slices=arguments.slices)
    counted: dict[str, Any] = {}
    for tokens in map(int, arguments.tokens.split(",")):
        for backend in ("replicated", "all_to_all", "fused"):
            counted.setdefault(str(tokens), {})[backend] = count(backend, tokens, plan=plan)
            note(f"{tokens} tokens per device, {backend}: {counted[str(tokens)][backend]['of_reference']:.3f}")
    result = {"facts": machine_facts(load_before), "devices": arguments.devices, "exchange_bytes": counted}
    save(result, arguments.out)
    print(tables(result))


if __name__ == "__main__":
    main()
