"""What a page of cached tokens is called outside its engine: a keyed hash over its salt and all tokens up to its end.

Equal prefixes under one salt have equal digests in every engine that has the key; without it they say nothing.
"""

from __future__ import annotations

import hashlib

import numpy as np

DIGEST_BYTES = 8
KEY_BYTES = 32


def root_digest(key: bytes, salt: str) -> bytes:
    """What digests of prompts under `salt` begin from."""
    return hashlib.blake2b(
        salt.encode("utf-8", "surrogatepass"), key=key, digest_size=DIGEST_BYTES, person=b"salt"
    ).digest()


def chained_digests(key: bytes, above: bytes, *, run: bytes, page_bytes: int) -> list[bytes]:
    """Digests of the whole pages in `run`, int32 token ids as bytes, that follow a page called `above`."""
    digests, blake2b = [], hashlib.blake2b
    for start in range(0, len(run) - page_bytes + 1, page_bytes):
        above = blake2b(above + run[start : start + page_bytes], key=key, digest_size=DIGEST_BYTES).digest()
        digests.append(above)
    return digests


def prompt_digests(key: bytes, salt: str, *, token_ids: np.ndarray, page_size: int) -> list[bytes]:
    """Digests of the pages of a prompt int32 [T] that may be found cached: whole ones, without its last token."""
    num_pages = max(len(token_ids) - 1, 0) // page_size
    run = np.asarray(token_ids[: num_pages * page_size], np.int32).tobytes()
    return chained_digests(key, root_digest(key, salt), run=run, page_bytes=4 * page_size)
