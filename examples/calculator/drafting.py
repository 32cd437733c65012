"""An EAGLE3 head for the calculator: what it computes over whole rows, how it is trained, and its files.

It is trained as it drafts (arXiv:2503.01840, training-time test): after its first step, on features of the target, it
goes on with its own, and every step learns the target's distribution.
"""

# B rows   T tokens of a row   D model width   H heads   h head width   W words of the head   S steps of drafting

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from examples.calculator.batches import Batch, training_batches
from examples.calculator.network import UNSEEN, Scores, Weights, score
from examples.calculator.optimizer import Rates, initial_state, update
from examples.calculator.training import Recipe, rate_scale
from rayserve_moe.checkpoints.files import CONFIG_FILE, SINGLE_FILE, open_checkpoint
from rayserve_moe.checkpoints.names import tensor_places
from rayserve_moe.kernels.layers import project, rms_norm, rotate, rotation_of
from rayserve_moe.model.attention import rope_frequencies
from rayserve_moe.model.draft_spec import EAGLE_TENSORS, MAP, DraftSpec, draft_parameters, eagle_rules, eagle_spec
from rayserve_moe.model.spec import ModelSpec

WORDS = tuple(sorted(b"\n#*+-0123456789="))
"""The bytes that problems and answers are made of: the head's vocabulary."""
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "vocab_size": 256,
    "draft_vocab_size": len(WORDS),
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "norm_output": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}
LAYER = "midlayer."
TOP = ("fc", "head", "draft_norm")
NAMES = [MAP, *(end if role in TOP else LAYER + end for role, end in EAGLE_TENSORS.items() if "bias" not in role)]
LATER_STEPS = 0.8
"""How much a step of drafting counts beside the one before."""


@dataclass(frozen=True)
class HeadRecipe:
    """How much the head is trained on, and how."""

    steps: int = 750
    rows: int = 24
    width: int = 64
    seed: int = 0
    ahead: int = 5
    rates: Rates = field(default_factory=lambda: Rates(adam_decay=0.01))


class Ahead(NamedTuple):
    """Logits [S, B, T, W] of the word after the next s + 1 of a token, and which of these words there are, bool."""

    logits: jax.Array
    is_there: jax.Array


def head_spec(target: ModelSpec) -> DraftSpec:
    """The head that is trained."""
    return eagle_spec(CONFIG, target, algorithm="EAGLE3", names=NAMES)


def initial_head(draft: DraftSpec, *, seed: int) -> Weights:
    """Draw its weights in float32; what it adds to the target's features is little."""
    generator, weights = jax.random.key(seed), {}
    tree = draft_parameters(draft, dtype="float32")
    for number, (group, name, param) in enumerate((g, n, p) for g, specs in tree.items() for n, p in specs.items()):
        shape = (*param.shape[: param.num_stacked_dims], *param.filled_shape)
        drawn = jax.random.normal(jax.random.fold_in(generator, number), shape)
        scale = 0.02 if name == "head_VD" else shape[-2] ** -0.5 if len(shape) > 1 else 1.0
        weights.setdefault(group, {})[name] = jnp.ones(shape) if param.initial == "ones" else drawn * scale
    return weights


def draft(head: Weights, target: Weights, scores: Scores, batch: Batch, *, spec: DraftSpec, ahead: int) -> Ahead:
    """Draft `ahead` words after every token of rows, each after the true ones before it."""
    own, width = head["draft"], batch.ids_BT.shape[1]
    features = jnp.concatenate([scores.entering[layer] for layer in spec.aux_layers], axis=-1) @ own["fc_AD"]
    segments = jnp.asarray(batch.segments_BT)
    seen_BTT = jnp.tril(jnp.ones((width, width), bool)) & (segments[:, :, None] == segments[:, None, :])
    logits, is_there, keys_of_steps = [], [], []
    for step in range(ahead):
        ids_BT = jnp.roll(batch.ids_BT, -1 - step, axis=1)
        features, keys = _layer(
            head, features, target["embedding"]["table_VD"][ids_BT], step, (seen_BTT, keys_of_steps), spec
        )
        keys_of_steps.append(keys)
        logits.append(rms_norm(features, own["norm_D"], spec.layer.norm_eps) @ own["head_VD"].T)
        ends = jnp.roll(segments, -2 - step, axis=1)
        is_there.append((ends == segments) & (segments >= 0) & (jnp.arange(width) + 2 + step < width))
    return Ahead(jnp.stack(logits), jnp.stack(is_there))


