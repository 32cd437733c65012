"""Draft models of the calculator: what they compute over whole rows, how they are trained, and their files.

They are trained as they draft (arXiv:2503.01840, training-time test): after its first step, on features of the target,
a draft model goes on with its own, and every step learns the target's distribution.
"""

# B rows   T tokens of a row   D model width   H heads   h head width   W words of the head   S steps of drafting

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from examples.calculator.batches import Batch, training_batches
from examples.calculator.network import UNSEEN, Scores, Weights, attention_of, score
from examples.calculator.optimizer import Rates, initial_state, update
from examples.calculator.training import Recipe, rate_scale
from rayserve_moe.checkpoints.files import CONFIG_FILE, SINGLE_FILE, open_checkpoint
from rayserve_moe.checkpoints.names import tensor_places
from rayserve_moe.kernels.reference.layers import project, rms_norm, rotate, rotation_of
from rayserve_moe.model.draft_spec import DraftSpec, draft_parameters
from rayserve_moe.model.layers.paged import rope_frequencies
from rayserve_moe.model.spec import ModelSpec

LATER_STEPS = 0.8
"""How much a step of drafting counts beside the one before."""
CAPACITY = 0.25
"""Of an expert in training, as a share of all tokens: twice its mean load."""


@dataclass(frozen=True)
class DraftRecipe:
    """How much a draft model is trained on, and how."""

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


