"""Stacked products, fused heads and the router of GPUs, interpreted, are their references."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.attention_config import AttentionConfig
from rayserve_moe.kernels.attention_heads import StackedWeights, project_rows
from rayserve_moe.kernels.gpu import fused_heads, stacked_products, top_experts
from rayserve_moe.kernels.gpu.row import gpu_products
from rayserve_moe.kernels.kv_pool import write_rows
from rayserve_moe.kernels.reference.layers import Rotation, router_scores
from rayserve_moe.kernels.table import GPU
from rayserve_moe.kernels.tpu.top_experts import StackedRouter

LAYERS, LAYER, WIDTH, HEADS, KV_HEADS = 3, 1, 256, 4, 2
PRODUCTS = gpu_products(interpret=True)


def drawn(*shape: int, seed: int = 0, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed + sum(shape)).standard_normal(shape), dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_tokens", [1, 5, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_read_the_matrices_of_one_layer(num_tokens: int, dtype: str):
    x, layer = drawn(num_tokens, WIDTH, dtype=dtype), jnp.int32(LAYER)
    stacks = [drawn(LAYERS, WIDTH, columns, seed=columns, dtype=dtype) for columns in (128, 64, 64)]
    found = stacked_products.multiply_stacked(x, stacks, layer, interpret=True)
    wanted = stacked_products.multiply_copied(x, stacks, layer)
    assert found.dtype == jnp.float32 and found.shape == wanted.shape == (num_tokens, 256)
    np.testing.assert_allclose(found, wanted, atol=2e-4, rtol=0)


def test_tokens_are_converted_to_the_dtype_of_a_router():
    x, stacks, layer = drawn(5, WIDTH, dtype="bfloat16"), [drawn(LAYERS, WIDTH, 64)], jnp.int32(LAYER)
    assert str(PRODUCTS.choose(x, stacks, layer)) == "triton"
    found = stacked_products.multiply_stacked(x, stacks, layer, interpret=True)
    np.testing.assert_allclose(found, x.astype(jnp.float32) @ stacks[0][LAYER], atol=2e-4, rtol=0)


@pytest.mark.parametrize("width", [32, 96, 192, 320])
def test_an_inner_width_is_cut_into_whole_blocks(width: int):
    """Such as the 2,880 of gpt-oss, which are 45 blocks of 64."""
    x, stacks, layer = drawn(5, width), [drawn(LAYERS, width, columns) for columns in (128, 64)], jnp.int32(LAYER)
    assert str(PRODUCTS.choose(x, stacks, layer)) == "triton"
    found = stacked_products.multiply_stacked(x, stacks, layer, interpret=True)
    np.testing.assert_allclose(found, stacked_products.multiply_copied(x, stacks, layer), atol=2e-4, rtol=0)


def test_products_that_are_copied_say_why():
    def choice(num_tokens: int, columns: int, dtype: str = "float32") -> str:
        return str(PRODUCTS.choose(drawn(num_tokens, WIDTH), [drawn(LAYERS, WIDTH, columns, dtype=dtype)], LAYER))

    assert choice(256, 64) == "triton"
    assert choice(257, 64) == "xla (triton: 257 tokens, not 256 or fewer)"
    assert choice(4, 96) == "xla (triton: a matrix of 256 x 96 is not whole blocks of 32 x 64)"
    assert choice(4, 64, "bfloat16") == "xla (triton: tokens and matrices differ in dtype)"


class Heads:
    """Inputs of a layer's heads, with the results of the kernel and of the reference."""

    def __init__(
        self,
        *,
        has_biases: bool = False,
        width: int = 64,
        values: int = 64,
        rotated: int = 64,
        tokens: int = 5,
        **more: Any,
    ) -> None:
        dtype, self.has_norms = more.pop("dtype", "float32"), more.pop("has_norms", True)
        self.config = AttentionConfig(head_dim=width, eps=1e-6, value_dim=values, **more)
        sizes = {"q_LDH": HEADS * width, "k_LDG": KV_HEADS * width, "v_LDG": KV_HEADS * values}
        self.stacks = {
            name: drawn(LAYERS, WIDTH, size, seed=i, dtype=dtype) for i, (name, size) in enumerate(sizes.items())
        }
        if self.has_norms:
            self.stacks |= {f"{name}_norm_Lh": drawn(LAYERS, width, seed=ord(name), dtype=dtype) for name in "qk"}
        if has_biases:
            self.stacks |= {
                f"{name[0]}_bias_L{name[-1]}": stack[:, 0] for name, stack in self.stacks.items() if "_LD" in name
            }
        self.hidden = drawn(tokens, WIDTH, seed=9, dtype=dtype)
        self.rotation = Rotation(drawn(tokens, rotated // 2, seed=1), drawn(tokens, rotated // 2, seed=2))
        self.pool = drawn(6, 4, KV_HEADS, width + values, seed=3, dtype=dtype)
        self.slots = jnp.asarray(np.random.default_rng(4).permutation(24)[:tokens], jnp.int32)

    def difference(self) -> float:
        """Return the largest relative error of queries and of the pool; other rows of the pool must be unchanged."""
        of_layer = {name: stack[LAYER] for name, stack in self.stacks.items()}
        knobs = {"rotation": self.rotation, "config": self.config}
        assert fused_heads.unsupported_reason(self.hidden, of_layer, self.pool, **knobs) == ""
        queries, pool = fused_heads.project_and_write(
            self.hidden,
            of_layer,
            self.pool,
            slots_T=self.slots,
            stacked=StackedWeights(self.stacks, jnp.int32(LAYER)),
            products=PRODUCTS,
            interpret=True,
            **knobs,
        )
        wanted, rows = project_rows(self.hidden, of_layer, **knobs)
        pairs = (queries, wanted), (pool, write_rows(self.pool, rows, self.slots))
        return max(
            float(np.abs(np.asarray(ours, np.float32) - np.asarray(theirs, np.float32)).max() / np.abs(theirs).max())
            for ours, theirs in pairs
        )


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "heads",
    [
        {},
        {"has_norms": False},
        {"has_biases": True},
        {"rotated": 32},
        {"tokens": 1},
        {"tokens": 20, "values": 48},
        {"dtype": "bfloat16"},
        {"rotated": 0, "width": 32},
    ],
    ids=lambda heads: "-".join(f"{name}-{value}" for name, value in heads.items()) or "plain",
)
def test_fused_heads_are_projected_normed_rotated_and_written(heads: dict[str, Any]):
    assert Heads(**heads).difference() <= (1e-2 if "dtype" in heads else 2e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("where", "fault"),
    [
        ("_stored", jnp.zeros_like),
        ("_scaled", lambda part, factor, scale: part * factor[:, None]),
    ],
    ids=["rows of zeros", "no scales"],
)
def test_a_planted_fault_of_heads_is_found(where: str, fault: Any, monkeypatch):
    monkeypatch.setattr(fused_heads, where, fault)
    assert Heads().difference() > 0.1


def test_heads_that_are_not_fused_say_why():
    def reason(**more: Any) -> str:
        heads = Heads(**more)
        of_layer = {name: stack[LAYER] for name, stack in heads.stacks.items()}
        return fused_heads.unsupported_reason(
            heads.hidden, of_layer, heads.pool, rotation=heads.rotation, config=heads.config
        )

    assert reason(interleaved_rotation=True) == "neighbouring elements rotate"
    assert reason(norms_after_rotation=True) == "norms follow the rotation, or cover all heads at once"
    assert reason(clip=1.0) == reason(norms_values=True) == "keys or values are clipped, scaled or normed"
    assert reason(rotated=48) == "48 of 64 elements rotate, which are no powers of two"


def routed(num_experts: int, *, score: str, has_bias: bool, num_tokens: int = 7, top_k: int = 3) -> tuple[Any, Any]:
    """Return ids and weights by the kernel, and by sorting the scores."""
    hidden, matrix = drawn(num_tokens, WIDTH), drawn(LAYERS, WIDTH, num_experts, seed=5) / 16
    biases = [drawn(LAYERS, num_experts, seed=seed) / 8 if has_bias else None for seed in (6, 7)]
    router = StackedRouter(matrix, *biases, jnp.int32(LAYER))
    found = top_experts.choose_experts(
        hidden, router, top_k=top_k, score=score, finish=lambda chosen: chosen / chosen.sum(-1, keepdims=True),
        products=PRODUCTS, interpret=True,
    )  # fmt: skip
    logit_bias, selection_bias = (None if bias is None else bias[LAYER] for bias in biases)
    scores = np.asarray(router_scores(hidden, matrix[LAYER], bias_E=logit_bias, score=score))
    choice = scores if selection_bias is None else scores + np.asarray(selection_bias)
    ids = np.argsort(-choice, axis=1, kind="stable")[:, :top_k]
    chosen = np.take_along_axis(scores, ids, axis=1)
    return found, (ids, chosen / chosen.sum(-1, keepdims=True))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("num_experts", [8, 60, 128])
def test_the_router_chooses_the_largest(num_experts: int, score: str, has_bias: bool):
    (ids, weights), (expected_ids, expected) = routed(num_experts, score=score, has_bias=has_bias)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, atol=1e-5)


