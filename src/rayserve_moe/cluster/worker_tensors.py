"""One host's side of weights that are sent to a group: calls that are short, or run beside the steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from rayserve_moe.checkpoints.bucket import SentPiece, WantedTensor
from rayserve_moe.execution.staged_weights import WeightReading
from rayserve_moe.execution.tensor_staging import Heads, TensorStaging
from rayserve_moe.requests import WeightsRefusedError

BEGIN, WANTED, ADD, FINISH = "begin", "wanted", "add", "finish"


class WorkerTensors:
    """Runs the calls of `group_tensors.GroupTensors` on this host; `reading` says when `add` and `finish` are done."""

    def __init__(self, staging: TensorStaging, reading: WeightReading) -> None:
        self._staging, self._reading = staging, reading

    def answer(self, call: str, *arguments: Any) -> Any:
        """The result of a call by its name."""
        calls = {BEGIN: self._begin, WANTED: self._wanted, ADD: self._add, FINISH: self._finish}
        return calls[call](*arguments)

    def drop(self) -> None:
        """Forget the update."""
        self._staging.drop()

    def _begin(self, expert_of_slot: np.ndarray | None) -> str:
        """Begin an update; returns why it is refused, empty where it is not."""
        self._reading.give_up()
        try:
            self._staging.begin(expert_of_slot)
        except WeightsRefusedError as refusal:
            return str(refusal)
        return ""

    def _wanted(self, heads: Heads) -> list[WantedTensor] | str:
        """What of some tensors is in this host's share, or why they are refused."""
        try:
            return self._staging.wanted(heads)
        except WeightsRefusedError as refusal:
            return str(refusal)

    def _add(self, pieces: list[SentPiece]) -> None:
        self._reading.run(lambda _: self._staging.add([piece.as_typed() for piece in pieces]))

    def _finish(self) -> None:
        self._reading.run(self._staging.finish)
