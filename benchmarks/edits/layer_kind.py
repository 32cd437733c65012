"""A new kind of layer with a state of its own: the mean of a sequence's last tokens, beside attention in one model."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from benchmarks.edits.scratch import Edit, Insertion
from rayserve_moe import Engine
from rayserve_moe.checkpoints.synthetic import Drawn, SyntheticModel, write_checkpoint

EDIT = Edit(
    new_files={
        "model/layers/running_mean.py": '''"""Toy: the mean of a sequence's last normed states, times a matrix."""

# T tokens   B blocks   D model width   L layers of the kind   W tokens of a mean

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.kernels.kv_pool import read_wide, write_rows
from rayserve_moe.kernels.operations import Kernels
from rayserve_moe.model.layers.kinds import LayerInputs, Mixer
from rayserve_moe.model.model_config import ModelConfig, Pools
from rayserve_moe.model.param_spec import TRANSPOSED, ParamSpec
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.state.kinds import ArraySpec, StateKind

KIND = "running_mean"


@dataclass(frozen=True)
class RunningMean:
    """The mean of a number of tokens of some width."""

    kind: ClassVar[str] = KIND
    has_windows: ClassVar[bool] = False

    num_tokens: int
    width: int

    def unsupported_reason(self) -> str:
        """Return nothing: all sizes fit."""
        return ""

    def divided_sizes(self, tensor_size: int) -> dict[str, int]:
        """Return nothing: every device computes all."""
        return {}

    def summed_widths(self, tensor_size: int) -> dict[str, int]:
        """Return nothing besides the width of the model."""
        return {}

    def score_shape(self) -> None:
        """Return None: no keys are scored."""


def parameters(own: RunningMean, spec: ModelSpec, *, dtype: str, tensor_size: int) -> dict[str, ParamSpec]:
    """Return the matrix."""
    layers, shape, axes = spec.layers_with_mixer(KIND), (own.width, own.width), ("layers", "model", "model")
    return {"out_LDD": ParamSpec((len(layers), *shape), dtype, axes, "mean_out", layers, file=TRANSPOSED)}


def states(own: RunningMean, *, kernels: Kernels, tensor_size: int) -> tuple[StateKind, ...]:
    """Return the row of a token: its normed hidden state."""
    return (StateKind(KIND, "token", (ArraySpec((own.width,), (None,)),)),)


def prepare(own: RunningMean, batch: TokenBatch, pools: Pools, *, config: ModelConfig) -> Any:
    """Return the positions [T, W] that each token takes the mean of, and the block [T] that it belongs to."""
    positions_TW = batch.positions_T[:, None] - jnp.arange(own.num_tokens)
    block_tokens = (len(batch.positions_T) - batch.num_singles) // max(1, batch.num_prefill_blocks)
    blocks_T = batch.num_singles + jnp.repeat(jnp.arange(batch.num_prefill_blocks), block_tokens)
    return positions_TW, jnp.concatenate([jnp.arange(batch.num_singles), blocks_T])


