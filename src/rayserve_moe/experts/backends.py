"""The table of expert backends, how tokens and experts on different devices meet, and which one suits a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax

from rayserve_moe.experts.all_to_all import apply_all_to_all
from rayserve_moe.experts.pushed import apply_pushed
from rayserve_moe.experts.replicated import apply_local, apply_replicated
from rayserve_moe.experts.tokens import LEAST_FUSED_CHUNK

ExpertBackend = Callable[..., jax.Array]

EXPERT_BACKENDS: dict[str, ExpertBackend] = {
    "local": apply_local,
    "replicated": apply_replicated,
    "all_to_all": apply_all_to_all,
    "fused": partial(apply_all_to_all, overlapped=True),
    "pushed": apply_pushed,
}
"""Each has the signature of `apply_replicated`: called inside a sharded step, it returns the MoE sum of each token."""

START_BYTES = 256 << 10
"""What a link moves in the time that one more collective takes to start: some 3 us at 90 GB/s."""


def choose_backend(
    tokens_per_device: int, *, ep_size: int, tensor_size: int, platform: str, top_k: int, row_bytes: int
) -> str:
    """Name the backend for a step in which each device has `tokens_per_device` tokens of `row_bytes` of its own.

    One device: `local`. CPU devices: `replicated`, because there the exchange moves every row to every device. Else the
    backend that moves fewer bytes to a device, counting `START_BYTES` for each collective (`replicated_bytes`,
    `all_to_all_bytes`): gathering costs about 3 * tokens * ranks rows, the exchange 2 * tokens * top_k rows, so few
    tokens or few ranks are gathered and the rest exchanged. Among exchanges `fused` as soon as it has two chunks.
    """
    if ep_size == 1:
        return "local"
    if platform == "cpu":
        return "replicated"
    sizes = {"ep_size": ep_size, "tensor_size": tensor_size, "row_bytes": row_bytes}
    if replicated_bytes(tokens_per_device, **sizes) <= all_to_all_bytes(tokens_per_device, top_k=top_k, **sizes):
        return "replicated"
    return _exchange_for(tokens_per_device)


def choose_between_slices(tokens_per_device: int, *, num_slices: int, top_k: int) -> str:
    """Name the backend over several slices of TPUs: the one that sends fewer rows between them.

    A gathered token goes to each other slice once and a sum of two rows' bytes comes back; an exchanged one goes there
    and back for each of its experts there, (S - 1) / S of top_k.
    """
    return "replicated" if 3 * num_slices <= 2 * top_k else _exchange_for(tokens_per_device)


def _exchange_for(tokens_per_device: int) -> str:
    return "fused" if tokens_per_device >= 2 * LEAST_FUSED_CHUNK else "all_to_all"


def replicated_bytes(tokens_per_device: int, *, ep_size: int, tensor_size: int, row_bytes: int) -> int:
    """Bytes that reach a device where tokens are gathered, with starting costs.

    Rows of the other data ranks come in, float32 sums (two rows' bytes each) go back, and sums are added over tensor.
    """
    num_tokens, data_size = tokens_per_device * tensor_size, ep_size // tensor_size
    over_data = 3 * (data_size - 1) * num_tokens * row_bytes
    over_tensor = 2 * 2 * (tensor_size - 1) * tokens_per_device * row_bytes
    num_collectives = 2 * (data_size > 1) + (tensor_size > 1)
    return over_data + over_tensor + num_collectives * START_BYTES


def all_to_all_bytes(tokens_per_device: int, *, ep_size: int, tensor_size: int, top_k: int, row_bytes: int) -> int:
    """Bytes that reach a device where tokens are exchanged, evenly routed, with starting costs.

    A row per assignment is received and a result is sent back, but for the part that stays on its rank; then sums are
    shared over tensor. The counts that announce the rows are small.
    """
    num_moved = tokens_per_device * top_k * (ep_size - 1) // ep_size
    over_tensor = (tensor_size - 1) * tokens_per_device * row_bytes
    return 2 * num_moved * row_bytes + over_tensor + (3 + (tensor_size > 1)) * START_BYTES
