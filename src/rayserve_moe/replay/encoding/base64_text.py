"""Base64 as it stands in JSON: arrays to text, and text to bytes with nothing forgiven."""

from __future__ import annotations

import binascii

import numpy as np
import pybase64


def to_base64(array: np.ndarray) -> str:
    """Encode the C-order bytes of an array; its dtype says in which byte order."""
    return pybase64.b64encode_as_string(np.ascontiguousarray(array).tobytes())


def from_base64(encoded: object) -> bytes:
    """Decode text; ValueError where it is no text, or holds anything outside the alphabet."""
    if not isinstance(encoded, str):
        raise ValueError("routed_experts must be a base64 string")
    try:
        return pybase64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("routed_experts is not valid base64") from error
