"""A key that is shared by all processes of an application: drawn by the first, kept in Ray's control store."""

from __future__ import annotations

import secrets

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from rayserve_moe.scheduling.page_digests import KEY_BYTES

_NAMESPACE = b"rayserve_moe"


def shared_key(name: str) -> bytes:
    """Return the key of this name, the same in every process of the cluster; draw it if it does not exist."""
    place = f"page-key:{name}".encode()
    _internal_kv_put(place, secrets.token_bytes(KEY_BYTES), overwrite=False, namespace=_NAMESPACE)
    key = _internal_kv_get(place, namespace=_NAMESPACE)
    assert key is not None, "the key has just been put there"
    return key
