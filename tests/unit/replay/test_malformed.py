"""Values that lie about themselves: every one is a ValueError with a sentence, before anything large is allocated."""

from __future__ import annotations

import io
import json
import struct

import numpy as np
import pybase64
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.replay.encoding import DIALECTS, decode_forced, decode_rollout, encode_rollout
from rayserve_moe.replay.encoding.rollout import MAX_ROWS_BYTES
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout
from tests.support.routing.routing_arrays import refusal
from tests.support.session.hypothesis_examples import examples

LAYOUT = RoutingLayout(num_hidden_layers=3, layer_ids=(1, 2), num_experts=8, top_k=2)
ROUTING = RoutedExperts(np.array([[[1, 2], [3, 4]], [[5, 6], [7, 0]]], np.uint8), 4)


def b64(raw: bytes) -> str:
    return pybase64.b64encode(raw).decode()


def npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return b64(file.getvalue())


def npy_with_header(header: bytes, rows: bytes = b"\0" * 12, version: bytes = b"\x01\x00") -> str:
    return b64(b"\x93NUMPY" + version + struct.pack("<H", len(header)) + header + rows)


HEADER = b"{'descr': '|u1', 'fortran_order': False, 'shape': (%s), }\n"
PACKED = DIALECTS["packed"].encode(ROUTING, LAYOUT)
MALFORMED = [
    ("sglang", 7, "base64 string"),
    ("sglang", None, "base64 string"),
    ("sglang", "ab\ncd", "not valid base64"),
    ("sglang", "äöü=", "not valid base64"),
    ("sglang", "AAA", "not valid base64"),
    ("sglang", "AAAA", "not whole int32"),
    ("sglang", b64(np.zeros(5, "<i4").tobytes()), "not a multiple of 6"),
    ("sglang", b64(np.full(6, -1, "<i4").tobytes()), "layer that does not route"),
    ("sglang", b64(np.array([0, 0, 0, 1, -1, 2], "<i4").tobytes()), r"outside \[0, 8\)"),
    ("sglang", b64(np.array([0, 0, 0, 1, 8, 2], "<i4").tobytes()), r"outside \[0, 8\)"),
    ("nested", {"rows": []}, "lists of rows"),
    ("nested", [[1, 2]], "lists of rows"),
    ("nested", [[[1, 2]]], "not 2 long"),
    ("nested", [[[1, 2], [3]]], "not 2 long"),
    ("nested", [[[1, 2], [3, True]]], "integers only"),
    ("nested", [[[1, 2], [3, 1.0]]], "integers only"),
    ("nested", [[[1, 2], [3, "4"]]], "integers only"),
    ("nested", [[[1, 2], [3, 10**30]]], "not an expert's"),
    ("nested", [[[1, 2], [3, 8]]], r"outside \[0, 8\)"),
    ("nested", [[[1, 2], [3, -1]]], r"outside \[0, 8\)"),
    ("npy", b64(b"\x93NUMPY"), "not a .npy file"),
    ("npy", b64(b"PK\x03\x04" + b"\0" * 30), "not a .npy file"),
    ("npy", npy_with_header(HEADER % b"2, 3, 2", version=b"\x02\x00"), "not a .npy file of version 1.0"),
    ("npy", npy(np.zeros((2, 3, 2))), "header"),
    ("npy", npy(np.zeros((2, 3, 2), ">u2")), "header"),
    ("npy", npy(np.asfortranarray(np.zeros((2, 3, 2), np.uint8))), "header"),
    ("npy", npy(np.zeros((6, 2), np.uint8)), "header"),
    ("npy", npy(np.zeros((2, 3, 1), np.uint8)), "rows of 3 x 1 ids"),
    ("npy", npy(np.full((2, 3, 2), -1, np.int16)), "layer that does not route"),
    ("npy", npy_with_header(HEADER % b"2, 3, 2", rows=b"\0" * 11), "does not match its"),
    ("npy", npy_with_header(HEADER % b"999999999999, 999999999999, 999999999999"), "does not match its"),
    ("npy", npy_with_header(HEADER % b"0, 999999999999, 999999999999", rows=b""), "does not match its"),
    ("npy", npy_with_header(b"{'descr': '|O', 'fortran_order': False, 'shape': (2, 3, 2), }\n"), "header"),
    ("npy", npy_with_header(b"__import__('os').getcwd()\n"), "header"),
    ("packed", "AAAA", "must be an object"),
    ("packed", {**PACKED, "dtype": "float32"}, "dtype must be one of"),
    ("packed", {**PACKED, "dtype": ["uint8"]}, "dtype must be one of"),
    ("packed", {**PACKED, "dtype": "uint16"}, "does not match its"),
    ("packed", {**PACKED, "shape": [2, 3]}, "three sizes"),
    ("packed", {**PACKED, "shape": [2, 3, True]}, "three sizes"),
    ("packed", {**PACKED, "shape": [2, 3, -2]}, "three sizes"),
    ("packed", {**PACKED, "shape": [10**30, 3, 2]}, "three sizes"),
    ("packed", {"data": "", "shape": [0, 10**9, 10**9]}, "three sizes"),
    ("packed", {**PACKED, "shape": [3, 2, 2]}, "rows of 2 x 2 ids"),
    ("packed", {**PACKED, "start": -1}, "start must be a position"),
    ("packed", {**PACKED, "start": 1.0}, "start must be a position"),
    ("packed", {**PACKED, "data": PACKED["data"][4:]}, "does not match its"),
    ("packed", {"shape": [0, 3, 2]}, "base64 string"),
    ("packed", {"data": b64(np.full(12, -1, "<i2").tobytes()), "shape": [2, 3, 2], "dtype": "int16"}, "not route"),
]


