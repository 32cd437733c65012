"""Table of layer kinds: each mixer or feed-forward network is a file with an entry here."""

from __future__ import annotations

from rayserve_moe.model.layers import (
    attention,
    block_attention,
    gated_delta,
    kimi_delta,
    latent,
    mamba2,
    mlp,
    moe,
    sparse_latent,
)
from rayserve_moe.model.layers.kinds import Ffn, Mixer

MIXERS: dict[str, Mixer] = {
    **dict.fromkeys(attention.STATES, attention.MIXER),
    "block_gqa": block_attention.MIXER,
    "mla": latent.MIXER,
    "dsa": sparse_latent.MIXER,
    "dsa_shared": sparse_latent.SHARED_MIXER,
    "gated_delta": gated_delta.MIXER,
    "kimi_delta": kimi_delta.MIXER,
    "mamba2": mamba2.MIXER,
}
FFNS: dict[str, Ffn] = {
    "moe": moe.FFN,
    "dense": mlp.FFN,
}
