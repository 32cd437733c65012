"""The forward pass of a draft model on one device, inside the sharded step."""

# T tokens   D model width   S rows   V vocabulary (local share)   W rows of all data ranks

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.model.decoder_layers import LayerPlace, apply_layer, first_carry, norm_rows, step_inputs
from rayserve_moe.model.draft_spec import DraftSpec
from rayserve_moe.model.layers.kinds import FfnRows, LayerInputs
from rayserve_moe.model.layers.table import FFNS, MIXERS
from rayserve_moe.model.model_config import ModelConfig, Parameters, Pools, StepInputs
from rayserve_moe.model.transformer import ForwardOutput, embedded, normed_logits, words_of
from rayserve_moe.model.vocabulary import local_logits
from rayserve_moe.parallel.vocabulary_part import VocabularyPart

FIRST = np.int32(0)
"""Index of the only layer."""
Rows = tuple[jax.Array, Pools]
"""Rows of tokens [T, D], and the pools."""


@dataclass(frozen=True)
class DraftConfig:
    """Draft model on the mesh of its target."""

    draft: DraftSpec
    layer: ModelConfig
    """Configuration of the draft's layer."""
    target: ModelConfig
    """Configuration of the target."""

    @property
    def words(self) -> VocabularyPart:
        """Return the vocab shard of a device, for the draft's own head or the target's."""
        return words_of(self.layer if self.draft.has_head else self.target)


def target_features(target: Parameters, draft: Parameters, out: ForwardOutput, *, config: DraftConfig) -> jax.Array:
    """Return the target's features of its tokens, [T, D]; `out.entering` holds the inputs of `aux_layers`."""
    if config.draft.aux_layers:
        return _product(jnp.concatenate(out.entering, axis=1), draft["draft"])
    return norm_rows(out.hidden_TD, target["embedding"]["final_norm_D"], config.target)


@jax.named_scope("draft_layer")
def draft_features(
    weights: tuple[Parameters, Parameters],
    pools: Pools,
    batch: TokenBatch,
    features_TD: jax.Array,
    *,
    config: DraftConfig,
) -> Rows:
    """Return the draft's features [T, D] and its pools; `weights` belong to the target and the draft.

    Each token of `batch` follows the position at which it is placed; `features_TD` belong to these positions.
    """
    target, params = weights
    model, own = config.layer, params["draft"]
    inputs = step_inputs(batch, pools, model)
    embedded_TD = embedded(target, batch.token_ids_T, config=config.target).astype(features_TD.dtype)
    if config.draft.algorithm == "NEXTN":
        joined = [
            norm_rows(rows_TD, own[name], model)
            for rows_TD, name in ((embedded_TD, "embedding_norm_D"), (features_TD, "hidden_norm_D"))
        ]
        hidden_TD = _product(jnp.concatenate(joined, axis=1), own)
        carry = first_carry(hidden_TD, pools, batch, config=model)
        (kind,), first = model.spec.layers, jnp.asarray(FIRST)
        place = LayerPlace(*[first] * 4)
        carry, _ = apply_layer(params, carry, kind.kind, place=place, inputs=inputs, config=model)
        hidden_TD, pools = carry.hidden_TD + carry.added_TD, carry.pools
    elif config.draft.algorithm == "EAGLE3":
        hidden_TD, pools = _eagle3(params, (features_TD, pools), embedded_TD, inputs=inputs, config=config)
    else:
        hidden_TD = _product(jnp.concatenate([embedded_TD, features_TD], axis=1), own)
        hidden_TD, pools = _unnormed_layer(params, (hidden_TD, pools), inputs=inputs, config=model)
    if config.draft.recycles_normed and "norm_D" in own:
        hidden_TD = norm_rows(hidden_TD, own["norm_D"], model)
    return hidden_TD, pools


@jax.named_scope("draft_head")
def draft_logits(weights: tuple[Parameters, Parameters], features_SD: jax.Array, *, config: DraftConfig) -> jax.Array:
    """Return logits of the tokens after the next: float32 [W, V] over all data ranks, for the shard `config.words`."""
    target, params = weights
    own = params["draft"]
    if "norm_D" in own and not config.draft.recycles_normed:
        features_SD = norm_rows(features_SD, own["norm_D"], config.layer)
    if not config.draft.has_head:
        return normed_logits(target, features_SD, config=config.target)
    head = partial(config.layer.kernels.head.logits, head_VD=own["head_VD"])
    return local_logits(features_SD, head, part=config.words, plan=config.layer.plan)


def _product(joined_TA: jax.Array, own: dict[str, jax.Array]) -> jax.Array:
    out_TD = jnp.matmul(joined_TA, own["fc_AD"], preferred_element_type=jnp.float32)
    out_TD = out_TD + own["fc_bias_D"].astype(jnp.float32) if "fc_bias_D" in own else out_TD
    return out_TD.astype(joined_TA.dtype)


def _eagle3(params: Parameters, rows: Rows, embedded_TD: jax.Array, *, inputs: StepInputs, config: DraftConfig) -> Rows:
    (features_TD, pools), model, (mixer,) = rows, config.layer, config.layer.spec.mixers
    normed_TD = norm_rows(features_TD, params["draft"]["hidden_norm_D"], model)
    stream_TD = normed_TD if config.draft.norms_residual else features_TD
    embedded_TD = norm_rows(embedded_TD, params[mixer.kind]["norm_LD"][FIRST], model)
    joined = jnp.concatenate([embedded_TD, normed_TD], axis=1), pools
    out_TD, pools = _mixed(params, joined, inputs=inputs, config=model)
    return _after_mixer(params, (stream_TD + out_TD[:, : stream_TD.shape[1]], pools), inputs=inputs, config=model)


def _unnormed_layer(params: Parameters, rows: Rows, *, inputs: StepInputs, config: ModelConfig) -> Rows:
    """Compute a layer without a norm before its mixer (EAGLE)."""
    out_TD, pools = _mixed(params, rows, inputs=inputs, config=config)
    return _after_mixer(params, (rows[0] + out_TD, pools), inputs=inputs, config=config)


def _mixed(params: Parameters, rows: Rows, *, inputs: StepInputs, config: ModelConfig) -> Rows:
    """Return the output of the only layer's mixer, and the pools."""
    (own,) = config.spec.mixers
    return MIXERS[own.kind].apply(own, rows, LayerInputs(params[own.kind], inputs, jnp.asarray(FIRST), config))


def _after_mixer(params: Parameters, rows: Rows, *, inputs: StepInputs, config: ModelConfig) -> Rows:
    (hidden_TD, pools), (layer,) = rows, config.spec.layers
    normed_TD = norm_rows(hidden_TD, params["mlp_norm"]["scale"][FIRST], config)
    ffn_rows, first = FfnRows(hidden_TD, normed_TD), jnp.asarray(FIRST)
    out_TD, _ = FFNS[layer.ffn].apply(params, ffn_rows, inputs, kind=layer, layer=first, config=config)
    return hidden_TD + out_TD, pools
