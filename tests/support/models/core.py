"""The tiny model that the tests of the core share, and its twin for the native CPU kernels."""

from __future__ import annotations

from dataclasses import replace

from rayserve_moe.checkpoints.synthetic import DenseLayers, Drawn, SyntheticConfig

CORE_CONFIG = SyntheticConfig(
    vocab_size=512,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=8,
    num_experts_per_tok=2,
    dense=DenseLayers(mlp_only_layers=(0,)),
    max_position_embeddings=512,
    drawn=Drawn(scale=0.2, norm_jitter=0.2),
)
"""One dense layer, then two with experts; fewer KV heads than the four devices of the test process. Its weights are
large enough that neither attention nor routing is flat."""

NATIVE_CORE_CONFIG = replace(
    CORE_CONFIG,
    hidden_size=64,
    intermediate_size=200,
    moe_intermediate_size=48,
    head_dim=32,
    drawn=Drawn(scale=0.1, norm_jitter=0.2),
)
"""The core model in widths that the native kernels take, some of them padded, on one device and on four."""

NUM_PAGES = 200
PAGE_SIZE = 16
