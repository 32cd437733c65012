"""Balanced expert selection as it is defined: one pick after the other, in numpy and plain loops."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Selected(NamedTuple):
    """Slots and experts [B, K] (-1: none), weights [B, K], and the share of picks that were kept."""

    slots: np.ndarray
    weights: np.ndarray
    kept_share: np.float32
    experts: np.ndarray


def oracle_capacity(factor: float, num_valid: int, *, k: int, num_slots: int) -> int:
    with np.errstate(over="ignore"):
        product = np.float32(factor) * np.float32(num_valid) * np.float32(k)
    quotient = np.floor(product / np.float32(num_slots))
    return max(1, int(min(quotient, np.float32(2**30))))


def ranked(scores: np.ndarray) -> list[np.ndarray]:
    """Experts of every token that are within reach, best first, ties by the smaller id."""
    order = np.argsort(-scores, axis=1, kind="stable")
    with np.errstate(invalid="ignore"):
        counts = (scores > -np.inf).sum(axis=1)
    return [row[:count] for row, count in zip(order, counts, strict=True)]


def oracle_slots(
    rankings: list[np.ndarray], tables: list[np.ndarray], *, k: int, num_slots: int, capacity: int
) -> tuple[np.ndarray, np.ndarray]:
    """The loop itself: slots and experts [B, K], for the table [E, M] of every token."""
    taken, pointer = np.zeros(num_slots, np.int32), np.zeros(len(rankings), np.int32)
    slots = np.full((len(rankings), k), -1, np.int32)
    experts = slots.copy()
    for rank in range(k):
        for token, ranking in enumerate(rankings):
            while slots[token, rank] < 0 and pointer[token] < len(ranking):
                expert = ranking[pointer[token]]
                pointer[token] += 1
                for slot in tables[token][expert]:
                    if slot >= 0 and taken[slot] < capacity:
                        taken[slot] += 1
                        slots[token, rank], experts[token, rank] = slot, expert
                        break
    return slots, experts


def balanced_oracle(
    scores: np.ndarray,
    table: np.ndarray,
    factor: float,
    *,
    k: int,
    num_slots: int,
    gate_scores: np.ndarray | None = None,
    valid: np.ndarray | None = None,
    capacity: int | None = None,
    renormalize: bool = False,
    scale: float = 1.0,
    device_index: np.ndarray | int | None = None,
) -> Selected:
    """What `balanced_expert_selection` has to return, bit for bit."""
    num_tokens = len(scores)
    valid = np.ones(num_tokens, bool) if valid is None else valid
    num_valid = int(valid.sum())
    if capacity is None:
        capacity = oracle_capacity(factor, num_valid, k=k, num_slots=num_slots)
    rankings = [ranking if is_valid else ranking[:0] for ranking, is_valid in zip(ranked(scores), valid, strict=True)]
    by_device = list(table) if table.ndim == 3 else [table]
    devices = np.broadcast_to(0 if device_index is None else device_index, (num_tokens,))
    tables = [by_device[device] for device in devices]
    slots, experts = oracle_slots(rankings, tables, k=k, num_slots=num_slots, capacity=capacity)
    gates = (scores if gate_scores is None else gate_scores).astype(np.float32)
    weights = np.where(experts >= 0, np.take_along_axis(gates, np.maximum(experts, 0), axis=1), np.float32(0))
    if renormalize:
        total = weights[:, 0].copy()
        for rank in range(1, k):
            total += weights[:, rank]
        weights = weights * (np.float32(1) / np.where(total == 0, np.float32(1), total))[:, None]
    if scale != 1.0:
        weights = weights * np.float32(scale)
    kept = sum(
        len(set(row[row >= 0].tolist()) & set(best[:k].tolist())) for row, best in zip(experts, rankings, strict=True)
    )
    share = np.float32(kept) / np.float32(num_valid * k) if num_valid else np.float32(1)
    return Selected(slots, weights, share, experts)
