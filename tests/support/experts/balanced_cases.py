"""Random cases of balanced selection in few shapes, so that compiling does not outlast the comparison."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from hypothesis import strategies as st

from rayserve_moe.experts.balanced_layer import balanced_expert_selection
from tests.support.experts.balanced_reference import Selected, balanced_oracle


class Shape(NamedTuple):
    """Tokens, experts, picks, slots, slots of an expert at most, and devices with orders of their own (0: none)."""

    tokens: int
    experts: int
    k: int
    slots: int
    most: int
    devices: int = 0


SHAPES = (
    Shape(16, 8, 2, 8, 1),
    Shape(16, 8, 8, 12, 3),
    Shape(64, 16, 4, 24, 4, devices=3),
    Shape(64, 12, 3, 15, 4),
    Shape(600, 32, 4, 40, 3),
)
TABLES = ("replicas", "empty_lists", "some_unused")
SCORES = ("normal", "ties", "skewed", "identical", "special", "masked", "tiny")


class Case(NamedTuple):
    """The arguments of a call, without its shapes."""

    shape: Shape
    scores: np.ndarray
    table: np.ndarray
    arrays: dict[str, np.ndarray | float]
    rule: tuple[tuple[str, Any], ...]

    def oracle(self) -> Selected:
        sizes = {"k": self.shape.k, "num_slots": self.shape.slots}
        arrays = dict(self.arrays)
        return balanced_oracle(self.scores, self.table, arrays.pop("factor"), **arrays, **sizes, **dict(self.rule))

    def on_device(self) -> tuple[np.ndarray, ...]:
        arrays = dict(self.arrays)
        select = compiled(self.shape.k, self.shape.slots, self.rule)
        return tuple(np.asarray(a) for a in select(self.scores, self.table, np.float32(arrays.pop("factor")), **arrays))


@cache
def compiled(k: int, num_slots: int, rule: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(partial(balanced_expert_selection, k=k, num_slots=num_slots, **dict(rule)))


def make_table(shape: Shape, kind: str, generator: np.random.Generator) -> np.ndarray:
    """Slots of each expert and of one more that no router selects, in random order: [E + 1, M] or [D, E + 1, M]."""
    rows: list[list[int]] = [[] for _ in range(shape.experts + 1)]
    slots = generator.permutation(shape.slots).tolist()
    if kind == "some_unused":
        slots = slots[: -max(1, shape.slots // 8)]
    reached = shape.experts + 1 if kind != "empty_lists" else max(1, shape.experts // 2)
    for i, slot in enumerate(slots):
        expert = i if i < reached else int(generator.integers(reached))
        free = [e for e in (expert, *range(reached)) if len(rows[e]) < shape.most]
        if free:
            rows[free[0]].append(slot)
    tables = []
    for _ in range(max(1, shape.devices)):
        table = np.full((len(rows), shape.most), -1, np.int32)
        for expert, row in enumerate(rows):
            places = np.sort(generator.permutation(shape.most)[: len(row)])
            table[expert, places] = generator.permutation(row)
        tables.append(table)
    return np.stack(tables) if shape.devices else tables[0]


def make_scores(shape: Shape, kind: str, generator: np.random.Generator) -> np.ndarray:
    size = shape.tokens, shape.experts
    scores = generator.standard_normal(size).astype(np.float32)
    if kind == "ties":
        scores = generator.integers(-2, 3, size).astype(np.float32) * np.float32(0.5) * generator.choice([-1, 1], size)
    if kind == "skewed":
        scores = scores - np.float32(3) * np.log1p(np.arange(shape.experts, dtype=np.float32))
    if kind == "identical":
        scores = np.repeat(scores[:1], shape.tokens, axis=0)
    if kind == "special":
        special = np.array([np.nan, -np.nan, -np.inf, np.inf, 0.0, -0.0], np.float32)
        scores = np.where(generator.random(size) < 0.4, generator.choice(special, size), scores)
    if kind == "masked":
        scores = np.where(generator.random(size) < generator.choice([0.2, 0.9]), np.float32(-np.inf), scores)
    if kind == "tiny":
        scores = scores * np.float32(1e-40)
    return scores.astype(np.float32)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = draw(st.sampled_from(SHAPES))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_tokens = draw(st.one_of(st.integers(0, shape.tokens), st.just(shape.tokens)))
    valid = np.arange(shape.tokens) < num_tokens
    if draw(st.booleans()):
        valid &= generator.random(shape.tokens) < 0.7
    arrays: dict[str, Any] = {"factor": draw(st.sampled_from([0.25, 0.5, 0.75, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0]))}
    arrays["valid"] = valid
    rule: tuple[tuple[str, Any], ...] = ()
    if draw(st.booleans()):
        if shape.k == 4:
            arrays["capacity"] = np.int32(draw(st.one_of(st.integers(0, 12), st.just(2**30))))
        arrays["gate_scores"] = generator.random((shape.tokens, shape.experts)).astype(np.float32) + np.float32(0.01)
        rule = (("renormalize", True), ("scale", 2.5))
    if shape.devices:
        arrays["device_index"] = generator.integers(0, shape.devices, shape.tokens).astype(np.int32)
    table = make_table(shape, draw(st.sampled_from(TABLES)), generator)
    return Case(shape, make_scores(shape, draw(st.sampled_from(SCORES)), generator), table, arrays, rule)
