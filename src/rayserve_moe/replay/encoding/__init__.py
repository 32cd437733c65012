"""Routed experts, gates and index rows on the wire: encoders and decoders per dialect, each with its description."""

from rayserve_moe.replay.encoding.description import routed_experts_info
from rayserve_moe.replay.encoding.dialects import DIALECTS, decode_each_forced, decode_forced
from rayserve_moe.replay.encoding.gates import decode_each_forced_gates, extract_router_gates_from_meta_info
from rayserve_moe.replay.encoding.gates import encode as encode_gates
from rayserve_moe.replay.encoding.index import FORMS as INDEX_FORMS
from rayserve_moe.replay.encoding.index import decode as decode_index
from rayserve_moe.replay.encoding.index import decode_each_forced_index, extract_indexer_topk_from_meta_info
from rayserve_moe.replay.encoding.index import encode as encode_index
from rayserve_moe.replay.encoding.nested import encode_split as encode_nested
from rayserve_moe.replay.encoding.packed import encode as encode_packed
from rayserve_moe.replay.encoding.ranges import routing_from, routing_until
from rayserve_moe.replay.encoding.rollout import (
    ROLLOUT_MEDIA_TYPE,
    ROLLOUT_ZSTD_MEDIA_TYPE,
    decode_rollout,
    encode_rollout,
    rollout_rows,
)
from rayserve_moe.replay.encoding.sglang import decode_routed_experts, extract_routed_experts_from_meta_info
from rayserve_moe.replay.encoding.sglang import encode as encode_routed_experts

__all__ = [
    "DIALECTS",
    "INDEX_FORMS",
    "ROLLOUT_MEDIA_TYPE",
    "ROLLOUT_ZSTD_MEDIA_TYPE",
    "decode_each_forced",
    "decode_each_forced_gates",
    "decode_each_forced_index",
    "decode_forced",
    "decode_index",
    "decode_rollout",
    "decode_routed_experts",
    "encode_gates",
    "encode_index",
    "encode_nested",
    "encode_packed",
    "encode_rollout",
    "encode_routed_experts",
    "extract_indexer_topk_from_meta_info",
    "extract_routed_experts_from_meta_info",
    "extract_router_gates_from_meta_info",
    "rollout_rows",
    "routed_experts_info",
    "routing_from",
    "routing_until",
]