def apply(own: RunningMean, rows: tuple[jax.Array, Pools], inputs: LayerInputs) -> tuple[jax.Array, Pools]:
    """Keep the rows of a step's tokens, and take the mean of the last ones of each."""
    (normed_TD, pools), (weights, step, layer, _) = rows, inputs
    positions_TW, blocks_T = step.prepared[KIND]
    (pool,) = pools[KIND]
    batch, first_page, _ = step.batch.of_layer(layer, pool, len(weights["out_LDD"]))
    pool = write_rows(pool, normed_TD, batch.kv_slots_T + first_page * pool.shape[1])
    is_there_TW, places_TW = positions_TW >= 0, jnp.maximum(positions_TW, 0)
    pages_TW = batch.page_table_BP[blocks_T[:, None], places_TW // pool.shape[1]] + first_page
    rows_TWD = read_wide(pool[pages_TW, places_TW % pool.shape[1]])
    sums_TD = jnp.sum(jnp.where(is_there_TW[..., None], rows_TWD, 0), axis=1)
    means_TD = sums_TD / jnp.maximum(jnp.sum(is_there_TW, axis=1, keepdims=True), 1)
    out_TD = jnp.matmul(means_TD, weights["out_LDD"][layer], preferred_element_type=jnp.float32)
    return out_TD.astype(normed_TD.dtype), {**pools, KIND: (pool,)}


MIXER = Mixer(parameters, states, None, prepare, apply)
''',
        "model/families/toy_hybrid.py": '''"""Toy: Mixtral with running means for attention in two of three layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import heads_of, outline_of
from rayserve_moe.model.config_rope import rope_of
from rayserve_moe.model.config_values import integer_of, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.layers.running_mean import RunningMean
from rayserve_moe.model.spec import ExpertSpec, LayerSpec, ModelSpec, RouterSpec
from rayserve_moe.model.tensor_names import ATTENTION, BLOCK_SPARSE_EXPERTS, DECODER

ARCHITECTURE = "ToyHybridForCausalLM"

CHECKPOINT_RULES = DECODER | ATTENTION | BLOCK_SPARSE_EXPERTS | {"mean_out": "model.layers.{layer}.mean.out.weight"}
PERIOD = ("running_mean", "running_mean", "gqa")
MEAN_TOKENS = 5


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json`; UnsupportedModelError names the key and the value that this family does not compute."""
    refuse_other_values(config, "toy_hybrid", hidden_act=("silu",), sliding_window=(None,))
    outline = outline_of(config, norm_eps=1e-5, max_positions=131072)
    num_layers = integer_of(config, "num_hidden_layers")
    return ModelSpec(
        family="toy_hybrid",
        **outline,
        layers=tuple(LayerSpec(PERIOD[layer % len(PERIOD)], "moe") for layer in range(num_layers)),
        dense_intermediate_size=0,
        mixers=(
            GroupedAttention(**heads_of(config), rope=rope_of(config, "toy_hybrid")),
            RunningMean(MEAN_TOKENS, outline["hidden_size"]),
        ),
        router=RouterSpec(
            num_experts=integer_of(config, "num_local_experts"),
            top_k=integer_of(config, "num_experts_per_tok"),
            renormalize=True,
        ),
        experts=ExpertSpec(integer_of(config, "intermediate_size")),
    )
''',
    },
    listings={
        "model/families/__init__.py": (
            Insertion(
                "from rayserve_moe.model.families import qwen3_moe as qwen3_moe\n",
                "from rayserve_moe.model.families import toy_hybrid as toy_hybrid\n",
            ),
        ),
        "model/layers/table.py": (
            Insertion(
                "from rayserve_moe.model.layers.kinds import Ffn, Mixer\n",
                "from rayserve_moe.model.layers import running_mean\n",
            ),
            Insertion('    "mla": latent.MIXER,\n', '    "running_mean": running_mean.MIXER,\n'),
        ),
    },
)
CONFIG: dict[str, Any] = {
    "architectures": ["ToyHybridForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
MEAN_TOKENS = 5
SETTINGS: dict[str, Any] = {
    "max_running_requests": 4,
    "max_step_tokens": 32,
    "precompile_bs_paddings": [4],
    "max_model_len": 128,
    "page_size": 4,
    "num_pages": 128,
}
PROMPTS = {"short": 7, "chunked": 75, "cached": 90}
"""Number of tokens by name: the second prompt is computed in chunks, the third one begins with the second."""


def observe() -> dict[str, Any]:
    """Return the log-probs of outputs as `served`, and by a `reference` of the same tokens, by prompt."""
    with TemporaryDirectory() as folder:
        model = SyntheticModel(CONFIG, drawn=Drawn(scale=0.2))
        path = write_checkpoint(Path(folder) / "model", model, dtype="float32")
        (file,) = path.glob("*.safetensors")
        tensors, found = load_file(file), {}
        with Engine(str(path), **SETTINGS) as engine:
            for name, count in PROMPTS.items():
                prompt = [3 + (7 * i * i + 5 * i) % 250 for i in range(count)]
                options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
                answer = engine.generate(input_ids=prompt, return_logprob=True, **options)
                assert isinstance(answer, dict), "one prompt has one answer"
                outputs = answer["meta_info"]["output_token_logprobs"]
                tokens = [*prompt, *(token_id for _, token_id, _ in outputs)]
                found[name] = {
                    "served": [logprob for logprob, _, _ in outputs],
                    "reference": log_probs(tensors, np.array(tokens))[count - 1 :].tolist(),
                    "cached": answer["meta_info"]["cached_tokens"],
                }
        return found


def log_probs(tensors: dict[str, np.ndarray], ids_T: np.ndarray) -> np.ndarray:
    """Return the log-prob of each token after the first one, in float64: the definition of the model."""
    tensors = {name: array.astype(np.float64) for name, array in tensors.items()}
    hidden_TD = tensors["model.embed_tokens.weight"][ids_T]
    for layer in range(CONFIG["num_hidden_layers"]):
        own = {name.split(f"layers.{layer}.")[1]: a for name, a in tensors.items() if f"layers.{layer}." in name}
        normed_TD = _normed(hidden_TD, own["input_layernorm.weight"])
        hidden_TD = hidden_TD + (_attended(normed_TD, own) if layer % 3 == 2 else _averaged(normed_TD, own))
        hidden_TD = hidden_TD + _by_experts(_normed(hidden_TD, own["post_attention_layernorm.weight"]), own)
    logits_TV = _normed(hidden_TD, tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T
    largest_T1 = logits_TV.max(axis=1, keepdims=True)
    logprobs_TV = logits_TV - largest_T1 - np.log(np.exp(logits_TV - largest_T1).sum(axis=1, keepdims=True))
    return logprobs_TV[np.arange(len(ids_T) - 1), ids_T[1:]]


def _normed(rows_TD: np.ndarray, scale_D: np.ndarray) -> np.ndarray:
    return rows_TD / np.sqrt((rows_TD**2).mean(axis=-1, keepdims=True) + CONFIG["rms_norm_eps"]) * scale_D


def _averaged(normed_TD: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    ends = range(1, len(normed_TD) + 1)
    means_TD = [normed_TD[max(0, end - MEAN_TOKENS) : end].mean(axis=0) for end in ends]
    return np.array(means_TD) @ weights["mean.out.weight"].T


def _attended(normed_TD: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    num_tokens, width = len(normed_TD), CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    queries, keys, values = (
        (normed_TD @ weights[f"self_attn.{name}_proj.weight"].T).reshape(num_tokens, -1, width) for name in "qkv"
    )
    angles = np.arange(num_tokens)[:, None] * CONFIG["rope_theta"] ** (-np.arange(0, width, 2) / width)
    turns = np.exp(1j * angles)[:, None]

    def turned(heads: np.ndarray) -> np.ndarray:
        pairs = (heads[..., : width // 2] + 1j * heads[..., width // 2 :]) * turns
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    group = CONFIG["num_attention_heads"] // CONFIG["num_key_value_heads"]
    keys, values = np.repeat(turned(keys), group, axis=1), np.repeat(values, group, axis=1)
    scores = np.einsum("thd,shd->hts", turned(queries), keys) * width**-0.5
    shares = np.where(np.tri(num_tokens, dtype=bool), np.exp(scores), 0)
    attended = np.einsum("hts,shd->thd", shares / shares.sum(axis=-1, keepdims=True), values)
    return attended.reshape(num_tokens, -1) @ weights["self_attn.o_proj.weight"].T


def _by_experts(normed_TD: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    logits_TE = normed_TD @ weights["block_sparse_moe.gate.weight"].T
    ids_TK = np.argsort(-logits_TE, axis=1)[:, : CONFIG["num_experts_per_tok"]]
    shares_TK = np.exp(np.take_along_axis(logits_TE, ids_TK, axis=1))
    shares_TK /= shares_TK.sum(axis=1, keepdims=True)
    out_TD = np.zeros_like(normed_TD)
    for token, (ids_K, shares_K) in enumerate(zip(ids_TK, shares_TK, strict=True)):
        for expert, share in zip(ids_K, shares_K, strict=True):
            gate, down, up = (weights[f"block_sparse_moe.experts.{expert}.w{number}.weight"] for number in (1, 2, 3))
            inner = normed_TD[token] @ gate.T
            out_TD[token] += share * (inner / (1 + np.exp(-inner)) * (normed_TD[token] @ up.T)) @ down.T
    return out_TD
