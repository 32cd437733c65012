"""What differs in the answers of a disturbed run, also of those that cross an update of the weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from benchmarks.conditions import note
from benchmarks.kill_asking import Answer, Asked, differing
from rayserve_moe.rollouts.alignment import decode_answer


class Undisturbed(NamedTuple):
    """The answers under one version of the weights, and what they were read from."""

    found: list[Answer | str]
    asked: Asked


def compared(found: list[Answer | str], asked: Asked, expected: dict[str, Undisturbed]) -> dict[str, float]:
    """Count the differences from the undisturbed runs under each version.

    An answer with one version is compared whole, an answer that crossed an update up to there. Rows of other weights
    must be marked `recomputed`.
    """
    counts: dict[str, float] = {"lost": 0, "tokens": 0, "logprobs": 0, "rows": 0, "logprob_gap": 0.0, "crossed": 0}
    for number, ours in enumerate(found):
        choice = asked.choices.get(number, {})
        spans = choice.get("weight_versions") or [{"version": "", "end": 0}]
        undisturbed = expected.get(spans[0]["version"])
        if isinstance(ours, str) or undisturbed is None:
            note(f"request {number} is lost: {ours if isinstance(ours, str) else spans}")
            counts["lost"] += 1
            continue
        theirs = undisturbed.found[number]
        if len(spans) == 1:
            more = differing([ours], [theirs])
        else:
            more = {**_crossed(number, asked, undisturbed.asked, spans[0]), "crossed": 1}
            end = spans[0]["end"]
            more["logprobs"] = ours[1][:end] != theirs[1][:end]
        for name, value in more.items():
            counts[name] = max(counts[name], value) if name == "logprob_gap" else counts[name] + value
    return counts


def _crossed(number: int, ours: Asked, theirs: Asked, span: dict[str, Any]) -> dict[str, float]:
    """Return the differences of a request whose outputs come from these weights up to the end of this span."""
    end, version = span["end"], span["version"]
    (tokens, expected), (choice, wanted) = (
        [asked.tokens[number] for asked in (ours, theirs)],
        [asked.choices[number] for asked in (ours, theirs)],
    )
    found, reference = decode_answer(choice), decode_answer(wanted)
    num_prompt = len(found.rows) + 1 - len(tokens)
    known = num_prompt + end - 1  # rows that the outputs of this span were computed with
    source, versions = (_labels(ranges, known) for ranges in (found.source, found.weight_version))
    is_ours = versions == version
    differ = (found.rows[:known] != reference.rows[:known]).any(axis=(1, 2)) & is_ours
    unexplained = ~is_ours & (source != "recomputed")
    return {"tokens": tokens[:end] != expected[:end], "rows": bool(differ.any() or unexplained.any())}


def _labels(ranges: tuple[tuple[int, int, str], ...], count: int) -> np.ndarray:
    labels = np.full(count, "", object)
    for start, stop, label in ranges:
        labels[start:stop] = label
    return labels
