"""A host's side of weights that are sent to a group: calls that are short or run beside the steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from rayserve_moe.checkpoints.bucket import Heads, SentPiece, WantedTensor
from rayserve_moe.checkpoints.open_shares import SharePlace, WeightShare
from rayserve_moe.execution.weights.adapters import HostAdapters
from rayserve_moe.execution.weights.staged import WeightReading
from rayserve_moe.execution.weights.tensor_staging import TensorStaging
from rayserve_moe.requests.records import WeightsRefusedError

BEGIN, WANTED, ADD, FINISH, KEEP, SHARE = "begin", "wanted", "add", "finish", "keep", "share"
MERGE, ROUNDING = "merge", "rounding"
ADD_ADAPTER, DROP_ADAPTERS = "add_adapter", "drop_adapters"


class WorkerTensors:
    """Runs the calls of `weight_sources.GroupTensors` on this host; `reading` reports the end of `add` and `finish`.

    `share` is this host's open share of the serving weights, if those were sent. A second share may wait for the swap.
    """

    def __init__(
        self,
        staging: TensorStaging,
        reading: WeightReading,
        *,
        share: WeightShare | None,
        adapters: HostAdapters | None = None,
    ) -> None:
        self._staging, self._reading, self._adapters = staging, reading, adapters
        self._share, self._next = share, cast(WeightShare | None, None)

    def answer(self, call: str, *arguments: Any) -> Any:
        """Return the result of a call by its name."""
        calls: dict[str, Callable[..., Any]] = {
            BEGIN: self._begin,
            WANTED: self._wanted,
            ADD: self._add,
            MERGE: self._merge,
            ADD_ADAPTER: self._add_adapter,
            DROP_ADAPTERS: self._drop_adapters,
            ROUNDING: lambda: self._staging.max_rounding,
            FINISH: self._finish,
            KEEP: self._keep,
            SHARE: self._place,
        }
        return calls[call](*arguments)

    def drop(self) -> None:
        """Discard the update."""
        self._staging.drop()
        self._drop_next()

    def swap(self) -> None:
        """Record that the staged weights serve now, and close the share of the previous ones."""
        self._close()
        self._share, self._next = self._next, None

    def _begin(self, expert_of_slot: np.ndarray | None) -> str:
        """Begin an update; return why it is refused, or empty."""
        self._reading.give_up()
        self._drop_next()
        try:
            self._staging.begin(expert_of_slot)
        except WeightsRefusedError as refusal:
            return str(refusal)
        return ""

    def _wanted(self, heads: Heads) -> list[WantedTensor] | str:
        """Return the parts of some tensors that belong to this host's share, or why they are refused."""
        try:
            return self._staging.wanted(heads)
        except WeightsRefusedError as refusal:
            return str(refusal)

    def _add(self, pieces: list[SentPiece]) -> None:
        self._reading.run(lambda _: self._staging.add([piece.as_typed() for piece in pieces]))

    def _merge(self, body: np.ndarray) -> None:
        self._reading.run(lambda given_up: self._staging.merge(body, given_up))

    def _add_adapter(self, key: str, body: np.ndarray) -> str:
        """Hold an adapter beside the weights; return why it is refused, or empty."""
        assert self._adapters is not None, "a server with max_loras holds adapters"
        try:
            self._adapters.add(key, body)
        except WeightsRefusedError as refusal:
            return str(refusal)
        return ""

    def _drop_adapters(self, keys: list[str]) -> None:
        assert self._adapters is not None, "a server with max_loras holds adapters"
        for key in keys:
            self._adapters.remove(key)

    def _finish(self, token: str) -> None:
        """Stage the received tensors, and share them under `token` if it is not empty."""

        def finish(given_up: threading.Event) -> None:
            self._staging.finish(given_up)
            self._next = self._staging.share(token) if token and not given_up.is_set() else None

        self._reading.run(finish)

    def _keep(self, token: str) -> None:
        """Share the serving weights in place of the open share."""

        def keep(_: threading.Event) -> None:
            self._close()
            self._share = self._staging.share(token)

        self._reading.run(keep)

    def _close(self) -> None:
        if self._share is not None:
            self._share.close()
            self._share = None

    def _place(self, token: str) -> SharePlace | None:
        """Return the location of this host's open share of a token, or None."""
        held = self._next, self._share
        return next((each.place for each in held if each is not None and each.token == token), None)

    def _drop_next(self) -> None:
        if self._next is not None:
            self._next.close()
            self._next = None
