"""Output dispatch to clients: first tokens at once, later tokens grouped, and a final update per choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np

from rayserve_moe.engine.cycle import NO_ROWS
from rayserve_moe.observability.metrics import RequestMetrics
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import RoutedExperts
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import Sequence, prompt_columns

Sink = Callable[[list[ChoiceResult]], Iterable[int] | None]
"""Takes updates of a request; returns the indices of choices that a stop string has completed, so that they end."""
StreamedRouting = Callable[[Sequence], RoutedExperts | None]
"""Returns the routing rows of a running sequence that its client does not have yet; None if they are not streamed."""
End = Callable[[Sequence, FinishReason], object]
"""Ends a sequence between steps."""

STOPPED = FinishReason("stop")
"""Finish reason of a choice that a stop string has completed; the text layer knows the string."""
GROUPING_S_PER_SEQUENCE = 0.01
MAX_GROUPING_S = 0.13
"""Minimum seconds between two updates of a choice: GROUPING_S_PER_SEQUENCE per updated sequence, up to this.

Together with the step in flight, an update arrives within 150 ms.
"""


def no_routing(_: Sequence) -> None:
    """Return no rows: the `StreamedRouting` of a server that does not capture routing."""


def _only_marked(sequence: Sequence, reason: FinishReason) -> None:
    sequence.finish = reason


class OutputDispatch:
    """Live requests and their sinks; `metrics` measures them at dispatch.

    `publish` is called after every step in the engine thread; sinks must not block. `add` may be called from any
    thread.
    """

    def __init__(
        self, table: RowTable, *, streamed_routing: StreamedRouting = no_routing, end: End = _only_marked
    ) -> None:
        self._table, self._streamed_routing, self._end = table, streamed_routing, end
        # By request id: choices, sink, and indices of choices whose end is not dispatched yet.
        self._requests: dict[str, tuple[list[Sequence], Sink, set[int]]] = {}
        self.metrics = RequestMetrics()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, sequences: list[Sequence], sink: Sink) -> None:
        """Register the choices of a request, whose updates go to `sink`."""
        unfinished = {index for index, sequence in enumerate(sequences) if sequence.finish is None}
        self._requests[sequences[0].request.request_id] = (sequences, sink, unfinished)

    @property
    def request_ids(self) -> list[str]:
        """Return the ids of the live requests."""
        return list(self._requests)

    @property
    def adapters(self) -> set[str]:
        """Return the adapters of the live requests."""
        return {sequences[0].request.adapter for sequences, _, _ in list(self._requests.values())} - {""}

    @property
    def num_unfinished(self) -> int:
        """Return the number of choices whose end is not dispatched yet."""
        return sum(len(unfinished) for _, _, unfinished in list(self._requests.values()))

    def unfinished(self, request_id: str) -> list[Sequence]:
        """Return the unfinished choices of a request; none for an unknown id."""
        sequences, _, _ = self._requests.get(request_id, ([], None, None))
        return [sequence for sequence in sequences if sequence.finish is None]

    def publish(self, rows: np.ndarray, ended: list[Sequence], *, now: float) -> None:
        """Send the due updates of `rows` that got a token, and the final updates of `ended` choices.

        Choices that a stop string completes end too, before the next step is planned.
        """
        updates: dict[str, list[ChoiceResult]] = {}
        record_tokens(self.metrics, self._table, rows=rows, now=now)
        for row in self._due(rows, now).tolist():
            sequence = self._table.sequences[row]
            if sequence is not None:
                routing = self._streamed_routing(sequence)
                updates.setdefault(sequence.request.request_id, []).append(_update_of(sequence, routing))
        for sequence in ended:
            assert sequence.finish is not None, "an ended sequence has a finish reason"
            record_end(self.metrics, sequence, kind=sequence.finish.kind, now=now)
            updates.setdefault(sequence.request.request_id, []).append(_last_update_of(sequence))
        complete = [sequence for request_id, news in updates.items() for sequence in self._send(request_id, news)]
        for sequence in complete:
            self._end(sequence, STOPPED)
        if complete:
            self.publish(NO_ROWS, complete, now=now)

    def end_all(self, reason: FinishReason) -> None:
        """Send every client its remaining tokens and log-probs, and end its unfinished choices with `reason`.

        Routing rows are not sent: after a failure of the engine none is known to be right.
        An exception of a sink propagates; call again for the remaining requests.
        """
        while self._requests:
            _, (sequences, sink, choices) = self._requests.popitem()
            unfinished = [sequences[choice] for choice in sorted(choices)]
            updates = [_update_of(sequence, None) for sequence in unfinished]
            for sequence, update in zip(unfinished, updates, strict=True):
                record_end(self.metrics, sequence, kind=reason.kind, now=time.monotonic())
                update.finish = reason
            sink(updates)

    def _due(self, rows: np.ndarray, now: float) -> np.ndarray:
        """Return the rows whose clients want updates and have waited long enough; the first token is due at once."""
        wants, published_at = self._table.wants, self._table.times.published_at
        rows = _each_once(rows)
        interval = min(MAX_GROUPING_S, GROUPING_S_PER_SEQUENCE * len(rows))
        due = rows[wants.is_incremental[rows] & (now - published_at[rows] >= interval)]
        published_at[due] = now
        return due

    def _send(self, request_id: str, updates: list[ChoiceResult]) -> list[Sequence]:
        """Send updates of a request; return its unfinished choices that a stop string has completed."""
        sequences, sink, unfinished = self._requests[request_id]
        unfinished.difference_update(update.choice_index for update in updates if update.finish is not None)
        if not unfinished:
            del self._requests[request_id]
        complete = sink(updates) or ()
        return [sequence for i in complete if (sequence := sequences[i]).finish is None]


def _each_once(rows: np.ndarray) -> np.ndarray:
    """Return the rows in order, without consecutive repeats."""
    return rows[np.append(True, rows[1:] != rows[:-1])] if len(rows) else rows


def _update_of(sequence: Sequence, routing: RoutedExperts | None) -> ChoiceResult:
    """Return the tokens that a sequence has generated since its last update."""
    state, evidence, num_prompt = sequence.state, sequence.evidence, sequence.num_prompt_tokens
    first, last = sequence.published.num_tokens, sequence.num_tokens
    sequence.published.num_tokens = last
    return ChoiceResult(
        sequence.request.request_id,
        sequence.choice_index,
        token_ids=state.token_ids[first:last].tolist(),
        logprobs=state.logprobs[first:last].tolist(),
        routing=routing,
        num_cached_tokens=sequence.cache.num_cached,
        weight_versions=evidence.weight_versions,
        ranks=state.ranks[first:last].tolist(),
        drafts=evidence.drafts,
        columns=evidence.columns.slice(first - num_prompt, last - num_prompt) if evidence.columns.bits else {},
    )


def _last_update_of(sequence: Sequence) -> ChoiceResult:
    update = _update_of(sequence, sequence.routing.final)
    update.finish = sequence.finish
    update.prompt = None if sequence.evidence.probe is None else prompt_columns(sequence)
    return update


def record_tokens(metrics: RequestMetrics, table: RowTable, *, rows: np.ndarray, now: float) -> None:
    """Record a new token of each of `rows` in the metrics; `now` is of the monotonic clock.

    A row that is repeated got several tokens, which share the time since its last token.
    """
    if not len(rows):
        return
    times = table.times
    gaps = (now - times.token_at[rows]) / np.bincount(rows)[rows]
    times.token_at[rows] = now
    max_gap = gaps.max()
    if gaps.min() == max_gap:  # no first tokens, whose gap is NaN, and all rows got a token in the previous step
        metrics.inter_token.add(float(max_gap), len(gaps))
        return
    is_first = np.isnan(gaps)
    metrics.time_to_first_token.add_all(now - times.accepted_at[rows[is_first]])
    for row in rows[is_first].tolist():
        if (sequence := table.sequences[row]) is not None:
            sequence.times.first_token_at = now
    metrics.inter_token.add_all(gaps[~is_first])


def record_end(metrics: RequestMetrics, sequence: Sequence, *, kind: str, now: float) -> None:
    """Record the end of a choice in the metrics, with the `kind` of its finish reason."""
    times = sequence.times
    times.ended_at = now
    metrics.finished[kind] += 1
    metrics.end_to_end.add(now - times.accepted_at)
    metrics.output_tokens.add(sequence.num_outputs)
    if times.started_at is not None:
        metrics.queue_time.add(times.started_at - times.accepted_at)
    if sequence.choice_index == 0:
        metrics.prompt_tokens.add(sequence.num_prompt_tokens)
        metrics.num_prompt_tokens += sequence.num_prompt_tokens
        metrics.num_cached_tokens += sequence.cache.num_cached
