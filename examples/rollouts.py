"""The rollout side: samples from our server, with log-probs and routing, and the distributions it sampled from."""

# B rollouts, or blocks of a step   T fed tokens   V vocabulary   M MoE layers   K experts per token

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from rayserve_moe import LLM, CompletionOutput, RequestOutput, SamplingParams
from rayserve_moe.checkpoints.synthetic import Drawn, SyntheticConfig, write_checkpoint
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.execution.step.function import step_logits
from rayserve_moe.execution.step.pytrees import ModelWeights, StepShape
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.model.model_config import ForcedRouting
from rayserve_moe.model.states import PoolCounts, pool_shapes

USUAL_SCALE = 0.02
"""Deviation of weights as they are initialised. At a few times that, a random network decides as a trained one does."""
PAGE = 16
FIRST_PLAIN_ID = 3
MODEL = SyntheticConfig(
    vocab_size=512, hidden_size=128, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=8,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=32, num_experts_per_tok=4,
)  # fmt: skip


@dataclass(frozen=True)
class Rollouts:
    """Prompts of one length, each with what was sampled after it: T tokens were fed, the last one of T + 1 never was.

    Ids [B, T + 1], log-probs of the samples [B, T + 1 - prompt_len], routing rows [B, T, M, K].
    """

    token_ids: np.ndarray
    prompt_len: int
    logprobs: np.ndarray
    rows: np.ndarray

    @property
    def fed_ids(self) -> np.ndarray:
        return self.token_ids[:, :-1]

    @property
    def sampled_ids(self) -> np.ndarray:
        return self.token_ids[:, self.prompt_len :]


@dataclass(frozen=True)
class Size:
    """How much is sampled."""

    num_prompts: int = 16
    prompt_len: int = 32
    num_new_tokens: int = 96


def write_model(directory: Path, *, sharpness: float, seed: int) -> Path:
    """Write a random checkpoint whose weights, in bfloat16, are `sharpness` times as large as usual."""
    config = replace(MODEL, drawn=Drawn(USUAL_SCALE * sharpness, norm_jitter=0.2))
    return write_checkpoint(directory / f"sharp{sharpness:g}-{seed}", config, seed=seed, dtype="bfloat16")


def serve(checkpoint: Path, *, dtype: str, size: Size) -> LLM:
    """Start our engine on a checkpoint."""
    return LLM(
        str(checkpoint),
        dtype=dtype,
        enable_return_routed_experts=True,
        max_model_len=size.prompt_len + size.num_new_tokens,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        precompile_bs_paddings=[16],
        num_pages=256,
        page_size=PAGE,
    )


def sample(llm: LLM, size: Size, *, seed: int) -> Rollouts:
    """Draw rollouts at temperature 1. RuntimeError where an answer lacks routing."""
    generator = np.random.default_rng(seed)
    prompts = generator.integers(FIRST_PLAIN_ID, MODEL.vocab_size, (size.num_prompts, size.prompt_len)).tolist()
    params = [
        SamplingParams(max_tokens=size.num_new_tokens, temperature=1.0, ignore_eos=True, seed=seed + i, logprobs=0)
        for i in range(size.num_prompts)
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return Rollouts(
        token_ids=np.asarray([[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]),
        prompt_len=size.prompt_len,
        logprobs=np.asarray([_logprobs(output.outputs[0]) for output in outputs]),
        rows=np.stack([_rows(output) for output in outputs]),
    )


def _logprobs(completion: CompletionOutput) -> list[float]:
    assert completion.logprobs is not None, "log-probs were asked for"
    return [found[i].logprob for i, found in zip(completion.token_ids, completion.logprobs, strict=True)]


def _rows(output: RequestOutput) -> np.ndarray:
    (completion,) = output.outputs
    if output.prompt_routed_experts is None or completion.routed_experts is None:
        raise RuntimeError(f"routing is missing: {completion.routed_experts_info}")
    return np.concatenate([output.prompt_routed_experts, completion.routed_experts])


def served_distributions(runner: HostRunner, *, longest: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a function from token ids [T] and their rows [T, M, K] to log-probs [T, V] of the token after each.

    It runs the functions that the engine's steps consist of, with the engine's weights, dtype and page layout, over a
    whole sequence at once, under the rows that were served: all of the distribution of which an answer tells the
    sampled token's part.
    """
    config = runner.config
    num_blocks = -(-longest // PAGE)
    shape = StepShape(0, num_blocks, PAGE)
    page_table = np.tile(np.arange(1, num_blocks + 1, dtype=np.int32), (num_blocks, 1))
    # One row, whose own entry is 1, begins at the entry of zeros.
    rows_B, entries_B3 = np.zeros(num_blocks, np.int32), np.tile(np.array([[1, 0, 0]], np.int32), (num_blocks, 1))
    counts = PoolCounts(num_blocks + 1, num_entries=2, num_rows=1)
    pools = pool_shapes(config, counts, page_size=PAGE, dtype=runner.served.dtype)

    def everywhere(weights: ModelWeights, batch: TokenBatch, forced_MTK: jax.Array) -> jax.Array:
        places, empty = jnp.arange(shape.num_tokens), jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), pools)
        forced = ForcedRouting(forced_MTK)
        _, logits_TV = step_logits(weights, empty, batch=batch, sample_places_S=places, config=config, forced=forced)
        return jax.nn.log_softmax(logits_TV)

    parts = PartitionSpec()
    sharded = jax.shard_map(everywhere, mesh=config.plan.mesh, in_specs=parts, out_specs=parts, check_vma=False)
    compiled = jax.jit(sharded)

    def of(token_ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
        count = len(token_ids)
        ids, positions, slots = np.zeros((3, shape.num_tokens), np.int32)
        positions[:] = -1
        ids[:count], positions[:count] = token_ids, np.arange(count)
        slots[:count] = PAGE + np.arange(count)
        forced_MTK = np.full((rows.shape[1], shape.num_tokens, rows.shape[2]), -1, np.int16)
        forced_MTK[:, :count] = rows.swapaxes(0, 1)
        batch = TokenBatch(ids, positions, slots, page_table, num_singles=0, rows_B=rows_B, entries_B3=entries_B3)
        return np.asarray(compiled(runner.weights, batch, forced_MTK))[:count]

    return of
