"""Digests that name pages of cached tokens outside of their engine.

A digest is a keyed hash over the salt and all tokens up to the end of the page. Equal prefixes under the same salt have
equal digests in every engine with the key. Without the key, digests reveal nothing.
"""

from __future__ import annotations

import hashlib

import numpy as np

DIGEST_BYTES = 8
KEY_BYTES = 32


def salt_of(cache_salt: str, adapter: str = "") -> str:
    """Return the salt of prompts with an adapter, a name or a key. Routers know names only, so keys share a salt."""
    return f"{cache_salt}\0{adapter.rpartition('@')[0] or adapter}" if adapter else cache_salt


def root_digest(key: bytes, salt: str) -> bytes:
    """Return the digest that precedes the first page of prompts under `salt`."""
    return hashlib.blake2b(
        salt.encode("utf-8", "surrogatepass"), key=key, digest_size=DIGEST_BYTES, person=b"salt"
    ).digest()


def chained_digests(key: bytes, above: bytes, *, run: bytes, page_bytes: int) -> list[bytes]:
    """Return the digests of the whole pages in `run`, int32 token ids as bytes, after a page with digest `above`."""
    digests, blake2b = [], hashlib.blake2b
    for start in range(0, len(run) - page_bytes + 1, page_bytes):
        above = blake2b(above + run[start : start + page_bytes], key=key, digest_size=DIGEST_BYTES).digest()
        digests.append(above)
    return digests


def prompt_digests(key: bytes, salt: str, *, token_ids: np.ndarray, page_size: int) -> list[bytes]:
    """Return the digests of the pages of a prompt int32 [T] that may be cached: whole pages, without the last token."""
    num_pages = max(len(token_ids) - 1, 0) // page_size
    run = np.asarray(token_ids[: num_pages * page_size], np.int32).tobytes()
    return chained_digests(key, root_digest(key, salt), run=run, page_bytes=4 * page_size)
