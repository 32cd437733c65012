"""A hybrid calculator: three gated delta layers, then gated attention, trained by the policy's own forward pass."""

# B rows   T tokens of a row

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, muon
from safetensors.numpy import save_file

from examples.calculator.batches import Batch, question_batch
from examples.calculator.export import SPECIAL_IDS, write_tokenizer
from examples.calculator.problems import MIX, draw
from examples.calculator.training import mean_answer_loss
from examples.grpo.checkpoints import whole_file
from examples.grpo.model import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Architecture,
    Params,
    checkpoint_tensors,
    read_architecture,
    read_params,
    rounded,
)
from examples.grpo.policy import score
from rayserve_moe.checkpoints.synthetic import Drawn, SyntheticModel, write_checkpoint
from rayserve_moe.checkpoints.synthetic_tokenizer import MIN_VOCAB_SIZE

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "dtype": "bfloat16",
    "vocab_size": 256,
    "hidden_size": 96,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    **SPECIAL_IDS,
}
STEPS, ROWS, WIDTH = 1200, 96, 16
MUON_RATE, ADAM_RATE = 0.02, 3e-3
EMBEDDING_SCALE = 0.5
MUON_NAMES = (
    "q_LHD", "k_LGD", "v_LGD", "o_LDH", "gate_LEFD", "up_LEFD", "down_LEDF", "qkv_LWD", "z_LVD", "delta_out_LDV",
    "shared_gate_LFD", "shared_up_LFD", "shared_down_LDF",
)  # fmt: skip
"""Matrices inside the layers; everything else is trained by Adam."""
RESIDUAL_OUTPUTS = ("o_LDH", "down_LEDF", "delta_out_LDV", "shared_down_LDF")
AS_THEY_ARE = ("decay_LH", "decay_bias_LH", "delta_norm_Lv")
"""Parameters that are not scaled at the start: decay rates of heads, and norms."""


def ensure_hybrid(directory: Path) -> Path:
    """Train the hybrid calculator into a directory unless it is there: some minutes on two cores."""
    if not (directory / WEIGHTS_FILE).exists():
        print(f"training the hybrid calculator into {directory}", flush=True)
        write_config(directory)
        tensors = train(read_architecture(directory), steps=STEPS, seed=0)
        with whole_file(directory / WEIGHTS_FILE) as unfinished:
            save_file(tensors, unfinished, metadata={"format": "pt"})
    return directory


def write_config(directory: Path) -> None:
    """Write what a checkpoint holds beside the weights."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    for name, content in ((CONFIG_FILE, CONFIG), ("generation_config.json", {**SPECIAL_IDS, "do_sample": False})):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def train(architecture: Architecture, *, steps: int, seed: int) -> dict[str, np.ndarray]:
    """Train from random weights; return the tensors of a checkpoint."""
    params = initial_params(architecture, seed=seed)
    optimizer = muon_and_adam(params, steps)
    state, step = optimizer.init(params), compile_step(architecture, optimizer)
    generator, began = random.Random(seed), time.monotonic()
    for number in range(1, steps + 1):
        params, state, loss = step(params, state, draw_batch(generator))
        if number % 100 == 0:
            print(f"step {number} of {steps}: loss {float(loss):.4f}, {time.monotonic() - began:.0f} s", flush=True)
    return checkpoint_tensors(params, architecture)


def initial_params(architecture: Architecture, *, seed: int) -> Params:
    """Draw the weights. The head is zero, and so are the scales of norms, which are held less one."""
    with TemporaryDirectory() as directory:
        model = SyntheticModel({**CONFIG, "vocab_size": MIN_VOCAB_SIZE}, drawn=Drawn(scale=1.0))
        drawn = read_params(write_checkpoint(Path(directory) / "drawn", model, seed=seed), architecture)
    drawn |= {name: drawn[name][: CONFIG["vocab_size"]] for name in ("table_VD", "head_VD")}
    return {name: values * _initial_scale(name, values.shape, architecture) for name, values in drawn.items()}


def _initial_scale(name: str, shape: tuple[int, ...], architecture: Architecture) -> float:
    if name == "head_VD":
        return 0.0
    if name in AS_THEY_ARE:
        return 1.0
    scale = EMBEDDING_SCALE if name == "table_VD" else shape[-1] ** -0.5
    return scale / math.sqrt(2 * architecture.num_layers) if name in RESIDUAL_OUTPUTS else scale


def draw_batch(generator: random.Random) -> Batch:
    """Draw a problem a row, none of them held out."""
    tasks, shares = zip(*MIX, strict=True)
    problems = [draw(task, generator, held_out=False) for task in generator.choices(tasks, shares, k=ROWS)]
    return question_batch(problems, generator.randrange(2), width=WIDTH)


def compile_step(
    architecture: Architecture, optimizer: optax.GradientTransformation
) -> Callable[..., tuple[Params, optax.OptState, jax.Array]]:
    """Return the function of one step; it takes over the weights and the state that it is given."""

    def loss_of(params: Params, batch: Batch) -> jax.Array:
        nothing = jnp.zeros((*batch.ids_BT.shape, architecture.num_layers, architecture.top_k), jnp.int32)
        never = jnp.zeros(batch.ids_BT.shape, bool)
        logits_BTV, _ = score(rounded(params), batch.ids_BT, nothing, replay_BT=never, architecture=architecture)
        return mean_answer_loss(logits_BTV, batch)

    def step(params: Params, state: optax.OptState, batch: Batch) -> tuple[Params, optax.OptState, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def muon_and_adam(params: Params, steps: int) -> optax.GradientTransformation:
    """Muon for the matrices inside the layers and Adam for the others; rates go up, stay and go down linearly."""
    up, down = steps // 30 + 1, steps * 2 // 5

    def rate(peak: float) -> optax.Schedule:
        rising, falling = optax.linear_schedule(0.0, peak, up), optax.linear_schedule(peak, 0.0, steps - down)
        return optax.join_schedules([rising, falling], [down])

    dimensions = {name: MuonDimensionNumbers(-1, -2) if name in MUON_NAMES else None for name in params}
    rates = muon(
        rate(MUON_RATE),
        adam_learning_rate=rate(ADAM_RATE),
        adam_b2=0.98,
        muon_weight_dimension_numbers=dimensions,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), rates)
