"""Routing and index rows in answers: the rows of each choice in the requested dialect, with their description."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rayserve_moe.answers.native import gate_fields, index_fields
from rayserve_moe.replay.encoding import (
    DIALECTS,
    encode_nested,
    rollout_rows,
    routed_experts_info,
    routing_from,
    routing_until,
)
from rayserve_moe.replay.encoding.gates import gates_of
from rayserve_moe.replay.encoding.ranges import labels_of, presence
from rayserve_moe.requests.records import GenerationRequest, ModelCard, RoutedExperts
from rayserve_moe.requests.results import ChoiceResult


class RoutingWriter:
    """Writer of the rows of an HTTP request's choices: routing in a dialect, a name of `DIALECTS` or `binary`, with
    gates, and index rows in a form of `replay.encoding.index`.

    `shares_prompt_rows` sends the rows of a prompt with a single choice, if the dialect supports that. `raw_rows`
    collects the binary dialect's rows, in the order of the written choices.
    """

    def __init__(
        self,
        card: ModelCard,
        dialect: str,
        *,
        request_of_choice: Sequence[GenerationRequest],
        index_form: str = "sglang",
        shares_prompt_rows: bool = False,
    ) -> None:
        self.dialect = dialect
        self.raw_rows: list[np.ndarray] = []
        self._arrays: dict[int, dict[str, np.ndarray]] = {}
        self._card, self._layout, self._shares_prompt_rows = card, card.routing, shares_prompt_rows
        self._index_form = index_form
        self._request_of_choice = request_of_choice
        self._choice_with_prompt: dict[str, int] = {}
        self._prompt_rows: dict[str, RoutedExperts] = {}

    @property
    def arrays(self) -> list[dict[str, np.ndarray]]:
        """Return the other arrays of each choice in the binary dialect."""
        return [self._arrays.get(choice, {}) for choice in range(len(self._request_of_choice))]

    def arrays_of(self, choice: int) -> dict[str, np.ndarray] | None:
        """Return the other arrays of a choice, to which its writers add; None except in the binary dialect."""
        return self._arrays.setdefault(choice, {}) if self.dialect == "binary" else None

    def fields(self, choice: int, delta: ChoiceResult) -> dict:
        """Return `routed_experts` with `routed_experts_info`, both None if no row is known.

        The result is empty unless routing is requested, and for an unfinished choice without new rows. The nested
        dialect adds `prompt_routed_experts` to the choice that holds the prompt's rows. The binary dialect appends its
        rows to `raw_rows` instead of `routed_experts`.
        """
        request, routing = self._request_of_choice[choice], delta.routing
        if not request.return_routed_experts:
            return {}
        wanted = None if routing is None else routing_from(routing, request.routed_experts_start)
        if delta.finish is None and (wanted is None or not len(wanted.rows)):
            return {}
        if self.dialect == "binary":
            return self._describe_raw(choice, wanted)
        if wanted is None:
            return {"routed_experts": None, "routed_experts_info": None, **gate_fields(request, None, card=self._card)}
        if self.dialect == "nested":
            values = self._nested(choice, wanted)
        else:
            values = {"routed_experts": DIALECTS[self.dialect].encode(wanted, self._layout)}
        gates = gate_fields(request, wanted, card=self._card)
        return {**values, "routed_experts_info": routed_experts_info(wanted, self._layout), **gates}

    def sglang_fields(self, choice: int, delta: ChoiceResult) -> dict:
        """Return the fields of routing and of index rows as in `meta_info`, with the position of the first row."""
        fields, first = self.fields(choice, delta), self._request_of_choice[choice].routed_experts_start
        if delta.routing is not None:
            first = max(first, delta.routing.start)
        position = {"routed_experts_start_len": first} if fields else {}
        return {**fields, **position, **self.index_fields(choice, delta)}

    def index_fields(self, choice: int, delta: ChoiceResult) -> dict:
        """Return `indexer_topk` with its description; empty unless index rows are requested."""
        request = self._request_of_choice[choice]
        return index_fields(request, delta, layout=self._card.index, form=self._index_form)

    def _nested(self, choice: int, routing: RoutedExperts) -> dict:
        prompt_len = len(self._request_of_choice[choice].prompt_ids)
        prompt, generated = encode_nested(routing, self._layout, prompt_len=prompt_len)
        if routing.start < prompt_len and not self._holds_prompt(choice, routing):
            return {"routed_experts": generated}
        return {"prompt_routed_experts": prompt, "routed_experts": generated}

    def _describe_raw(self, choice: int, routing: RoutedExperts | None) -> dict:
        request = self._request_of_choice[choice]
        if routing is None:
            self.raw_rows.append(np.zeros((0, *self._layout.row_shape), self._layout.dtype))
            return {"routed_experts_info": None, **gate_fields(request, None, card=self._card)}
        if not self._holds_prompt(choice, routing) and self._agrees_on_prompt(choice, routing):
            routing = routing_from(routing, len(request.prompt_ids))
        self.raw_rows.append(rollout_rows(routing, self._layout))
        gates = gate_fields(request, routing, card=self._card, arrays=self.arrays_of(choice))
        return {"routed_experts_info": routed_experts_info(routing, self._layout), **gates}

    def _holds_prompt(self, choice: int, routing: RoutedExperts) -> bool:
        """Return True if this choice holds the prompt's rows: every choice, or the first that has all of them."""
        request = self._request_of_choice[choice]
        if not self._shares_prompt_rows or request.sampling.n == 1:
            return True
        is_whole = not routing.missing and routing.start + len(routing.rows) >= len(request.prompt_ids)
        if is_whole and request.request_id not in self._choice_with_prompt:
            self._choice_with_prompt[request.request_id] = choice
            self._prompt_rows[request.request_id] = routing_until(routing, len(request.prompt_ids))
        return self._choice_with_prompt.get(request.request_id, choice) == choice

    def _agrees_on_prompt(self, choice: int, routing: RoutedExperts) -> bool:
        """Return True if this choice's known prompt rows equal the sent rows; weights may have changed in between."""
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
            and np.array_equal(gates_of(own)[is_known], gates_of(sent)[is_known], equal_nan=True)
        )
