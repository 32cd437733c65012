"""Buckets of tensors: what is written is read, and what is wrong with one is refused in one sentence."""

from __future__ import annotations

import json
import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from rayserve_moe.checkpoints.bucket import SentPiece, SentTensor, WantedTensor, cut, read_bucket, write_bucket
from rayserve_moe.checkpoints.header import CheckpointError

MATRIX = np.arange(24, dtype=np.float32).reshape(4, 6)


def written(*tensors: SentTensor, base_version: str | None = None) -> bytes:
    return b"".join(bytes(part) for part in write_bucket(tensors, base_version=base_version))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_what_is_written_is_read(dtype):
    found = read_bucket(bytearray(written(SentTensor("a", MATRIX.astype(dtype)), SentTensor("b", MATRIX.T))))
    assert [tensor.name for tensor in found.tensors] == ["a", "b"] and found.base_version is None
    assert found.tensors[0].values.dtype == dtype
    np.testing.assert_array_equal(found.tensors[0].values, MATRIX.astype(dtype))
    np.testing.assert_array_equal(found.tensors[1].values, MATRIX.T)
    assert read_bucket(written()).tensors == ()


def test_any_reader_of_safetensors_reads_one():
    delta = SentTensor("a", MATRIX[0, :2], np.array([3, 5], np.uint32))
    found = load(written(delta, SentTensor("b", MATRIX), base_version="7"))
    assert set(found) == {"a.positions", "a.values", "b"}
    np.testing.assert_array_equal(found["b"], MATRIX)


def edited(body: bytes, **metadata: object) -> bytes:
    """The same bucket with other metadata; None takes a key out."""
    end = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:end])
    header["__metadata__"] |= metadata
    header["__metadata__"] = {key: value for key, value in header["__metadata__"].items() if value is not None}
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + body[end:]


GOOD = written(SentTensor("a", MATRIX), SentTensor("b", MATRIX))
WRONG = {
    "half of it": (GOOD[: len(GOOD) // 2], "truncated"),
    "nothing": (b"", "truncated"),
    "a pickle": (pickle.dumps({"a": 1}), "the bucket: "),
    "one bit": (GOOD[:-1] + bytes([GOOD[-1] ^ 1]), "tensor b does not match the crc32"),
    "more": (GOOD + b"\0", "1 bytes follow"),
    "no sums": (edited(GOOD, crc32=None), "tensor a has no crc32"),
    "a sum of words": (edited(GOOD, crc32="words"), "crc32 in __metadata__ must be JSON"),
    "integers": (written(SentTensor("a", np.arange(3, dtype=np.int32))), "tensor a has dtype I32"),
    "no number": (
        written(SentTensor("a", np.full(3, np.nan, np.float32))),
        "tensor a holds values that are not finite",
    ),
    "a delta of signed positions": (
        written(SentTensor("a", MATRIX[0], np.arange(6, dtype=np.int32)), base_version="0"),
        "a.positions must be uint32",
    ),
    "a place with two values": (
        written(SentTensor("a", MATRIX[0, :3], np.array([5, 3, 5], np.uint32)), base_version="0"),
        "a.positions has a repeated position",
    ),
    "a tensor with two values": (
        written(SentTensor("a", MATRIX), SentTensor("a", MATRIX[0, :1], np.array([3], np.uint32)), base_version="0"),
        "tensor a is in the bucket both whole and as a delta",
    ),
    "a delta of too few values": (
        written(SentTensor("a", MATRIX[0], np.arange(7, dtype=np.uint32)), base_version="0"),
        "a.positions must be uint32",
    ),
}


@pytest.mark.parametrize("way", WRONG)
def test_what_is_wrong_is_refused(way):
    body, message = WRONG[way]
    with pytest.raises(CheckpointError, match=message):
        read_bucket(body)


@given(st.sets(st.integers(0, 23)), st.tuples(st.integers(0, 4), st.integers(0, 4)), st.integers(0, 5))
def test_a_cut_delta_changes_what_the_whole_one_changes_there(positions, rows, first):
    region = (tuple(sorted(rows)), (first, 6))
    at = np.array(sorted(positions), np.uint32)
    values = np.arange(100, 100 + len(at), dtype=np.float32)
    whole = MATRIX.copy()
    whole.reshape(-1)[at] = values
    (piece,) = cut(SentTensor("a", values, at), WantedTensor((4, 6), (region,)))
    part = np.ascontiguousarray(MATRIX[slice(*region[0]), slice(*region[1])])
    part.reshape(-1)[piece.positions] = piece.values
    np.testing.assert_array_equal(part, whole[slice(*region[0]), slice(*region[1])])


def test_positions_outside_are_refused():
    delta = SentTensor("a", MATRIX[0, :1], np.array([24], np.uint32))
    with pytest.raises(CheckpointError, match=r"a\.positions has positions outside"):
        cut(delta, WantedTensor((4, 6), (((0, 4), (0, 6)),)))


def test_pieces_travel_out_of_band():
    values = np.arange(5000, dtype=np.float32).astype(ml_dtypes.bfloat16)
    buffers: list[pickle.PickleBuffer] = []
    sent = pickle.dumps(SentPiece("a", ((0, 5000),), values).as_bits(), protocol=5, buffer_callback=buffers.append)
    assert len(sent) < 500 and len(buffers) == 1
    back = pickle.loads(sent, buffers=buffers).as_typed()
    assert back.values.dtype == values.dtype
    np.testing.assert_array_equal(back.values, values)
