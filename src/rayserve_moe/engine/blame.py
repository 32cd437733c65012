"""Finding the sequence whose steps raise errors, whichever hosts compute them."""

from __future__ import annotations

from collections.abc import Sequence as Several

from rayserve_moe.scheduling.sequence import Sequence

TOKENS_IN_FLIGHT = 2
"""A step fails at most so many tokens after the last that is known of a sequence in it."""


class Blame:
    """Follows errors of steps. A sequence is suspected once two steps with it raised one and it got no token between.

    One suspect is the culprit. Several are tried by halves: while there is a `trial`, its sequences alone may run, and
    they are cleared once each has got further than the error lies. A lost host blames no sequence.
    """

    def __init__(self) -> None:
        self.trial: list[Sequence] = []
        self._rest: list[Sequence] = []
        self._tokens_at_error: dict[Sequence, int] = {}

    def note_error(self, computed: Several[Sequence]) -> Sequence | None:
        """Note that a step that `computed` these raised an error; returns the one to blame, once it is known."""
        suspects = [each for each in computed if self._tokens_at_error.get(each) == each.num_tokens]
        self._tokens_at_error = {each: each.num_tokens for each in computed}
        self._try(suspects if len(suspects) > 1 else [])
        return suspects[0] if len(suspects) == 1 else None

    @property
    def is_cleared(self) -> bool:
        """Whether every sequence of the trial has ended, or got further than the error."""
        return all(
            each.finish is not None or each.num_tokens >= self._tokens_at_error[each] + TOKENS_IN_FLIGHT
            for each in self.trial
        )

    def move_on(self) -> None:
        """After a trial that was cleared: try what is left of the suspects, or none where nothing is."""
        rest = [each for each in self._rest if each.finish is None]
        self._try(rest)

    def _try(self, suspects: list[Sequence]) -> None:
        half = (len(suspects) + 1) // 2
        self.trial, self._rest = suspects[:half], suspects[half:]
