"""What may follow a sequence: the tokens that followed the same words elsewhere. Pure functions over token arrays."""

from __future__ import annotations

import numpy as np

NO_DRAFTS = np.zeros(0, np.int32)
MOST_PLACES = 64
"""Of an end, that are looked at for different continuations."""


def continuations(
    token_ids: np.ndarray, text: np.ndarray, *, count: int, shortest: int, longest: int, width: int = 1
) -> list[np.ndarray]:
    """Return up to `count` tokens that followed in `text` where the end of `token_ids` stood there; all int32 [N].

    The longest end that is found counts, of `longest` tokens at most and `shortest` at least; of several places the
    last ones that as many tokens follow, else the last: of `width` different continuations. `text` may be `token_ids`
    itself: then the end is not found at the end, and what runs into it continues with what it drafted, as in a loop.
    """
    places, matched = _places_of_end(token_ids, text, longest=longest)
    if not len(places) or matched < shortest:
        return []
    has_enough = places + count < len(text)
    found: dict[bytes, np.ndarray] = {}
    for place in [*places[has_enough][::-1], *places[~has_enough][::-1]][:MOST_PLACES]:
        following = text[place + 1 : place + 1 + count]
        if text is token_ids and len(following):
            following = np.resize(text[place + 1 :], count)
        found.setdefault(following.tobytes(), following)
        if len(found) == width:
            break
    return list(found.values())


def _places_of_end(token_ids: np.ndarray, text: np.ndarray, *, longest: int) -> tuple[np.ndarray, int]:
    """Where in `text`, all but its last token, the longest end of `token_ids` that it has ends, and its length."""
    places, matched = np.flatnonzero(text[:-1] == token_ids[-1]), 1
    if not len(places):
        return places, 0
    while matched < min(longest, len(token_ids)):
        longer = places[places >= matched]
        longer = longer[text[longer - matched] == token_ids[-1 - matched]]
        if not len(longer):
            break
        places, matched = longer, matched + 1
    return places, matched
