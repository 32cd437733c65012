"""Consistency checks between routing and token ids, without the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rayserve_moe.replay.encoding.description import checksum
from rayserve_moe.replay.encoding.ranges import labels_of, missing_ranges, presence
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout

_EVIDENCE_BITS = 64
"""Equally likely selections that coincide with a probability below 2 to the minus this are a finding."""

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Finding:
    """A contradiction between routing and tokens."""

    kind: str
    message: str
    positions: Ranges = ()
    """Affected positions, as ranges `[from, to)`."""


def check_routing(
    token_ids: Sequence[int],
    routing: RoutedExperts,
    *,
    layout: RoutingLayout,
    prompt_len: int | None = None,
    description: Mapping | None = None,
    weight_version: str | None = None,
) -> list[Finding]:
    """Return contradictions between `routing` and `token_ids` (prompt and response); an empty list if they agree.

    Rows from `prompt_len` on belong to sampled tokens; `prompt_len == len(token_ids)` means that nothing was sampled.
    `description` is the answer's `routed_experts_info`. `weight_version` is the expected version of all rows.
    """
    rows = routing.rows
    if rows.shape[1:] != layout.row_shape:
        return [Finding("shape", f"rows have shape {rows.shape[1:]}, the model's have {layout.row_shape}")]
    findings = list(_counts(len(token_ids), routing, prompt_len))
    findings += _provenance(routing, prompt_len, weight_version)
    if description is not None and description.get("crc32") not in (None, checksum(rows.astype(layout.dtype))):
        findings.append(Finding("checksum", "the rows do not match the crc32 that was sent with them"))
    present = presence(routing)
    findings += _ids(rows, present, routing.start, layout)
    findings += _repetitions(np.asarray(token_ids), routing, present, layout)
    return findings


def _counts(num_tokens: int, routing: RoutedExperts, prompt_len: int | None) -> Iterator[Finding]:
    end, wanted = routing.start + len(routing.rows), num_tokens - (prompt_len != num_tokens)
    if end != wanted:
        kind = "surplus" if end > wanted else "missing"
        message = f"rows end at position {end}, but {num_tokens} tokens need rows up to position {wanted}"
        yield Finding(
            "row_count", f"{abs(end - wanted)} rows {kind}: {message}", ((min(end, wanted), max(end, wanted)),)
        )
    if routing.missing:
        yield Finding("missing", "rows are reported missing", routing.missing)


def _provenance(routing: RoutedExperts, prompt_len: int | None, weight_version: str | None) -> Iterator[Finding]:
    start, count = routing.start, len(routing.rows)
    present = presence(routing)
    for name, ranges in (("source", routing.source), ("weight_version", routing.weight_version)):
        labels = labels_of(ranges, start, count=count)
        unlabelled = (labels == "") & present
        if ranges and unlabelled.any():
            yield Finding(name, f"rows have no {name}", missing_ranges(~unlabelled, start))
        if name == "source" and prompt_len is not None:
            again = (labels == "recomputed") & (np.arange(start, start + count) >= prompt_len)
            if again.any():
                message = "rows of sampled tokens were recomputed: they do not belong to the log-probs"
                yield Finding("recomputed", message, missing_ranges(~again, start))
        if name == "weight_version" and weight_version is not None:
            other = (labels != "") & (labels != weight_version)
            if other.any():
                yield Finding(name, "rows were computed under other weights", missing_ranges(~other, start))


def _ids(rows: np.ndarray, present: np.ndarray, start: int, layout: RoutingLayout) -> Iterator[Finding]:
    """Yield findings for ids that no router selects: out of range, duplicates, or zeros without capture."""
    outside = present & ((rows < 0) | (rows >= layout.num_experts)).any(axis=(1, 2))
    if outside.any():
        yield Finding("id_range", f"ids lie outside [0, {layout.num_experts})", missing_ranges(~outside, start))
    ordered = np.sort(rows, axis=-1)
    twice = present & (ordered[..., 1:] == ordered[..., :-1]).any(axis=(1, 2))
    if twice.any():
        yield Finding("duplicate_ids", "a token has one expert twice", missing_ranges(~twice, start))
    num_present = int(np.count_nonzero(present))
    bits_of_zero = math.log2(layout.num_experts) if layout.top_k == 1 else _EVIDENCE_BITS
    zero_layers = ~rows[present].any(axis=(0, 2))
    if zero_layers.any() and num_present * bits_of_zero >= _EVIDENCE_BITS:
        layers = [layout.layer_ids[i] for i in np.flatnonzero(zero_layers)]
        yield Finding("zero_layer", f"layers {layers} have only zeros", ((start, start + len(rows)),))
    zero_rows = present & ~rows.any(axis=(1, 2))
    if np.count_nonzero(zero_rows) * bits_of_zero * len(layout.layer_ids) >= _EVIDENCE_BITS:
        yield Finding("zero_rows", "rows have only zeros", missing_ranges(~zero_rows, start))
    if num_present * len(layout.layer_ids) * layout.top_k >= max(_EVIDENCE_BITS, 8 * layout.num_experts) and (
        0 < layout.num_experts // 2 > rows[present].max(initial=0) > 0
    ):
        message = "no expert of the upper half is ever selected: ids may be those of one rank"
        yield Finding("narrow_ids", message, ((start, start + len(rows)),))


def _repetitions(
    token_ids: np.ndarray, routing: RoutedExperts, present: np.ndarray, layout: RoutingLayout
) -> Iterator[Finding]:
    """Yield findings for runs of identical rows under different tokens that are too long for a coincidence."""
    start, rows = routing.start, routing.rows
    tokens = token_ids[start : start + len(rows)]
    if len(tokens) < 2 or layout.num_experts == 1:
        return
    same = (rows[1 : len(tokens)] == rows[: len(tokens) - 1]).all(axis=(1, 2)) & present[1 : len(tokens)]
    same &= present[: len(tokens) - 1] & (tokens[1:] != tokens[:-1])
    bits = len(layout.layer_ids) * math.log2(math.comb(layout.num_experts, layout.top_k))
    runs = [(a, b) for a, b in missing_ranges(~same, start) if b - a >= 2 and (b - a) * bits >= _EVIDENCE_BITS]
    if runs:
        yield Finding("constant_rows", "different tokens have the same row", tuple((a, b + 1) for a, b in runs))


def check_shared_prefixes(samples: Sequence[tuple[Sequence[int], RoutedExperts]]) -> list[Finding]:
    """Return findings for samples that share leading tokens and weights but have different rows for them.

    A row depends only on the tokens up to its own. On a server that computes in bfloat16, rows that were computed twice
    may differ at near ties; rows shared by the samples of a prompt never differ.
    """
    findings = []
    for number, sample in enumerate(samples[1:], 1):
        differs, start = _differing_rows(samples[0], sample)
        if differs.any():
            message = f"sample {number} has other rows than sample 0 for the same tokens"
            findings.append(Finding("shared_prefix", message, missing_ranges(~differs, start)))
    return findings


def _differing_rows(
    one: tuple[Sequence[int], RoutedExperts], other: tuple[Sequence[int], RoutedExperts]
) -> tuple[np.ndarray, int]:
    """Return flags of rows that differ, and the position of the first flag."""
    num_shared = min(len(one[0]), len(other[0]))
    unequal = np.asarray(one[0][:num_shared]) != np.asarray(other[0][:num_shared])
    num_shared = int(np.argmax(unequal)) if unequal.any() else num_shared
    start = max(one[1].start, other[1].start)
    end = max(start, min(num_shared, *(each.start + len(each.rows) for _, each in (one, other))))
    cuts = [(each, slice(start - each.start, end - each.start)) for _, each in (one, other)]
    rows = [each.rows[cut] for each, cut in cuts]
    present = np.logical_and(*(presence(each)[cut] for each, cut in cuts))
    versions = [labels_of(each.weight_version, each.start, count=len(each.rows))[cut] for each, cut in cuts]
    return present & (versions[0] == versions[1]) & (rows[0] != rows[1]).any(axis=(1, 2)), start