@pytest.mark.parametrize(("name", "value", "sentence"), MALFORMED)
def test_a_malformed_value_is_refused_with_its_reason(name, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        DIALECTS[name].decode(value, LAYOUT)


@pytest.mark.parametrize("value", [None, 7, True, 1.5])
def test_forced_routing_of_no_dialect_is_refused(value):
    with pytest.raises(ValueError, match="text, an object or nested lists"):
        decode_forced(value, LAYOUT, prompt_len=3)


def container(header: object, raw: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<I", len(text)) + text + raw


def contents(*rows: object, compression: object = None) -> dict:
    return {"rollout": {"rows": list(rows), "compression": compression}}


TWO_BYTES = {"shape": [1, 1, 2], "dtype": "uint8"}
HUGE = {"shape": [10**4, 10**3, 10**3], "dtype": "uint8"}
BOMB = zstandard.compress(b"\0" * 10**7)
CONTAINERS = [
    (b"", "shorter than the length"),
    (b"\0\0\0", "shorter than the length"),
    (struct.pack("<I", 2**32 - 1) + b"{}", "shorter than its declared header"),
    (container(b"{", b""), "not JSON"),
    (container(b"\xff\xfe", b""), "not JSON"),
    (container(b"[" * 100_000, b""), "not JSON"),
    (container([], b""), "not a JSON object"),
    (container({}, b""), "does not declare its rows"),
    (container({"rollout": {"rows": 3}}, b""), "does not declare its rows"),
    (container(contents(3), b""), "no shape"),
    (container(contents({"shape": [1, 2], "dtype": "uint8"}), b"\0\0"), "no shape"),
    (container(contents({"shape": [1, -1, -2], "dtype": "uint8"}), b"\0\0"), "no shape"),
    (container(contents({"shape": [1, 1, 2], "dtype": "float64"}), b"\0\0"), "no valid dtype"),
    (container(contents(TWO_BYTES), b"\0"), "another number of bytes"),
    (container(contents(TWO_BYTES), b"\0\0\0"), "another number of bytes"),
    (container(contents(TWO_BYTES, compression="gzip"), b"\0\0"), "unknown way"),
    (container(contents(TWO_BYTES, compression=["zstd"]), b"\0\0"), "unknown way"),
    (container(contents(HUGE), b"\0"), "declares more"),
    (container(contents(HUGE, compression="zstd"), BOMB), "declares more"),
    (container(contents(TWO_BYTES, compression="zstd"), BOMB), "another number of bytes"),
    (container(contents(TWO_BYTES, compression="zstd"), b"\0\0"), "frame of zstd"),
    (container(contents(TWO_BYTES, compression="zstd"), b""), "frame of zstd"),
    (container(contents(TWO_BYTES, compression="zstd"), zstandard.compress(b"ab") + b"x"), "frame of zstd"),
    (container(contents(TWO_BYTES, compression="zstd"), zstandard.compress(b"ab")[:-1]), "frame of zstd"),
]


@pytest.mark.parametrize(("body", "sentence"), CONTAINERS)
def test_a_malformed_container_is_refused_with_its_reason(body, sentence):
    with pytest.raises(ValueError, match=sentence):
        decode_rollout(body)


def test_a_frame_that_does_not_say_its_size_is_refused():
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(b"ab")
    with pytest.raises(ValueError, match="another number of bytes"):
        decode_rollout(container(contents(TWO_BYTES, compression="zstd"), frame))


def test_the_reader_sets_the_limit():
    body = encode_rollout({}, [ROUTING.rows])
    assert decode_rollout(body, max_rows_bytes=ROUTING.rows.nbytes)[0] == {}
    with pytest.raises(ValueError, match="declares more than 7 bytes"):
        decode_rollout(body, max_rows_bytes=ROUTING.rows.nbytes - 1)
    assert MAX_ROWS_BYTES >= 2**28


@examples(200, deadline=None)
@given(st.binary(max_size=200), st.booleans(), st.integers(0, 400))
def test_damaged_bytes_are_a_value_error_or_a_whole_container(noise, compress, place):
    body = bytearray(encode_rollout({"choices": [{}, {}]}, [ROUTING.rows, ROUTING.rows[:1]], compress=compress))
    place = min(place, len(body))
    body[place : place + len(noise)] = noise
    decoded = []
    sentence = refusal(lambda: decoded.append(decode_rollout(bytes(body))))
    if sentence is None:
        header, rows = decoded[0]
        assert isinstance(header, dict) and all(each.ndim == 3 for each in rows)
    else:
        assert len(sentence) < 120


@examples(100, deadline=None)
@given(
    st.dictionaries(st.text(max_size=8).filter(lambda key: key != "rollout"), st.integers() | st.text() | st.none()),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(1, 3), st.booleans()), max_size=4),
    st.booleans(),
)
def test_a_container_gives_back_header_and_rows_of_every_choice(fields, shapes, compress):
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, 250, shape).astype(np.uint16 if wide else np.uint8) for *shape, wide in shapes]
    header, decoded = decode_rollout(encode_rollout(fields, rows, compress=compress))
    assert header == fields
    assert [(each.dtype, each.shape) for each in decoded] == [(each.dtype, each.shape) for each in rows]
    assert all(np.array_equal(one, other) for one, other in zip(rows, decoded, strict=True))
