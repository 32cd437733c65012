"""A MoE layer on a mesh of emulated devices, its dense definition in float64, and placements to run it with.

Run as a program it is one of several processes over gloo: every backend gives what the definition says.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rayserve_moe.balancing.placement import ExpertPlacement, identity_placement, placement_from
from rayserve_moe.experts.balanced_layer import step_capacity
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.layer import apply_experts
from rayserve_moe.experts.router_spec import RouterSpec
from rayserve_moe.experts.routing import RouterWeights, count_tokens
from rayserve_moe.experts.slot_mapping import placement_arrays
from rayserve_moe.kernels.adapters import AdapterPair, ExpertAdapters, RowAdapters
from rayserve_moe.kernels.reference.activations import SILU, Activation
from rayserve_moe.kernels.reference.expert_products import ExpertWeights
from rayserve_moe.kernels.table import KERNELS
from rayserve_moe.parallel.mesh import use_cpu_devices
from rayserve_moe.parallel.sharding import DATA, TENSOR, ParallelPlan
from tests.support.cluster.process_groups import join_hosts, leave_hosts
from tests.support.experts.expert_reference import activation_by_hand, choice_by_hand, gates_by_hand, scores_by_hand
from tests.support.session.xla_flags import OPTIMIZED, QUICK

NUM_LAYERS = 2


def plan_of(data: int, tensor: int) -> ParallelPlan:
    devices = np.asarray(jax.devices()[: data * tensor]).reshape(data, tensor)
    return ParallelPlan(Mesh(devices, (DATA, TENSOR)))


def shuffled(placement: ExpertPlacement, seed: int) -> ExpertPlacement:
    """The same replicas per rank under other names, at other places, with uneven shares."""
    generator = np.random.default_rng(seed)
    layers = []
    for experts in placement.expert_of_slot:
        by_rank = generator.permutation(placement.num_experts)[experts].reshape(placement.ep_size, -1)
        layers.append(generator.permuted(generator.permutation(by_rank), axis=1).reshape(-1))
    experts = np.stack(layers)
    parts = generator.random(experts.shape) + 0.05
    totals = np.stack([np.bincount(e, p, placement.num_experts)[e] for e, p in zip(experts, parts, strict=True)])
    return placement_from(experts, parts / totals, num_experts=placement.num_experts, ep_size=placement.ep_size)


@dataclass(frozen=True)
class MoeCase:
    """Sizes of a MoE layer and its tokens: `num_tokens` for each data rank, some of them padding."""

    num_tokens: int = 19
    num_experts: int = 16
    top_k: int = 4
    width: int = 16
    inner: int = 8
    valid_share: float = 0.8
    seed: int = 0
    dtype: str = "float32"
    rule: Mapping[str, Any] = field(default_factory=dict)
    has_bias: bool = False
    activation: Activation = SILU

    @cached_property
    def router_spec(self) -> RouterSpec:
        return RouterSpec(self.num_experts, self.top_k, **{"renormalize": True, **self.rule})

    @cached_property
    def router_biases(self) -> list[np.ndarray | None]:
        """Of logits and of the choice, by expert."""
        biases = [0.3 * self._random(name, self.num_experts) for name in ("logit", "selection")]
        wanted = self.router_spec.logit_bias, self.router_spec.selection_bias
        return [bias if is_wanted else None for bias, is_wanted in zip(biases, wanted, strict=True)]

    @cached_property
    def router(self) -> np.ndarray:
        return self._random("router", self.width, self.num_experts)

    @cached_property
    def weights(self) -> list[np.ndarray]:
        """Gate, up and down by logical expert, [layers, experts, ...], then their biases if any."""
        shapes = [("gate", self.width, self.inner), ("up", self.width, self.inner), ("down", self.inner, self.width)]
        stacked = [self._random(name, NUM_LAYERS, self.num_experts, a, b) / a**0.5 for name, a, b in shapes]
        biases = [self._random(f"{name} bias", NUM_LAYERS, self.num_experts, b) for name, _, b in shapes]
        return stacked + biases * self.has_bias

    def hidden(self, data: int) -> np.ndarray:
        return self._random("hidden", data * self.num_tokens, self.width)

    def valid(self, data: int) -> np.ndarray:
        return np.random.default_rng([self.seed, 9]).random(data * self.num_tokens) < self.valid_share

    def _random(self, name: str, *shape: int) -> np.ndarray:
        generator = np.random.default_rng([self.seed, len(name), ord(name[0])])
        return generator.standard_normal(shape).astype(np.float32)


GROUPED = MoeCase(
    num_tokens=11,
    top_k=6,
    has_bias=True,
    activation=Activation("clamped_swiglu", slope=1.3, limit=2.0),
    rule={
        "score": "sigmoid",
        "logit_bias": True,
        "selection_bias": True,
        "scale": 2.5,
        "num_groups": 4,
        "groups_kept": 2,
        "group_score": "top2_sum",
    },
)
"""Experts with biases, chosen within groups by biased scores."""


@dataclass(frozen=True)
class MoeResult:
    """Outputs of all data ranks: sums [W, D], ids [W, K], counts per data rank [data, E], their tallies if any."""

    out: np.ndarray
    ids: np.ndarray
    counts: np.ndarray
    tally: np.ndarray | None = None


class MoeRun:
    """One compiled layer: call it with tokens and a placement, again with others of the same shape.

    It is compiled quickly, or as a product would be (`optimized`).
    """

    def __init__(
        self,
        case: MoeCase,
        plan: ParallelPlan,
        *,
        backend: str,
        num_redundant: int = 0,
        optimized: bool = False,
        shares_outer: bool = False,
        **config,
    ) -> None:
        self.case, self.plan = case, plan
        self.config = ExpertConfig(
            case.router_spec,
            KERNELS[config.pop("kernels", "cpu")],
            plan,
            num_redundant,
            backend,
            activation=case.activation,
            **config,
        )
        split, whole = PartitionSpec(DATA), PartitionSpec()
        slots = plan.partition(("layers", "expert_slots"))
        pairs = [[whole, slots], [whole, slots], [slots, whole]] if shares_outer else slots
        self._parts = (split, whole, split, slots, whole, whole, whole, pairs, split)
        self.compiled = jax.jit(
            jax.shard_map(self._on_device, mesh=plan.mesh, in_specs=self._parts, out_specs=split, check_vma=False),
            compiler_options=OPTIMIZED if optimized else QUICK,
        )

    def __call__(self, placement: ExpertPlacement | None = None, **changes) -> MoeResult:
        """Run a layer; `changes` replace hidden, router, valid, layer, capacity_factor, pairs or adapter_T."""
        return MoeResult(*map(np.asarray, self.on_devices(placement, **changes)))

    def on_devices(self, placement: ExpertPlacement | None = None, *, layer: int = 1, **changes) -> list[jax.Array]:
        """Run one layer and leave the outputs where they are."""
        data = self.plan.mesh.shape[DATA]
        case, maps = self.case, None
        experts = np.tile(np.arange(case.num_experts), (NUM_LAYERS, 1))
        if placement is not None:
            experts, maps = placement.expert_of_slot, placement_arrays(placement)
        slots = [w[np.arange(NUM_LAYERS)[:, None], experts] for w in case.weights]
        inputs = {"hidden": case.hidden(data), "router": case.router, "valid": case.valid(data)} | changes
        hidden = inputs["hidden"].astype(jax.numpy.dtype(case.dtype))
        slots = [array.astype(hidden.dtype) for array in slots]
        router = RouterWeights(inputs["router"], *case.router_biases)
        pairs, adapter_T = changes.get("pairs"), changes.get("adapter_T")
        pairs = pairs and [
            [a[np.arange(NUM_LAYERS)[:, None], experts] if a.ndim == 5 else a for a in pair] for pair in pairs
        ]
        arguments = (
            hidden,
            router,
            inputs["valid"],
            slots,
            maps,
            np.int32(layer),
            self._factor(changes),
            pairs,
            adapter_T,
        )
        return self.compiled(*(self._placed(a, part) for a, part in zip(arguments, self._parts, strict=True)))

    def _factor(self, changes) -> np.ndarray | None:
        return np.asarray(changes.get("capacity_factor", 1.0), np.float32) if self.config.limits_capacity else None

    def _placed(self, arrays, part):
        """Each process holds all arguments and gives its devices their share."""
        if isinstance(part, list):
            return arrays and [self._placed(a, p) for a, p in zip(arrays, part, strict=True)]
        sharding = NamedSharding(self.plan.mesh, part)
        return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, a.__getitem__), arrays)

    def _on_device(self, hidden, router, valid, stacked, maps, layer, factor, pairs, adapter_T):
        flat, adapters = ExpertWeights(*map(_flat, stacked)), None
        if pairs is not None:
            adapters = RowAdapters(
                ExpertAdapters(*(AdapterPair(*(_flat(a) if a.ndim == 5 else a for a in pair)) for pair in pairs)),
                adapter_T,
            )
        capacity = None if factor is None else step_capacity(valid, factor, config=self.config)
        out, routing = apply_experts(
            hidden,
            router,
            flat,
            layer=layer,
            valid_T=valid,
            config=self.config,
            maps=maps,
            capacity=capacity,
            adapters=adapters,
        )
        tally = () if routing.tally_4 is None else (routing.tally_4[None],)
        counts_E = count_tokens(routing.ids_TK, valid, num_experts=self.config.router.num_experts)
        return out, routing.ids_TK, counts_E[None], *tally


def _flat(array: jax.Array) -> jax.Array:
    return array.reshape(-1, *array.shape[2:])


def dense(case: MoeCase, data: int, *, layer: int = 1, **changes) -> MoeResult:
    """Every token by every expert it chose, in float64; padding gives zeros."""
    inputs = {"hidden": case.hidden(data), "router": case.router, "valid": case.valid(data)} | changes
    hidden, valid = inputs["hidden"].astype(np.float64), inputs["valid"]
    scores = scores_by_hand(hidden, inputs["router"], case.router_biases[0], score=case.router_spec.score)
    choice = choice_by_hand(scores, case.router_biases[1], router=case.router_spec)
    ids = np.argsort(-choice, axis=1, kind="stable")[:, : case.top_k]
    gates = gates_by_hand(scores, ids, router=case.router_spec)
    out = sums_of(case, hidden, np.where(valid[:, None], ids, -1), gates, layer=layer)
    counts = [
        np.bincount(i[v].reshape(-1), minlength=case.num_experts)
        for i, v in zip(np.split(ids, data), np.split(valid, data), strict=True)
    ]
    return MoeResult(out, ids.astype(np.int32), np.stack(counts))


def sums_of(case: MoeCase, hidden: np.ndarray, ids: np.ndarray, gates: np.ndarray, *, layer: int = 1) -> np.ndarray:
    """Weighted sums of the experts `ids` in float64; -1 is no expert."""
    out, hidden = np.zeros(hidden.shape), hidden.astype(np.float64)
    w_gate, w_up, w_down, *biases = (w[layer].astype(np.float64) for w in case.weights)
    b_gate, b_up, b_down = biases or np.zeros((3, case.num_experts, 1))
    for token, pick in np.argwhere(ids >= 0):
        expert, row = ids[token, pick], hidden[token]
        gate, up = row @ w_gate[expert] + b_gate[expert], row @ w_up[expert] + b_up[expert]
        inner = activation_by_hand(gate, up, activation=case.activation)
        out[token] += gates[token, pick] * (inner @ w_down[expert] + b_down[expert])
    return out


def placements_for(case: MoeCase, plan: ParallelPlan, num_redundant: int) -> list[ExpertPlacement]:
    """Identity, then two shuffled ones."""
    ranks = plan.num_expert_ranks
    identity = identity_placement(NUM_LAYERS, case.num_experts, ep_size=ranks, num_redundant=num_redundant)
    return [identity, shuffled(identity, 1), shuffled(identity, 2)]


def all_to(experts: range, case: MoeCase, data: int) -> dict[str, np.ndarray]:
    """Changes with which every token chooses among `experts` only, in an order of its own."""
    hidden, router = case.hidden(data), case.router * 0.1
    hidden[:, 0] = 1.0
    router[0] = -50.0
    router[0, experts.start : experts.stop] = 0.0
    return {"hidden": hidden, "router": router}


def check_over_processes(coordinator: str, process: int, num_processes: int) -> None:
    """In each of several processes with two devices: the outputs that lie here are those of the dense layer."""
    use_cpu_devices(2)
    join_hosts(coordinator, num_hosts=num_processes, host_id=process)
    case, plan = MoeCase(num_tokens=37), plan_of(num_processes, 2)
    expected = dense(case, num_processes)
    for backend in ("replicated", "all_to_all", "fused"):
        run = MoeRun(case, plan, backend=backend, num_redundant=8)
        for placement in placements_for(case, plan, 8):
            out, ids, counts = run.on_devices(placement)
            for found, whole in ((out, expected.out), (ids, expected.ids), (counts, expected.counts)):
                for shard in found.addressable_shards:
                    np.testing.assert_allclose(np.asarray(shard.data), whole[shard.index], atol=1e-5)
    leave_hosts()


if __name__ == "__main__":
    check_over_processes(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