def _layer(
    head: Weights, features: jax.Array, embedded: jax.Array, step: int, seen: tuple[jax.Array, list], spec: DraftSpec
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One step: it attends to all first keys before a token, and to those of its own later steps."""
    weights, eps, attention = {n: v[0] for n, v in head["attention"].items()}, spec.layer.norm_eps, spec.layer.attention
    seen_BTT, before = seen
    rows, width, _ = features.shape
    rotation = rotation_of(jnp.arange(width) + step, rope_frequencies(spec.layer.rope, attention.head_dim))
    normed = [rms_norm(embedded, weights["norm_LD"], eps), rms_norm(features, head["draft"]["hidden_norm_D"], eps)]
    joined = jnp.concatenate(normed, axis=-1)

    def heads_of(name: str) -> jax.Array:
        return project(joined, weights[name]).reshape(rows, width, -1, attention.head_dim)

    repeats = attention.num_heads // attention.num_kv_heads
    queries = rotate(heads_of("q_LDH"), rotation)
    keys, values = rotate(heads_of("k_LDG"), rotation), heads_of("v_LDG")
    keys, values = (jnp.repeat(each, repeats, axis=2) for each in (keys, values))
    first_keys, first_values = before[0] if before else (keys, values)
    scores = jnp.einsum("BTHh,BSHh->BHTS", queries, first_keys) + jnp.where(seen_BTT, 0.0, UNSEEN)[:, None]
    later = [*before[1:], (keys, values)] if before else []
    own = [jnp.einsum("BTHh,BTHh->BHT", queries, of_step)[..., None] for of_step, _ in later]
    shares = jax.nn.softmax(jnp.concatenate([scores, *own], axis=-1) * attention.head_dim**-0.5, axis=-1)
    attended = jnp.einsum("BHTS,BSHh->BTHh", shares[..., :width], first_values)
    for number, (_, of_step) in enumerate(later):
        attended += shares[..., width + number].transpose(0, 2, 1)[..., None] * of_step
    hidden = features + project(attended.reshape(rows, width, -1), weights["o_LHD"])
    dense = {name: matrix[0] for name, matrix in head["dense"].items()}
    normed_after = rms_norm(hidden, head["mlp_norm"]["scale"][0], eps)
    inner = jax.nn.silu(normed_after @ dense["gate_NDI"]) * (normed_after @ dense["up_NDI"])
    return hidden + inner @ dense["down_NID"], (keys, values)


def train_head(target: Weights, spec: ModelSpec, recipe: HeadRecipe, *, report_every: int = 50) -> Weights:
    """Train a head for a target that stays as it is; return float32 weights."""
    draft_spec = head_spec(spec)
    words, head = jnp.array(WORDS), initial_head(head_spec(spec), seed=recipe.seed)
    state = initial_state(head)

    def loss_of(head: Weights, batch: Batch) -> tuple[jax.Array, jax.Array]:
        scores = target_scores(target, batch, spec)
        ahead = draft(head, target, scores, batch, spec=draft_spec, ahead=recipe.ahead)
        losses, right = [], []
        for step, (logits, is_there) in enumerate(zip(*ahead, strict=True)):
            wanted = jnp.roll(jax.nn.softmax(scores.logits_BTV[..., words]), -1 - step, axis=1)
            crossed = -jnp.sum(wanted * jax.nn.log_softmax(logits), axis=-1)
            losses.append(LATER_STEPS**step * jnp.sum(crossed * is_there) / jnp.sum(is_there))
            agrees = logits.argmax(-1) == wanted.argmax(-1)
            right.append(jnp.sum(agrees * is_there) / jnp.sum(is_there))
        return sum(losses), jnp.stack(right)

    @jax.jit
    def step_of(head: Weights, state: Any, batch: Batch, scale: jax.Array) -> tuple[Weights, Any, jax.Array]:
        gradients, right = jax.grad(loss_of, has_aux=True)(head, batch)
        head, state = update(head, gradients, state=state, rate_scale=scale, rates=recipe.rates)
        return head, state, right

    schedule = Recipe(steps=recipe.steps)
    batches: Iterator[Batch] = training_batches(rows=recipe.rows, width=recipe.width, seed=recipe.seed + 1)
    for number in range(recipe.steps):
        scale = jnp.asarray(rate_scale(number, schedule), jnp.float32)
        head, state, right = step_of(head, state, next(batches), scale)
        if (number + 1) % report_every == 0:
            shares = ", ".join(f"{share:.2f}" for share in right.tolist())
            print(f"step {number + 1} of {recipe.steps}: agrees with the target in {shares}", flush=True)
    return head


def target_scores(target: Weights, batch: Batch, spec: ModelSpec) -> Scores:
    """What the target computes, no expert skipping a token."""
    return score(target, batch.ids_BT, batch.segments_BT, spec=spec, places=int(np.prod(batch.ids_BT.shape)))


def write_head(directory: Path, head: Weights, spec: ModelSpec) -> None:
    """Write a directory that serving reads, and other engines do."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    tree = draft_parameters(head_spec(spec), dtype="bfloat16")
    tensors = {}
    for name, (place,) in tensor_places(tree, eagle_rules(NAMES)).items():
        group, member = place.path
        values = np.asarray(head[group][member][place.stack_index], np.float32)
        tensors[name] = np.ascontiguousarray(values.T if place.spec.transposed else values).astype(ml_dtypes.bfloat16)
    tensors[MAP] = np.array(WORDS, np.int64) - np.arange(len(WORDS))
    tensors["t2d"] = np.isin(np.arange(spec.vocab_size), WORDS)
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})
    (directory / SINGLE_FILE).chmod(0o644)


def read_head(directory: Path, spec: ModelSpec) -> Weights:
    """Read such a directory back into float32 weights."""
    files, head = open_checkpoint(directory), {}
    for name, (place,) in tensor_places(draft_parameters(head_spec(spec), dtype="float32"), eagle_rules(NAMES)).items():
        values = jnp.asarray(files.read(name).astype(np.float32))
        values = values.T if place.spec.transposed else values
        group, member = place.path
        head.setdefault(group, {})[member] = values[None] if place.stack_index else values
    return head
