"""From episodes to what a step trains on: ids, rows to replay, log-probs, versions and masks, padded to one shape."""

# B samples   T fed and sampled tokens   L layers   K experts per token

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rayserve_moe.rollouts import Rollout
from rayserve_moe.rollouts.adapters.trajectory import placed, trajectory_of
from rayserve_moe.rollouts.alignment import Sample, to_trainer_layout

UNVERSIONED = ""


@dataclass(frozen=True)
class Batch:
    """Samples of one step. Column t of `sampled_BS`, `mask_BS` and `versions_BS` is about the token at t + 1.

    The mask has sampled tokens: of an episode of several turns, not those that the environment has put between them.

    `rows_BTLK` are ids to replay where `replay_BT` is set, zeros elsewhere. `versions_BS` are what each token was
    sampled under, `row_versions_BT` what each row was chosen under, "" where there is none.
    """

    ids_BT: np.ndarray
    rows_BTLK: np.ndarray
    replay_BT: np.ndarray
    prompt_BT: np.ndarray
    sampled_BS: np.ndarray
    mask_BS: np.ndarray
    versions_BS: np.ndarray
    row_versions_BT: np.ndarray

    @property
    def versions(self) -> set[str]:
        """The versions that tokens were sampled under."""
        return set(self.versions_BS[self.mask_BS].tolist())

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return int(self.mask_BS.sum())


def batch_of(episodes: Sequence[Sequence[Rollout]], *, width: int) -> Batch:
    """Pad episodes, of one turn or several, to `width` tokens. ValueError where one is longer, came without routing, or
    lacks rows."""
    joined = [trajectory_of(turns) for turns in episodes]
    layout = episodes[0][0].layout
    assert layout is not None, "rollouts with routing have its layout"
    samples = [Sample(each.token_ids.tolist(), each.prompt_len, each.routing) for each in joined]
    laid = to_trainer_layout(samples, layout, convention="slime", seq_len=width, hidden_layers=False)
    firsts = [0] * len(joined)

    def by_token(name: str, dtype: type) -> np.ndarray:
        return placed([getattr(each, name) for each in joined], firsts, width=width, dtype=dtype)

    versions_BT = np.where(trained_BT := by_token("trained", np.bool_), by_token("versions", object), UNVERSIONED)
    rows_BTLK = np.where(laid.replay_mask[..., None, None], laid.routed_experts, 0).astype(np.int32)
    return Batch(
        by_token("token_ids", np.int32),
        rows_BTLK,
        laid.replay_mask,
        laid.prompt_mask,
        sampled_BS=by_token("logprobs", np.float32)[:, 1:],
        mask_BS=trained_BT[:, 1:],
        versions_BS=versions_BT[:, 1:],
        row_versions_BT=_labels(trained_BT.shape, [sample.routing.weight_version for sample in samples]),
    )


def _labels(shape: tuple[int, ...], ranges: Iterable[Iterable[tuple[int, int, str]]]) -> np.ndarray:
    """Labels by position [B, T] of each sample's ranges `(first, last, label)`."""
    labels_BT = np.full(shape, UNVERSIONED, object)
    for labels_T, of_sample in zip(labels_BT, ranges, strict=True):
        for first, last, label in of_sample:
            labels_T[first:last] = label
    return labels_BT


def replayed_as(batch: Batch, version: str) -> Batch:
    """The batch for the weights of one version: rows that others chose are left to the routers.

    Where weights change inside a sample and it is computed anew, the tokens after the change had rows of the new
    weights before them, which nobody kept; what the routers of these weights choose there is the same.
    """
    return replace(batch, replay_BT=batch.replay_BT & (batch.row_versions_BT == version))


def newest_only(batch: Batch, versions: Sequence[str]) -> Batch:
    """Leave out of the loss what a sample has of versions before its newest one; `versions` are oldest first.

    One forward pass can have the rows of one version only.
    """
    rank_BS = np.full(batch.versions_BS.shape, -1)
    rank_BT = np.full(batch.row_versions_BT.shape, -1)
    for rank, version in enumerate(versions):
        rank_BS[(batch.versions_BS == version) & batch.mask_BS] = rank
        rank_BT[batch.row_versions_BT == version] = rank
    newest_B = rank_BS.max(axis=1, initial=-1)[:, None]
    return replace(
        batch, mask_BS=batch.mask_BS & (rank_BS == newest_B), replay_BT=batch.replay_BT & (rank_BT == newest_B)
    )
