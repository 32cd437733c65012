"""One sample of a trainer: the tokens of all its turns, what each was sampled under, and their routing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rayserve_moe.replay.encoding import routing_from
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout
from rayserve_moe.rollouts.alignment import join_turns
from rayserve_moe.rollouts.schema import Rollout


@dataclass(frozen=True)
class Trajectory:
    """A sample of T tokens, `prompt_len` of them before the first sampled one; the rest is its response.

    By token: `trained` says which the loss counts, `logprobs` are those that it was sampled with, 0 where it was not
    sampled, `versions` the weights that it was sampled under, "" where it was not. `routing` has positions 0 .. T - 2.
    """

    token_ids: np.ndarray
    prompt_len: int
    trained: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    routing: RoutedExperts
    is_truncated: bool = False

    @property
    def response(self) -> slice:
        """The tokens after the prompt: sampled ones, and those of the environment between them."""
        return slice(self.prompt_len, len(self.token_ids))


def trajectory_of(turns: Sequence[Rollout]) -> Trajectory:
    """Join the turns of a conversation, or the parts of an answer that was aborted; one rollout is one turn.

    The prompt of each turn begins with all tokens before it; what else it has is not trained on. Of a token that
    several turns have a row for, that of the first counts: it belongs to the log-prob. ValueError where a turn does not
    follow the one before, sampled nothing, or came without routing, and where there is none.
    """
    if not turns:
        raise ValueError("a trajectory has at least one turn")
    token_ids, parts = np.zeros(0, np.int32), []
    for number, turn in enumerate(turns):
        if turn.routing is None or not len(turn.output_ids):
            raise ValueError(f"turn {number} of {turn.prompt_id} sampled nothing, or came without routing")
        if not np.array_equal(turn.prompt_ids[: len(token_ids)], token_ids):
            raise ValueError(f"turn {number} of {turn.prompt_id} does not begin with the tokens before it")
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
    return Trajectory(token_ids, prompt_len, trained, logprobs, versions, join_turns(parts), is_truncated)


def trained_under(trajectory: Trajectory, versions: Collection[str]) -> Trajectory:
    """Leave tokens that were sampled under weights of other `versions`, or another one, out of the loss.

    They stay as context.
    """
    known = [versions] if isinstance(versions, str) else list(versions)
    return replace(trajectory, trained=trajectory.trained & np.isin(trajectory.versions, known))


def versions_of(trajectory: Trajectory) -> list[str]:
    """The versions that tokens were sampled under, in the order of the tokens."""
    return list(dict.fromkeys(version for version in trajectory.versions if version))


def check_batch(trajectories: Sequence[Trajectory], scores: Sequence[float] | None = None) -> None:
    """ValueError where there is no sample, or where `scores` is not one number for each."""
    if not trajectories:
        raise ValueError("a batch has at least one sample")
    if scores is not None and np.shape(scores) != (len(trajectories),):
        raise ValueError(f"there are {len(trajectories)} samples, and rewards or advantages of {np.shape(scores)}")


def hidden_rows(trajectory: Trajectory, layout: RoutingLayout, *, dtype: type[np.integer]) -> np.ndarray:
    """Rows [T - 1, hidden layers, k], zeros in layers that do not route. ValueError where a row is missing.

    The trainers that take these replay every token before the last: a filler would be replayed as a route.
    """
    routing, num_tokens = trajectory.routing, len(trajectory.token_ids)
    if routing.missing or routing.start or len(routing.rows) != num_tokens - 1:
        lacking = list(routing.missing) or "some"
        raise ValueError(f"a sample of {num_tokens} tokens lacks the rows of {lacking} positions")
    if routing.rows.shape[1:] != layout.row_shape or layout.num_experts - 1 > np.iinfo(dtype).max:
        raise ValueError(f"a sample has rows of another model, or of ids beyond {np.dtype(dtype).name}")
    rows = np.zeros((len(routing.rows), layout.num_hidden_layers, layout.top_k), dtype)
    rows[:, list(layout.layer_ids)] = routing.rows
    return rows


def placed(
    parts: Sequence[np.ndarray], firsts: Sequence[int], *, width: int, dtype: type, filler: int = 0
) -> np.ndarray:
    """Lay parts [n, ...] out as [B, width, ...], each from its first column on. ValueError where one does not fit."""
    laid = np.full((len(parts), width, *parts[0].shape[1:]), filler, dtype)
    for row, part, first in zip(laid, parts, firsts, strict=True):
        if first < 0 or first + len(part) > width:
            raise ValueError(f"a sample needs {first + len(part) if first >= 0 else len(part)} columns of {width}")
        row[first : first + len(part)] = part
    return laid
