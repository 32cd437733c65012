"""What an answer says of weights, held against what each of two checkpoints computes on its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rayserve_moe.requests.records import RoutedExperts, RoutingLayout
from rayserve_moe.rollouts.alignment import decode_answer
from tests.support.engine.outputs import LOGPROB_TOLERANCE
from tests.support.routing.router_reference import RouterReference, Tally

Answer = Mapping[str, Any]


@dataclass(frozen=True)
class Labelled:
    """Outputs with their log-probs, ranges of positions with the version of each, and routing from position 0 on."""

    ids: list[int]
    logprobs: list[float]
    ranges: list[tuple[int, int, str]]
    routing: RoutedExperts | None


class VersionedReference:
    """Log-probs and routing of checkpoints of one model, by the versions that name them."""

    def __init__(
        self,
        references: Mapping[Path, RouterReference],
        layout: RoutingLayout,
        *,
        tolerance: float = LOGPROB_TOLERANCE,
    ) -> None:
        self._references, self._layout, self._tolerance = references, layout, tolerance
        self.path_of: dict[str, Path] = {}
        self.pure_from: set[str] = set()
        self.tally = Tally()
        self.num_ranges = self.num_mixed = 0

    def note(self, version: str, path: Path, *, is_recomputed: bool) -> None:
        """Name the checkpoint of a version; `is_recomputed`: nothing went on from keys and values of the last one."""
        self.path_of[version] = path
        self.pure_from.discard(version)
        if is_recomputed:
            self.pure_from.add(version)

    def check(self, prompt: list[int], answer: Answer) -> None:
        """Assert that log-probs and rows are those of the versions that the answer names.

        What goes on from keys and values of other weights is nobody's: there only the labels are compared.
        """
        meta = answer["meta_info"]
        ranges = [tuple(labelled) for labelled in meta["logprob_weight_versions"]]
        assert not ranges or meta["weight_version"] == ranges[-1][2]
        routing = decode_answer(answer, self._layout) if meta.get("routed_experts") is not None else None
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        self.check_outputs(prompt, Labelled(answer["output_ids"], logprobs, ranges, routing))

    def check_outputs(self, prompt: list[int], told: Labelled) -> None:
        """Do as `check`, of what an answer is made of."""
        token_ids = [*prompt, *told.ids]
        check_ranges(told.ranges, len(prompt), end=len(token_ids))
        pure = [labelled for i, labelled in enumerate(told.ranges) if i == 0 or labelled[2] in self.pure_from]
        self.num_ranges += len(pure)
        self.num_mixed += len(told.ranges) - len(pure)
        for first, last, version in pure:
            wanted = self.of(version).logprobs(token_ids)[first - 1 : last - 1]
            actual = told.logprobs[first - len(prompt) : last - len(prompt)]
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=self._tolerance)
        if told.routing is not None:
            self._check_rows(token_ids, len(prompt), told, {version for *_, version in pure})

    def of(self, version: str) -> RouterReference:
        """The model under the weights of a version."""
        return self._references[self.path_of[version]]

    def _check_rows(self, token_ids: list[int], num_prompt_tokens: int, told: Labelled, pure: set[str]) -> None:
        """A row of an output's token belongs to the log-prob that was found with it, that of the token after it."""
        routing = told.routing
        assert routing is not None, "there are no rows"
        token_version = {p: version for first, last, version in told.ranges for p in range(first, last)}
        row_version = {p: version for first, last, version in routing.weight_version for p in range(first, last)}
        for position in range(num_prompt_tokens, len(token_ids) - 1):
            is_right = row_version.get(position) in (token_version[position + 1], None)
            assert is_right, f"row {position} is not of its log-prob's weights: {told.ranges}, {routing}"
        for version in set(row_version.values()):
            wanted = [
                p for p, of in row_version.items() if of == version and (p < num_prompt_tokens or version in pure)
            ]
            known = replace(routing, missing=_all_but(wanted, len(routing.rows)))
            self.of(version).check(token_ids, known, self.tally)


def check_ranges(ranges: list[tuple[int, int, str]], first: int, *, end: int) -> None:
    """Assert that ranges cover all positions from `first` to `end`, without a gap, neighbours of different labels."""
    if first == end:
        assert not ranges
        return
    assert ranges[0][0] == first and ranges[-1][1] == end and all(a < b for a, b, _ in ranges)
    assert all(left[1] == right[0] and left[2] != right[2] for left, right in pairwise(ranges))


def _all_but(wanted: list[int], count: int) -> tuple[tuple[int, int], ...]:
    return tuple((p, p + 1) for p in range(count) if p not in set(wanted))
