"""Telling clients what came of their requests: first tokens at once, later ones grouped, ends with everything."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from rayserve_moe.engine.request_times import RequestTimes
from rayserve_moe.engine.step_cycle import Ending
from rayserve_moe.requests import ChoiceResult, FinishReason, RoutedExperts
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import Sequence, top_of

Sink = Callable[[list[ChoiceResult]], Iterable[int] | None]
"""Takes updates of one request; returns the choices whose text is complete, so that they end here, if there are any."""
StreamedRouting = Callable[[Sequence], RoutedExperts | None]
"""Gives the rows of a running sequence that its client does not have yet; None where they are not streamed."""

End = Callable[[Sequence, FinishReason], Ending]
"""Ends a sequence between steps."""

STOPPED = FinishReason("stop")
"""How a choice ends whose text is complete; which string it was is known to its sink."""
NO_ROWS = np.zeros(0, np.int64)
GROUPING_S_PER_SEQUENCE = 0.01
LONGEST_GROUPING_S = 0.13
"""A client hears of a choice at most every so many seconds: at once when alone, later with the load. With the step that
is under way it stays within 150 ms."""


def _no_routing(_: Sequence) -> None:
    return None


def _only_marked(sequence: Sequence, reason: FinishReason) -> Ending:
    sequence.finish = reason
    return Ending(sequence)


@dataclass
class _Listener:
    """A request's choices, who listens, and the choices whose end it has not been told."""

    sequences: list[Sequence]
    sink: Sink
    untold: set[int]


class OutputDispatch:
    """The requests in the engine and their listeners.

    `publish` is called after every step from the engine thread; sinks must not block. `add` may be called from any
    thread.
    """

    def __init__(
        self, table: RowTable, *, streamed_routing: StreamedRouting = _no_routing, end: End = _only_marked
    ) -> None:
        self._table, self._streamed_routing, self._end = table, streamed_routing, end
        self._listeners: dict[str, _Listener] = {}
        self.times = RequestTimes(table)

    def __len__(self) -> int:
        return len(self._listeners)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._listeners

    def add(self, sequences: list[Sequence], sink: Sink) -> None:
        """Have `sink` told about the choices of a request."""
        self._listeners[sequences[0].request.request_id] = _Listener(sequences, sink, set(range(len(sequences))))

    @property
    def request_ids(self) -> list[str]:
        """Of the requests that have not ended."""
        return list(self._listeners)

    @property
    def num_unfinished(self) -> int:
        """Choices that have not ended, as far as their clients know."""
        return sum(len(listener.untold) for listener in list(self._listeners.values()))

    def unfinished(self, request_id: str) -> list[Sequence]:
        """The choices of a request that have not ended; none for an unknown one."""
        listener = self._listeners.get(request_id)
        return [s for s in listener.sequences if s.finish is None] if listener else []

    def publish(self, rows: np.ndarray, endings: list[Ending], *, now: float) -> None:
        """Send the updates that are due: of rows that got tokens, and of choices that have ended.

        Choices whose text proves to be complete end too, before another step is planned.
        """
        updates: dict[str, list[ChoiceResult]] = {}
        self.times.note_tokens(rows, now=now)
        for row in self._due(rows, now).tolist():
            sequence = self._table.sequences[row]
            if sequence is not None:
                news = replace(_news_of(sequence), routing=self._streamed_routing(sequence))
                updates.setdefault(sequence.request.request_id, []).append(news)
        if endings:
            self.times.note_ends([(ending.sequence, _kind_of(ending.sequence)) for ending in endings], now=now)
        for ending in endings:
            updates.setdefault(ending.sequence.request.request_id, []).append(_news_of(ending.sequence, ending))
        complete = [sequence for request_id, news in updates.items() for sequence in self._send(request_id, news)]
        if complete:
            self.publish(NO_ROWS, [self._end(sequence, STOPPED) for sequence in complete], now=now)

    def end_all(self, reason: FinishReason) -> None:
        """Tell everybody what they have not heard yet, and that what they know of as unfinished ends here.

        What a sink raises passes through: call it again for those that are left.
        """
        while self._listeners:
            _, listener = self._listeners.popitem()
            untold = [listener.sequences[choice] for choice in sorted(listener.untold)]
            self.times.note_ends([(sequence, reason.kind) for sequence in untold], now=time.monotonic())
            listener.sink([replace(_news_of(sequence), finish=reason) for sequence in untold])

    def _due(self, rows: np.ndarray, now: float) -> np.ndarray:
        """Rows with a listener that has waited long enough; it has never waited before the first token."""
        table = self._table
        interval = min(LONGEST_GROUPING_S, GROUPING_S_PER_SEQUENCE * len(rows))
        due = rows[table.is_incremental[rows] & (now - table.published_at[rows] >= interval)]
        table.published_at[due] = now
        return due

    def _send(self, request_id: str, news: list[ChoiceResult]) -> list[Sequence]:
        """Send updates of one request; returns its choices whose text is complete and that have not ended."""
        listener = self._listeners[request_id]
        listener.untold.difference_update(update.choice_index for update in news if update.finish is not None)
        if not listener.untold:
            del self._listeners[request_id]
        complete = listener.sink(news) or ()
        return [sequence for i in complete if (sequence := listener.sequences[i]).finish is None]


def _kind_of(sequence: Sequence) -> str:
    assert sequence.finish is not None, "what has ended says how"
    return sequence.finish.kind


def _news_of(sequence: Sequence, ending: Ending | None = None) -> ChoiceResult:
    """What `sequence` has come to since its last update."""
    first, last = sequence.num_published, sequence.num_tokens
    sequence.num_published = last
    return ChoiceResult(
        sequence.request.request_id,
        sequence.choice_index,
        token_ids=sequence.tokens(first, last).tolist(),
        logprobs=sequence.logprobs(first, last).tolist(),
        finish=sequence.finish if ending is not None else None,
        routing=ending.routing if ending is not None else None,
        num_cached_tokens=sequence.num_cached,
        top=top_of(sequence, first, stop=last),
        prompt_scores=sequence.scoring.scores() if ending is not None and sequence.scoring is not None else None,
        weight_versions=sequence.weight_versions,
        ranks=sequence.state.ranks[first:last].tolist(),
    )
