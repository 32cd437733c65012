"""State kinds: the state that layers keep of a sequence, as data.

Memory, sharding, allocation and page sizes follow from the kinds that a model's layers declare.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class ArraySpec:
    """Shape, logical axes and dtype of an array of a state."""

    shape: tuple[int, ...]
    """Shape over the whole mesh, without the dimensions of layers, pages and tokens."""
    axes: tuple[str | None, ...]
    """Logical axis of each dimension (`parallel.sharding`)."""
    dtype: str = ""
    """Empty: the dtype of the KV cache."""

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), f"axes {self.axes} of an array of shape {self.shape}"


@dataclass(frozen=True)
class StateKind:
    """State that a kind of layer keeps of a sequence."""

    name: str
    """Key of pools."""
    per: Literal["token", "entry"]
    """`token`: a row for every token, on pages. `entry`: an immutable entry per `entry_tokens` tokens."""
    entry: tuple[ArraySpec, ...]
    """Arrays of a token's row, or of an entry."""
    entry_tokens: int = 0
    """Entry kinds: tokens between entries. 0 for token kinds."""
    ring: tuple[ArraySpec, ...] = ()
    """Entry kinds: arrays that a running row keeps of the tokens since its entry."""
    unread_within: int = 0
    """Page tables of up to this number of positions neither write nor read the state."""

    def stored_in(self, dtype: str) -> StateKind:
        """Return the kind with its entry in `dtype`; unchanged if that is empty."""
        return replace(self, entry=tuple(replace(array, dtype=dtype) for array in self.entry)) if dtype else self

    def __post_init__(self) -> None:
        assert (self.per == "entry") == (self.entry_tokens > 0), f"{self.name}: {self.entry_tokens} tokens per entry"