@pytest.mark.parametrize("num_experts", [4, 6])
def test_ties_go_to_the_smaller_id_and_nan_comes_first(num_experts: int):
    logits = np.zeros((3, num_experts), np.float32)
    logits[1, 2], logits[2] = 1.0, -np.inf
    logits[2, 3] = np.nan

    def products(*_: Any) -> jax.Array:
        return jnp.asarray(logits)

    router = StackedRouter(jnp.zeros((1, WIDTH, num_experts)), None, None, jnp.int32(0))
    ids, _ = top_experts.choose_experts(
        drawn(3, WIDTH), router, top_k=num_experts, score="sigmoid", finish=lambda each: each, products=products,
        interpret=True,
    )  # fmt: skip
    rest = [number for number in range(num_experts) if number != 2]
    others = [number for number in range(num_experts) if number != 3]
    np.testing.assert_array_equal(ids, [list(range(num_experts)), [2, *rest], [3, *others]])


def test_a_planted_fault_of_the_router_is_found(monkeypatch):
    monkeypatch.setattr(top_experts, "_scores", lambda logits, _: -logits)
    (ids, _), (expected, _) = routed(60, score="softmax", has_bias=False)
    assert np.any(np.asarray(ids) != expected)


def test_a_router_that_the_kernel_does_not_take_says_why():
    router = StackedRouter(jnp.zeros((1, WIDTH, 2048)), None, None, 0)
    choose = partial(GPU.experts.choose.choose, drawn(2, WIDTH))
    assert str(choose(router)) == "separate (top_experts: 2048 experts, not 1024 or fewer)"
    assert str(choose(router, is_forced=True)) == "separate (top_experts: experts may be forced)"
    assert str(choose(router, is_grouped=True)) == "separate (top_experts: experts are chosen within groups)"
    assert str(choose(None)) == "separate (top_experts: the router's weights are those of one layer)"
