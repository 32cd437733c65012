"""A trainer's sample: the tokens of all its turns, their log-probs and weight versions, and their routing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rayserve_moe.replay.encoding import routing_from
from rayserve_moe.replay.encoding.gates import gates_of
from rayserve_moe.replay.encoding.index import index_rows_of, over_sparse_layers
from rayserve_moe.replay.encoding.ranges import missing_ranges
from rayserve_moe.requests.records import GateScale, IndexLayout, RoutedExperts, RoutingLayout
from rayserve_moe.requests.row_parts import are_known
from rayserve_moe.rollouts.alignment import join_turns
from rayserve_moe.rollouts.schema import Rollout


@dataclass(frozen=True)
class Trajectory:
    """A sample of T tokens."""

    token_ids: np.ndarray
    """int32 [T]."""
    prompt_len: int
    """Number of tokens before the first sampled token; the rest is the response."""
    trained: np.ndarray
    """bool [T]: the tokens that the loss counts."""
    logprobs: np.ndarray
    """float32 [T]: log-probs at sampling; 0 for tokens that were not sampled."""
    versions: np.ndarray
    """str [T]: weight versions at sampling; "" for tokens that were not sampled."""
    routing: RoutedExperts
    """Rows of positions 0 .. T - 2."""
    is_truncated: bool = False
    """True if the last turn ended at its length limit."""
    index_layout: IndexLayout | None = None
    """Layout of index rows; None unless every turn has them."""
    gate_scale: GateScale | None = None
    """Scale of router gates; None unless every turn has them."""

    @property
    def response(self) -> slice:
        """Return the slice after the prompt: sampled tokens, and tokens of the environment between them."""
        return slice(self.prompt_len, len(self.token_ids))


def trajectory_of(turns: Sequence[Rollout]) -> Trajectory:
    """Join the turns of a conversation, or the parts of an aborted answer. A single rollout is a single turn.

    The prompt of each turn begins with all earlier tokens; its further tokens are not trained on. If several turns have
    a row for a token, the first turn's row is used, because it belongs to the log-prob. Raises ValueError if there are
    no turns, or a turn does not continue the previous turn, sampled nothing, or came without routing, or if only some
    turns have index rows.
    """
    if not turns:
        raise ValueError("a trajectory has at least one turn")
    token_ids, parts = np.zeros(0, np.int32), []
    for number, turn in enumerate(turns):
        if turn.routing is None or not len(turn.output_ids):
            raise ValueError(f"turn {number} of {turn.prompt_id} sampled nothing, or came without routing")
        if not np.array_equal(turn.prompt_ids[: len(token_ids)], token_ids):
            raise ValueError(f"turn {number} of {turn.prompt_id} does not begin with the tokens of earlier turns")
        parts.append(routing_from(turn.routing, max(0, len(token_ids) - 1)))
        token_ids = np.concatenate([turn.prompt_ids, turn.output_ids])
    trained, logprobs = np.zeros(len(token_ids), np.bool_), np.zeros(len(token_ids), np.float32)
    versions = np.full(len(token_ids), "", object)
    for turn in turns:
        sampled = slice(len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.output_ids))
        trained[sampled], logprobs[sampled] = True, turn.logprobs
        for first, last, version in turn.logprob_versions:
            versions[first:last] = version
    versions[~trained] = ""
    is_truncated = turns[-1].finish_reason == "length"
    prompt_len = len(turns[0].prompt_ids)
    layouts = {turn.index_layout for turn in turns}
    if len(layouts) > 1:
        raise ValueError(f"turns of {turns[0].prompt_id} have index rows of different layers, or only some have any")
    scales = {turn.gate_scale for turn in turns}
    if len(scales) > 1:
        raise ValueError(f"turns of {turns[0].prompt_id} have gates of different scales, or only some have any")
    return Trajectory(
        token_ids,
        prompt_len,
        trained,
        logprobs,
        versions,
        routing=join_turns(parts),
        is_truncated=is_truncated,
        index_layout=layouts.pop(),
        gate_scale=scales.pop(),
    )


def trained_under(trajectory: Trajectory, versions: Collection[str]) -> Trajectory:
    """Exclude tokens from the loss unless they were sampled under one of the `versions` (names, or a single name).

    They stay as context.
    """
    known = [versions] if isinstance(versions, str) else list(versions)
    return replace(trajectory, trained=trajectory.trained & np.isin(trajectory.versions, known))


def versions_of(trajectory: Trajectory) -> list[str]:
    """Return the versions that tokens were sampled under, in token order."""
    return list(dict.fromkeys(version for version in trajectory.versions if version))


def check_batch(trajectories: Sequence[Trajectory], scores: Sequence[float] | None = None) -> None:
    """Raise ValueError if the batch is empty, or `scores` does not have a number per sample."""
    if not trajectories:
        raise ValueError("a batch has at least one sample")
    if scores is not None and np.shape(scores) != (len(trajectories),):
        raise ValueError(
            f"{len(trajectories)} samples need as many rewards or advantages, not shape {np.shape(scores)}"
        )


def hidden_rows(trajectory: Trajectory, layout: RoutingLayout, *, dtype: type[np.integer]) -> np.ndarray:
    """Return rows [T - 1, hidden layers, k], zeros in layers without routing. Raises ValueError if a row is missing.

    Trainers that use this replay every token before the last, so a filler row would be replayed as a route.
    """
    routing, num_tokens = trajectory.routing, len(trajectory.token_ids)
    if routing.missing or routing.start or len(routing.rows) != num_tokens - 1:
        missing = list(routing.missing) or "some"
        raise ValueError(f"a sample of {num_tokens} tokens has no rows for {missing} positions")
    if routing.rows.shape[1:] != layout.row_shape or layout.num_experts - 1 > np.iinfo(dtype).max:
        raise ValueError(f"a sample has rows of another model, or ids that do not fit {np.dtype(dtype).name}")
    rows = np.zeros((len(routing.rows), layout.num_hidden_layers, layout.top_k), dtype)
    rows[:, list(layout.layer_ids)] = routing.rows
    return rows


def index_rows(trajectory: Trajectory) -> np.ndarray:
    """Return index rows, int32 [T - 1, layers with sparse attention, top_k]: ascending positions with -1 behind.

    Layers that share an index repeat its row. Raises ValueError if a row is missing.
    """
    layout, num_tokens = trajectory.index_layout, len(trajectory.token_ids)
    if layout is None:
        raise ValueError("a sample came without index rows: set returns_index in its requests")
    rows, known = index_rows_of(trajectory.routing, layout)
    if not known.all() or len(rows) != num_tokens - 1 or trajectory.routing.start:
        missing = list(missing_ranges(known, trajectory.routing.start)) or "some"
        raise ValueError(f"a sample of {num_tokens} tokens has no index rows for {missing} positions")
    return over_sparse_layers(rows, layout)


def router_gates(trajectory: Trajectory) -> np.ndarray:
    """Return router gates, float32 [T - 1, MoE layers, k], in the order of the ids of rows.

    They were computed by `trajectory.gate_scale`. Raises ValueError if a row is missing.
    """
    num_tokens, gates = len(trajectory.token_ids), gates_of(trajectory.routing)
    if trajectory.gate_scale is None:
        raise ValueError("a sample came without gates: set returns_gates in its requests")
    is_known = are_known(gates)
    if not is_known.all() or len(gates) != num_tokens - 1 or trajectory.routing.start:
        missing = list(missing_ranges(is_known, trajectory.routing.start)) or "some"
        raise ValueError(f"a sample of {num_tokens} tokens has no gates for {missing} positions")
    return gates


def placed(
    parts: Sequence[np.ndarray], firsts: Sequence[int], *, width: int, dtype: type, filler: int = 0
) -> np.ndarray:
    """Copy parts [n, ...] into [B, width, ...], each from its first column on. Raises ValueError if a part does not
    fit.
    """
    laid = np.full((len(parts), width, *parts[0].shape[1:]), filler, dtype)
    for row, part, first in zip(laid, parts, firsts, strict=True):
        if first < 0 or first + len(part) > width:
            raise ValueError(f"a sample needs {first + len(part) if first >= 0 else len(part)} of {width} columns")
        row[first : first + len(part)] = part
    return laid
