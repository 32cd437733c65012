"""Arguments of logit processors: permitted values, and their encoding for the devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

NUM_RECENT = 64
"""Number of last tokens of a sequence that a processor sees."""
NOT_PROCESSED = -1
"""Marks rows without processors."""
MAX_NUMBERS = 256
"""Maximum numbers of an argument."""


class ProcessorArgument(NamedTuple):
    """Argument of a logit processor."""

    name: str
    default: tuple[int, ...]
    """Default value as int32 bits."""
    is_float: bool
    """True if the bits are float32."""
    is_list: bool
    """True if the value is a list."""

    @property
    def size(self) -> int:
        return len(self.default)

    def bits(self, value: Any) -> np.ndarray:
        """Return a value as int32 [size]; lists are padded with the default.

        Raises: ValueError for a wrong value.
        """
        values = value if self.is_list and isinstance(value, list | tuple) else [value]
        if len(values) > self.size or not all(map(self._is_one, values)):
            kind = "finite numbers" if self.is_float else "whole numbers of 32 bits"
            wanted = f"up to {self.size} {kind} in a list" if self.is_list else f"one of {kind}"
            raise ValueError(f"`{self.name}` should be {wanted}")
        found = np.asarray(self.default, np.int32)
        found[: len(values)] = np.asarray(values, np.float32 if self.is_float else np.int32).view(np.int32)
        return found

    def _is_one(self, value: object) -> bool:
        if self.is_float:
            most = float(np.finfo(np.float32).max)
            return isinstance(value, Real) and not isinstance(value, bool) and abs(float(value)) <= most
        return isinstance(value, Integral | bool) and -(2**31) <= int(value) < 2**31


def argument_of(name: str, default: object) -> ProcessorArgument:
    """Return the argument for a default value.

    Raises: ValueError unless it is a number or a list of numbers.
    """
    is_list = isinstance(default, list | tuple)
    values = list(default) if isinstance(default, list | tuple) else [default]
    if not 0 < len(values) <= MAX_NUMBERS or not all(isinstance(value, Real) for value in values):
        raise ValueError(f"the default of `{name}` should be a number, or a list of 1 to {MAX_NUMBERS}")
    is_float = any(isinstance(value, float) for value in values)
    empty = ProcessorArgument(name, (0,) * len(values), is_float, is_list)
    return empty._replace(default=tuple(empty.bits(values if is_list else values[0]).tolist()))


def processed_row(given: Mapping[str, Any], processors: Sequence[Sequence[ProcessorArgument]]) -> np.ndarray | None:
    """Return a row's processor input, int32 [X], or None if no processor is requested.

    It has a flag and the arguments of each processor.

    Raises: ValueError for unknown arguments and wrong values.
    """
    if not given:
        return None
    known = sorted(argument.name for arguments in processors for argument in arguments)
    if unknown := given.keys() - set(known):
        told = f"those here take {', '.join(known)}" if known else "this server has none"
        raise ValueError(f"{len(unknown)} of its names are arguments of no logit processor: {told}")
    parts: list[np.ndarray] = []
    for arguments in processors:
        is_asked = any(argument.name in given for argument in arguments)
        parts.append(np.array([is_asked], np.int32))
        parts.extend(a.bits(given[a.name]) if a.name in given else np.asarray(a.default, np.int32) for a in arguments)
    return np.concatenate(parts)


def row_size(processors: Sequence[Sequence[ProcessorArgument]]) -> int:
    """Return X of `processed_row`."""
    return sum(1 + sum(argument.size for argument in arguments) for arguments in processors)
