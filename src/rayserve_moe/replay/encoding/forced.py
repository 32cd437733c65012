"""Routing as input: the request field `forced_routed_experts`, in whichever JSON dialect it comes."""

from __future__ import annotations

from rayserve_moe.replay.encoding import nested, npy, packed, sglang
from rayserve_moe.replay.encoding.base64_text import from_base64
from rayserve_moe.replay.encoding.layer_axis import rows_from_hidden_layers
from rayserve_moe.requests import RoutedExperts, RoutingLayout


def decode_forced(value: object, layout: RoutingLayout, *, prompt_len: int) -> RoutedExperts:
    """Decode the field; ValueError where it is no routing of this model, or not of the prompt's last positions.

    Text is the npy dialect where its bytes say so, else the sglang dialect. Rows end with the last prompt token, or
    with the one before it, which is what an answer holds of a whole sequence.
    """
    routing = _decode(value, layout)
    end = routing.start + len(routing.rows)
    if end not in (prompt_len - 1, prompt_len):
        raise ValueError(f"forced_routed_experts ends at position {end}, but the prompt has {prompt_len} tokens")
    return routing


def _decode(value: object, layout: RoutingLayout) -> RoutedExperts:
    if isinstance(value, str):
        raw = from_base64(value)
        if raw.startswith(npy.MAGIC):
            return RoutedExperts(rows_from_hidden_layers(npy.npy_ids(raw), layout))
        return sglang.decode(value, layout)
    if isinstance(value, dict):
        return packed.decode(value, layout)
    if isinstance(value, list):
        return nested.decode(value, layout)
    raise ValueError("forced_routed_experts must be text, an object or nested lists")
