"""Routing in answers: the rows of each choice in the dialect asked for, with the description that goes with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayserve_moe.replay.encoding import (
    DIALECTS,
    encode_nested,
    rollout_rows,
    routed_experts_info,
    routing_from,
    routing_until,
)
from rayserve_moe.replay.encoding.ranges import labels_of, presence
from rayserve_moe.requests import GenerationRequest, RoutedExperts, RoutingLayout


@dataclass(frozen=True)
class RoutingForm:
    """How rows are to be told: a name of `DIALECTS`, and the position of the first one wanted.

    `shares_prompt_rows` sends the rows of a prompt with one of its choices only, where the dialect can say so.
    """

    dialect: str
    start: int = 0
    shares_prompt_rows: bool = False


class RoutingWriter:
    """Writes the routing fields of the choices of one HTTP request, whole or in pieces.

    `raw_rows` gathers what the binary dialect sends beside the fields, in the order of the choices written.
    """

    def __init__(
        self, layout: RoutingLayout, form: RoutingForm, *, request_of_choice: Sequence[GenerationRequest]
    ) -> None:
        self.form = form
        self.raw_rows: list[np.ndarray] = []
        self._layout = layout
        self._request_of_choice = request_of_choice
        self._choice_with_prompt: dict[str, int] = {}
        self._prompt_rows: dict[str, RoutedExperts] = {}

    def is_due(self, choice: int, routing: RoutedExperts | None, *, has_ended: bool) -> bool:
        """Whether there is anything to write: at the end always, before it when rows have come."""
        if not self._request_of_choice[choice].return_routed_experts:
            return False
        return has_ended or (routing is not None and len(routing_from(routing, self.form.start).rows) > 0)

    def first_position(self, routing: RoutedExperts | None) -> int:
        """Return the position of the first row that is told of a piece."""
        return self.form.start if routing is None else max(self.form.start, routing.start)

    def fields(self, choice: int, routing: RoutedExperts | None) -> dict:
        """Return `routed_experts` with `routed_experts_info`; both None where nothing is known.

        The nested dialect adds `prompt_routed_experts`, with the choice that brings the prompt's rows. The binary one
        leaves `routed_experts` out: its rows join `raw_rows`.
        """
        if self.form.dialect == "binary":
            return self._describe_raw(choice, routing)
        if routing is None:
            return {"routed_experts": None, "routed_experts_info": None}
        wanted = routing_from(routing, self.form.start)
        if self.form.dialect == "nested":
            values = self._nested(choice, wanted)
        else:
            values = {"routed_experts": DIALECTS[self.form.dialect].encode(wanted, self._layout)}
        return {**values, "routed_experts_info": routed_experts_info(wanted, self._layout)}

    def _nested(self, choice: int, routing: RoutedExperts) -> dict:
        prompt_len = len(self._request_of_choice[choice].prompt_ids)
        prompt, generated = encode_nested(routing, self._layout, prompt_len=prompt_len)
        if routing.start < prompt_len and not self._brings_prompt(choice, routing):
            return {"routed_experts": generated}
        return {"prompt_routed_experts": prompt, "routed_experts": generated}

    def _describe_raw(self, choice: int, routing: RoutedExperts | None) -> dict:
        if routing is None:
            self.raw_rows.append(np.zeros((0, *self._layout.row_shape), self._layout.dtype))
            return {"routed_experts_info": None}
        wanted = routing_from(routing, self.form.start)
        if not self._brings_prompt(choice, wanted) and self._agrees_on_prompt(choice, wanted):
            wanted = routing_from(wanted, len(self._request_of_choice[choice].prompt_ids))
        self.raw_rows.append(rollout_rows(wanted, self._layout))
        return {"routed_experts_info": routed_experts_info(wanted, self._layout)}

    def _brings_prompt(self, choice: int, routing: RoutedExperts) -> bool:
        """Whether the prompt's rows go with this choice: with every one, or with the first that has them all."""
        request = self._request_of_choice[choice]
        if not self.form.shares_prompt_rows or request.sampling.n == 1:
            return True
        is_whole = not routing.missing and routing.start + len(routing.rows) >= len(request.prompt_ids)
        if is_whole and request.request_id not in self._choice_with_prompt:
            self._choice_with_prompt[request.request_id] = choice
            self._prompt_rows[request.request_id] = routing_until(routing, len(request.prompt_ids))
        return self._choice_with_prompt.get(request.request_id, choice) == choice

    def _agrees_on_prompt(self, choice: int, routing: RoutedExperts) -> bool:
        """Whether what is known of this choice's prompt rows is in those sent already: weights may have changed."""
        request = self._request_of_choice[choice]
        sent, own = self._prompt_rows[request.request_id], routing_until(routing, len(request.prompt_ids))
        if len(own.rows) != len(sent.rows):
            return False
        is_known = presence(own)
        ours, theirs = (labels_of(each.weight_version, own.start, count=len(own.rows)) for each in (own, sent))
        return bool(
            is_known.any()
            and (ours == theirs)[is_known].all()
            and np.array_equal(own.rows[is_known], sent.rows[is_known])
        )
