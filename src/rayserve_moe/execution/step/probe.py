"""Token probe: columns for tokens of a step, computed by programs that run after it.

    hidden states of the step [T, D] --gather--> normed states of the probed tokens [P, D] --head--> columns

The head always runs for MAX_PROBED tokens, so that results do not depend on the shape of the step.
"""

# T tokens of a data rank   P probed tokens   D model width   L listed ids   J likeliest tokens

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from rayserve_moe.decoding.evidence import token_columns
from rayserve_moe.execution.step.function import ROW_AXES, weight_partitions
from rayserve_moe.execution.step.pack import PackedStep
from rayserve_moe.execution.step.pytrees import ModelWeights, StepConfig
from rayserve_moe.model.decoder_layers import norm_rows
from rayserve_moe.model.transformer import normed_logits, words_of
from rayserve_moe.parallel.sharding import DATA
from rayserve_moe.requests.columns import STEP_COLUMNS
from rayserve_moe.requests.fields import MAX_LISTED_IDS, MAX_TOP_LOGPROBS
from rayserve_moe.scheduling.token_probe import IS_FINITE, NO_ID, TokenProbe

MAX_PROBED = 128
"""Tokens of a run of the programs; more tokens take several runs."""
Gather = Callable[..., tuple[jax.Array, jax.Array]]
"""Compiled `gather_tokens`."""
Probe = Callable[..., dict[str, jax.Array]]
"""Compiled `probe_tokens`."""


@dataclass(frozen=True)
class ProbeRun:
    """Inputs of a run for up to MAX_PROBED tokens, and the requested columns."""

    places_P: np.ndarray
    targets_P: np.ndarray
    listed_PL: np.ndarray
    num_top: int
    columns: tuple[str, ...]

    def found(
        self, weights: ModelWeights, hidden_TD: jax.Array, *, gather: Gather, probe: Probe
    ) -> dict[str, jax.Array]:
        """Launch the programs after a step; return the columns by name, the same on every device."""
        normed_PD, finite_P = gather(weights, hidden_TD, places_P=self.places_P)
        found = {IS_FINITE: finite_P}
        if "hidden" in self.columns:
            found["hidden"] = normed_PD
        names = {*self.columns} - {"hidden"} - STEP_COLUMNS
        if not names:
            return found
        computed = probe(
            weights,
            normed_PD,
            targets_P=self.targets_P,
            listed_PL=self.listed_PL,
            num_top=np.int32(self.num_top),
        )
        return found | {name: computed[name] for name in sorted({"logprobs"} | names)}


def gather_tokens(
    weights: ModelWeights, hidden_TD: jax.Array, *, places_P: jax.Array, config: StepConfig
) -> tuple[jax.Array, jax.Array]:
    """Return the states [P, D] of tokens after the final norm, and whether each is finite, bool [P].

    `hidden_TD` are the states that a step has left, of all data ranks. `places_P` int32 are indices of tokens among
    them, -1 for none. The result is the same on every device of the mesh.
    """
    plan, whole = config.model.plan, PartitionSpec()

    @jax.named_scope("token_probe")
    def on_device(weights: ModelWeights, hidden_TD: jax.Array, places_P: jax.Array) -> tuple[jax.Array, jax.Array]:
        local_P = places_P - plan.data_rank() * len(hidden_TD)
        is_here_P1 = ((local_P >= 0) & (local_P < len(hidden_TD)))[:, None]
        scale_D = weights.params["embedding"]["final_norm_D"]
        normed_PD = norm_rows(hidden_TD[jnp.where(is_here_P1[:, 0], local_P, 0)], scale_D, config.model)
        normed_PD = jnp.where(is_here_P1, normed_PD, 0)
        if plan.data_size > 1:  # the ranks without the token add zeros
            normed_PD = jax.lax.psum(normed_PD, DATA)
        return normed_PD, jnp.isfinite(normed_PD).all(axis=1)

    return jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=(weight_partitions(config.model, config.draft), plan.partition(ROW_AXES), whole),
        out_specs=(whole, whole),
        check_vma=False,
    )(weights, hidden_TD, places_P)


def probe_tokens(
    weights: ModelWeights,
    normed_PD: jax.Array,
    *,
    targets_P: jax.Array,
    listed_PL: jax.Array,
    num_top: jax.Array,
    config: StepConfig,
) -> dict[str, jax.Array]:
    """Return the model's own columns after tokens with these normed states, the same on every device of the mesh.

    `targets_P` int32 are the following tokens, -1 for none. `listed_PL` int32 are the listed ids, -1 for none. The
    temperature is 1, without penalties or biases.

    Returns: log-probs float32 [P] and ranks int32 [P] of the targets, the `num_top` most likely tokens int32 [P, J] and
        their log-probs, and the log-probs of listed ids float32 [P, L], by name of `PROBED_COLUMNS`.
    """
    plan, whole, part = config.model.plan, PartitionSpec(), words_of(config.model)

    @jax.named_scope("token_probe")
    def on_device(weights: ModelWeights, normed_PD: jax.Array, *inputs: jax.Array) -> dict[str, jax.Array]:
        targets_P, listed_PL, num_top = inputs
        found = token_columns(
            normed_logits(weights.params, normed_PD, config=config.model, are_everywhere=True),
            jnp.ones(len(normed_PD)),
            ids_S=jnp.maximum(targets_P, 0),
            listed_SL=listed_PL,
            num_wanted=num_top,
            max_top=min(MAX_TOP_LOGPROBS, config.model.spec.vocab_size),
            part=part,
            masses=config.model.kernels.sampling.masses,
        )
        return {
            "logprobs": found.logprobs_S,
            "ranks": found.ranks_S,
            "top_ids": found.top.ids_SJ,
            "top_logprobs": found.top.logprobs_SJ,
            "listed_logprobs": found.listed_SL,
        }

    return jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=(weight_partitions(config.model, config.draft), whole, whole, whole, whole),
        out_specs=whole,
        check_vma=False,
    )(weights, normed_PD, targets_P, listed_PL, num_top)


def probe_runs(work: TokenProbe, packed: PackedStep) -> Iterator[ProbeRun]:
    """Yield the runs for the probed tokens of a plan, in their order."""
    places = packed.probed_places
    assert places is not None, "the plan has a probe"
    for first in range(0, len(places), MAX_PROBED):
        part = slice(first, first + MAX_PROBED)
        listed_PL = np.full((MAX_PROBED, MAX_LISTED_IDS), NO_ID, np.int32)
        listed_PL[: len(work.listed[part]), : work.listed.shape[1]] = work.listed[part]
        yield ProbeRun(
            _padded(places[part]), _padded(work.targets[part]), listed_PL, num_top=work.num_top, columns=work.columns
        )


def _padded(values: np.ndarray) -> np.ndarray:
    """Return int32 [MAX_PROBED] with the values, then NO_ID."""
    padded: np.ndarray[Any, np.dtype[np.int32]] = np.full(MAX_PROBED, NO_ID, np.int32)
    padded[: len(values)] = values
    return padded
