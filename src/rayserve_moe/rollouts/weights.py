"""A trainer's weights as a server receives them: rounded to its dtypes, whole or as differences, in buckets."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from rayserve_moe.checkpoints.bucket import SentTensor, write_bucket
from rayserve_moe.checkpoints.casting import BFLOAT16, cast, is_finite

SAFETENSORS = "application/vnd.safetensors"
BUCKET_BYTES = 256 << 20
CHUNK_BYTES = 1 << 20
"""Bytes of a body that are written at once."""
POSITION_BYTES = 4
_DTYPES = {"bfloat16": BFLOAT16, "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
_FLOATING = (*_DTYPES.values(), np.dtype(np.float64), np.dtype(ml_dtypes.float8_e4m3fn))


@dataclass(frozen=True)
class HeldDtypes:
    """A server's weight dtypes, from the fields of `/model_info`."""

    dtype: str
    float32_tensors: tuple[str, ...] = ()
    """Patterns of names that are stored in float32."""

    def of(self, name: str) -> np.dtype:
        is_float32 = any(fnmatchcase(name, pattern) for pattern in self.float32_tensors)
        return _DTYPES["float32" if is_float32 else self.dtype]


def rounded(params: Mapping[str, Any], held: HeldDtypes) -> dict[str, np.ndarray]:
    """Return numpy or JAX arrays as the server will hold them, rounded to nearest, ties to even.

    A trainer's log-probs match the server's if its forward pass uses these. Raises ValueError for values that are not
    finite after rounding, and for arrays that are not floating.
    """
    return {name: _rounded(name, np.asarray(array), held.of(name)) for name, array in params.items()}


def _rounded(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if array.dtype not in _FLOATING:
        raise ValueError(f"{name} is {array.dtype}, not a floating dtype")
    wide = array if array.dtype in _DTYPES.values() else array.astype(np.float32)
    if wide.dtype != dtype and dtype.itemsize < 4 and wide.dtype.itemsize < 4:
        wide = wide.astype(np.float32)
    found = cast(np.ascontiguousarray(wide), dtype).reshape(array.shape)
    if not is_finite(found):
        raise ValueError(f"{name} holds values that are not finite in {dtype}")
    return found


def sent_tensors(params: Mapping[str, np.ndarray], base: Mapping[str, np.ndarray] | None) -> list[SentTensor]:
    """Return the tensors to send: all, or only those that differ from `base`, element by element if that is smaller.

    Bits are compared, so a zero of another sign differs. Raises ValueError if `base` does not have a name or shape.
    """
    if base is None:
        return [SentTensor(name, values) for name, values in params.items()]
    if missing := [name for name in params if name not in base or base[name].shape != params[name].shape]:
        raise ValueError(f"base does not have {missing[0]}, or has it in another shape")
    found = (_difference(name, values, base[name]) for name, values in params.items())
    return [tensor for tensor in found if tensor is not None]


def _difference(name: str, values: np.ndarray, base: np.ndarray) -> SentTensor | None:
    bits = np.dtype(f"u{values.itemsize}")
    flat = values.reshape(-1)
    at = np.flatnonzero(flat.view(bits) != base.reshape(-1).view(bits))
    if not len(at):
        return None
    if len(at) * (POSITION_BYTES + values.itemsize) >= values.nbytes or values.size >= 2**32:
        return SentTensor(name, values)
    return SentTensor(name, flat[at], at.astype(np.uint32))


WeightBucket = tuple[dict[str, str], list[bytes | memoryview]]
"""Query and body of a request."""


@dataclass(frozen=True)
class WeightSending:
    """Options of an update that is sent in buckets of whole tensors."""

    weight_version: str
    served_version: str
    base_version: str | None = None
    """Version of `base`; None: the served version."""
    bucket_bytes: int = BUCKET_BYTES
    """Approximate bytes of a bucket."""
    abort_all_requests: bool = False
    update_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Identifies the update; the server takes an id once."""

    def buckets(
        self, tensors: Sequence[SentTensor], *, is_delta: bool, is_staged: bool = False
    ) -> Iterator[WeightBucket]:
        """Yield the query and the body of every request, in order; at least one.

        The weights serve after the last, or after `swap` if they are only to be staged.
        """
        groups = bucketed(tensors, self.bucket_bytes)
        base_version = self.base_version or self.served_version
        for number, group in enumerate(groups):
            is_last = number == len(groups) - 1 and not is_staged
            yield (
                self._query(number, is_last),
                list(write_bucket(group, base_version=base_version if is_delta else None)),
            )

    def swap(self, num_staged: int) -> WeightBucket:
        """Return an empty bucket after `num_staged` others, with which the staged weights begin to serve."""
        return self._query(num_staged, is_last=True), list(write_bucket([], base_version=None))

    def _query(self, number: int, is_last: bool) -> dict[str, str]:
        return {
            "update_id": self.update_id,
            "bucket": str(number),
            "weight_version": self.weight_version,
            "abort_all_requests": str(self.abort_all_requests).lower(),
            "last": str(is_last).lower(),
        }


class StagedWeights(NamedTuple):
    """Weights that a server holds beside those that serve."""

    sending: WeightSending
    num_buckets: int


def bucketed(tensors: Sequence[SentTensor], bucket_bytes: int) -> list[list[SentTensor]]:
    """Group whole tensors into buckets of about `bucket_bytes`; return at least one bucket."""
    groups: list[list[SentTensor]] = [[]]
    num_bytes = 0
    for tensor in tensors:
        size = tensor.values.nbytes + (0 if tensor.positions is None else tensor.positions.nbytes)
        if groups[-1] and num_bytes + size > bucket_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(tensor)
        num_bytes += size
    return groups


async def in_chunks(parts: Sequence[bytes | memoryview]) -> AsyncIterator[bytes | memoryview]:
    """Yield the parts of a body, each of at most CHUNK_BYTES."""
    for part in parts:
        for begin in range(0, len(part), CHUNK_BYTES):
            yield part[begin : begin + CHUNK_BYTES]