class Form(ABC):
    """One kind of draft model for `target`: `words` are the ids that it scores, `rules` the names of its tensors by
    role, and `config` is written beside them. An expert, if it has any, takes a `capacity` of all tokens and skips the
    others."""

    words: tuple[int, ...]
    rules: Mapping[str, str]
    config: Mapping[str, Any]
    capacity = 1.0

    def __init__(self, target: ModelSpec, spec: DraftSpec) -> None:
        self.target, self.spec = target, spec

    @abstractmethod
    def initial(self, target: Weights, *, seed: int) -> Weights:
        """Float32 weights that training begins with."""

    @abstractmethod
    def first_features(self, head: Weights, target: Weights, scores: Scores) -> jax.Array:
        """What the target says of its tokens, [B, T, D]."""

    @abstractmethod
    def inputs(self, head: Weights, features: jax.Array, embedded: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The residual stream, and what the attention reads."""

    @abstractmethod
    def after_attention(self, head: Weights, hidden: jax.Array) -> jax.Array:
        """Features of the next step, [B, T, D]."""

    @abstractmethod
    def logits(self, head: Weights, target: Weights, features: jax.Array) -> jax.Array:
        """Logits of the words, [B, T, W]."""

    def extra_tensors(self) -> dict[str, np.ndarray]:
        """What files have besides the weights."""
        return {}


def drawn(spec: DraftSpec, *, seed: int) -> Weights:
    """Weights drawn in float32; what they add to the target's features is little."""
    generator, weights = jax.random.key(seed), {}
    tree = draft_parameters(spec, dtype="float32")
    for number, (group, name, param) in enumerate((g, n, p) for g, specs in tree.items() for n, p in specs.items()):
        shape = (*param.shape[: param.num_stacked_dims], *param.filled_shape)
        normal = jax.random.normal(jax.random.fold_in(generator, number), shape)
        scale = 0.02 if name == "head_VD" else shape[-2] ** -0.5 if len(shape) > 1 else 1.0
        weights.setdefault(group, {})[name] = jnp.ones(shape) if param.initial == "ones" else normal * scale
    return weights


def draft(head: Weights, target: Weights, scores: Scores, batch: Batch, *, form: Form, ahead: int) -> Ahead:
    """Draft `ahead` words after every token of rows, each after the true ones before it."""
    width, segments = batch.ids_BT.shape[1], jnp.asarray(batch.segments_BT)
    features = form.first_features(head, target, scores)
    seen_BTT = jnp.tril(jnp.ones((width, width), bool)) & (segments[:, :, None] == segments[:, None, :])
    logits, is_there, keys_of_steps = [], [], []
    for step in range(ahead):
        ids_BT = jnp.roll(batch.ids_BT, -1 - step, axis=1)
        stream, read = form.inputs(head, features, target["embedding"]["table_VD"][ids_BT])
        attended, keys = _attend(head, read, step, (seen_BTT, keys_of_steps), form.spec)
        features = form.after_attention(head, stream + attended)
        keys_of_steps.append(keys)
        logits.append(form.logits(head, target, features))
        ends = jnp.roll(segments, -2 - step, axis=1)
        is_there.append((ends == segments) & (segments >= 0) & (jnp.arange(width) + 2 + step < width))
    return Ahead(jnp.stack(logits), jnp.stack(is_there))


def _attend(
    head: Weights, read: jax.Array, step: int, seen: tuple[jax.Array, list], spec: DraftSpec
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One step: it attends to all first keys before a token, and to those of its own later steps."""
    weights, attention = {n: v[0] for n, v in head["gqa"].items()}, attention_of(spec.layer)
    seen_BTT, before = seen
    rows, width, _ = read.shape
    rotation = rotation_of(jnp.arange(width) + step, rope_frequencies(attention.rope, attention.head_dim))

    def heads_of(name: str, norm: str = "") -> jax.Array:
        heads = project(read, weights[name]).reshape(rows, width, -1, attention.head_dim)
        return rms_norm(heads, weights[norm], spec.layer.norm_eps) if norm in weights else heads

    repeats = attention.num_heads // attention.num_kv_heads
    queries = rotate(heads_of("q_LDH", "q_norm_Lh"), rotation)
    keys, values = rotate(heads_of("k_LDG", "k_norm_Lh"), rotation), heads_of("v_LDG")
    keys, values = (jnp.repeat(each, repeats, axis=2) for each in (keys, values))
    first_keys, first_values = before[0] if before else (keys, values)
    scores = jnp.einsum("BTHh,BSHh->BHTS", queries, first_keys) + jnp.where(seen_BTT, 0.0, UNSEEN)[:, None]
    later = [*before[1:], (keys, values)] if before else []
    own = [jnp.einsum("BTHh,BTHh->BHT", queries, of_step)[..., None] for of_step, _ in later]
    shares = jax.nn.softmax(jnp.concatenate([scores, *own], axis=-1) * attention.head_dim**-0.5, axis=-1)
    attended = jnp.einsum("BHTS,BSHh->BTHh", shares[..., :width], first_values)
    for number, (_, of_step) in enumerate(later):
        attended += shares[..., width + number].transpose(0, 2, 1)[..., None] * of_step
    return project(attended.reshape(rows, width, -1), weights["o_LHD"]), (keys, values)


def train(target: Weights, form: Form, recipe: DraftRecipe, *, report_every: int = 50) -> Weights:
    """Train a draft model for a target that stays as it is; return float32 weights."""
    words, head = jnp.array(form.words), form.initial(target, seed=recipe.seed)
    state, skipping = initial_state(head), copy(form)
    skipping.capacity = CAPACITY

    def loss_of(head: Weights, batch: Batch) -> tuple[jax.Array, jax.Array]:
        scores = target_scores(target, batch, form.target, capacity=CAPACITY)
        ahead = draft(head, target, scores, batch, form=skipping, ahead=recipe.ahead)
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


def target_scores(target: Weights, batch: Batch, spec: ModelSpec, *, capacity: float = 1.0) -> Scores:
    """What the target computes; an expert takes a `capacity` of all tokens and skips the others."""
    places = int(capacity * np.prod(batch.ids_BT.shape))
    return score(target, batch.ids_BT, batch.segments_BT, spec=spec, places=places)


def write(directory: Path, head: Weights, form: Form) -> None:
    """Write a directory that serving reads."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps(form.config, indent=2) + "\n", encoding="utf-8")
    tensors = {}
    for name, (place,) in tensor_places(draft_parameters(form.spec, dtype="bfloat16"), form.rules).items():
        group, member = place.path
        values = np.asarray(head[group][member][place.stack_index], np.float32)
        values = values.T if place.spec.file.transposed else values
        tensors[name] = np.ascontiguousarray(values).astype(ml_dtypes.bfloat16)
    save_file(tensors | form.extra_tensors(), directory / SINGLE_FILE, metadata={"format": "pt"})
    (directory / SINGLE_FILE).chmod(0o644)


def read(directory: Path, form: Form) -> Weights:
    """Read such a directory back into float32 weights."""
    files, head = open_checkpoint(directory), jax.tree.map(np.array, drawn(form.spec, seed=0))
    for name, (place,) in tensor_places(draft_parameters(form.spec, dtype="float32"), form.rules).items():
        values = files.read(name).astype(np.float32)
        group, member = place.path
        head[group][member][place.stack_index] = values.T if place.spec.file.transposed else values
    return jax.tree.map(jnp.asarray, head)
