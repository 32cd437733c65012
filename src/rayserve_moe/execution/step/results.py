"""Conversion of a step's outputs on the devices into its result, in the order of its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from rayserve_moe.balancing.migration import FailedFetch
from rayserve_moe.decoding.masks import WORD_BITS
from rayserve_moe.execution.step.pack import PackedStep
from rayserve_moe.execution.step.pytrees import StepOutput
from rayserve_moe.model.transformer import AuditOutput
from rayserve_moe.replay.index_rows import packed_index
from rayserve_moe.requests.columns import AUDIT_COLUMNS, Columns, Ragged, ragged
from rayserve_moe.requests.records import GATES, INDEX
from rayserve_moe.scheduling.step_plan import StepPlan, StepResult
from rayserve_moe.scheduling.token_probe import IS_FINITE


def wanted_outputs(plan: StepPlan) -> frozenset[str]:
    """Return the names of the StepOutput fields and columns that a plan wants on the host."""
    wanted = {
        "sampled_N3S": True,
        "topk_ids_MTK": plan.wants_routing,
        "chosen_ITK": plan.wants_routing,
        "gates_MTK": plan.wants_routing,
        "layer_states_LTD": plan.probe is not None and "layer_states" in plan.probe.columns,
        "audit": plan.probe is not None and not AUDIT_COLUMNS.isdisjoint(plan.probe.columns),
        "top": "top_ids" in plan.columns,
        "expert_counts_ME": plan.wants_expert_counts,
        "tally_N4": True,
    }
    return frozenset(name for name, is_wanted in wanted.items() if is_wanted)


def only_wanted(output: StepOutput, wanted: frozenset[str]) -> StepOutput:
    """Return the output without the arrays that are not wanted."""
    columns = {name: values for name, values in output.columns.items() if name in wanted}
    return replace(output, columns=columns, **dict.fromkeys(vars(output).keys() - wanted - {"columns"}))


def start_copies(output: StepOutput, *, is_needed: bool) -> StepOutput:
    """Start copying all arrays to the host, if they are not in host memory already; return the output."""
    for array in jax.tree.leaves(output) if is_needed else ():
        array.copy_to_host_async()
    return output


def step_result(
    output: StepOutput, *, packed: PackedStep, pack_s: float, device_s: float, failed_fetch: FailedFetch | None
) -> StepResult:
    """Wait for the copies and return their values in the plan's order."""
    sampled = np.asarray(output.sampled_N3S).transpose(1, 0, 2).reshape(3, -1)
    ids, logprob_bits, ranks = sampled[:, packed.sample_places]
    parts: Columns = {}
    if output.chosen_ITK is not None:
        packed_rows = packed_index(_by_token(output.chosen_ITK, packed.token_places))
        parts[INDEX] = ragged((np.frombuffer(row, np.uint8) for row in packed_rows), np.uint8)
    if output.gates_MTK is not None:
        parts[GATES] = _by_token(output.gates_MTK, packed.token_places)
    return StepResult(
        packed.step_id,
        ids,
        logprob_bits.view(np.float32),
        ranks,
        None if output.topk_ids_MTK is None else _by_token(output.topk_ids_MTK, packed.token_places),
        parts,
        pack_s,
        device_s,
        columns=_columns(output.columns, packed.sample_places),
        probed=_probed(output, places=packed.probed_places),
        expert_counts=None if output.expert_counts_ME is None else np.asarray(output.expert_counts_ME),
        tally=None if output.tally_N4 is None else np.asarray(output.tally_N4).sum(axis=0, dtype=np.int64),
        failed_fetch=failed_fetch,
    )


def _by_token(values_LTK: jax.Array, places: np.ndarray) -> np.ndarray:
    """Return values by layer and token as rows [N, L, K] of the tokens at `places`."""
    return np.ascontiguousarray(np.asarray(values_LTK)[:, places].transpose(1, 0, 2))


def _columns(found: Mapping[str, Any], places: np.ndarray) -> Columns:
    """Return the columns of samples at `places` among the samples of all data ranks."""
    columns: Columns = {}
    for name, values in found.items():
        if name == "top":
            columns |= _top(values, places)
        elif name == "mask":
            columns |= mask_columns(*values, places=places)
        else:
            columns[name] = np.asarray(values)[places]
    return columns


def mask_columns(bits_AW: jax.Array, logprobs_A: jax.Array, *, places: np.ndarray) -> Columns:
    """Return the ids of set bits; only numbers with any are unpacked, which are few of a large vocabulary."""
    bits_NW = np.asarray(bits_AW)[places]
    rows, words = np.nonzero(bits_NW)
    is_kept = np.unpackbits(bits_NW[rows, words].view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    found, bits = np.nonzero(is_kept)
    counts = np.bincount(rows[found], minlength=len(bits_NW)).astype(np.int32)
    ids = (WORD_BITS * words[found] + bits).astype(np.int32)
    return {"mask_ids": Ragged(counts, ids), "mask_logprobs": np.asarray(logprobs_A)[places]}


def _top(top_N2PJ: jax.Array, places: np.ndarray) -> Columns:
    of_ranks = np.asarray(top_N2PJ)
    ids, bits = of_ranks.transpose(1, 0, 2, 3).reshape(2, -1, of_ranks.shape[-1])[:, places]
    return {"top_ids": ids, "top_logprobs": np.ascontiguousarray(bits).view(np.float32)}


def _probed(output: StepOutput, *, places: np.ndarray | None) -> Columns:
    """Join the runs of a probe of the tokens at `places`; a token without a finite log-prob is not finite."""
    if not output.probed or places is None:
        return {}
    runs: Sequence[Mapping[str, jax.Array]] = output.probed
    columns = {name: np.concatenate([np.asarray(run[name]) for run in runs])[: len(places)] for name in runs[0]}
    if output.audit is not None:
        columns |= _audited(output.audit, places)
    if output.layer_states_LTD is not None:
        columns["layer_states"] = _by_token(output.layer_states_LTD, places).astype(np.float32)
    if "hidden" in columns:
        columns["hidden"] = columns["hidden"].astype(np.float32)
    if "logprobs" in columns:
        columns[IS_FINITE] = columns[IS_FINITE] & np.isfinite(columns["logprobs"])
    return dict(columns)


def _audited(audit: AuditOutput, places: np.ndarray) -> dict[str, np.ndarray]:
    """Return the columns of an audit for the tokens at `places` among the tokens of all data ranks."""
    arrays = {
        "native_experts": audit.native.ids_TK,
        "expert_margins": audit.native.margin_T,
        "expert_ranks": audit.native.rank_T,
        "sketches": audit.sketches_LTP,
    }
    return {name: np.asarray(values)[:, places].swapaxes(0, 1) for name, values in arrays.items()}
