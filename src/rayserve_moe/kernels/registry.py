"""Which attention kernels there are. Every entry has the signature of `attention_reference.attend`.

The ragged ones ask in addition that the real tokens of a block come first and stand at consecutive positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from rayserve_moe.kernels import attention_ragged, attention_reference

AttentionKernel = Callable[..., jax.Array]

ATTENTION: dict[str, AttentionKernel] = {
    "reference": attention_reference.attend,
    "ragged_decode": attention_ragged.attend_decode,
    "ragged_prefill": attention_ragged.attend_prefill,
}


@dataclass(frozen=True)
class KernelChoice:
    """The kernels a step is built from: for single-token chunks, for prefill blocks, for experts.

    `products` says who multiplies with all other weights: `jax`, or `native` (see `cpu_native`), which does all of
    attention too and wants every weight packed.
    """

    decode_attention: str = "reference"
    prefill_attention: str = "reference"
    experts: str = "blocks"
    products: str = "jax"

    @property
    def is_native(self) -> bool:
        return self.products == "native"


KERNELS_OF_PLATFORM: dict[str, KernelChoice] = {
    "cpu": KernelChoice(experts="blocks"),
    "tpu": KernelChoice("ragged_decode", "ragged_prefill", "ragged_dot"),
}
NATIVE_CPU = KernelChoice(experts="native", products="native")
"""The kernels of `cpu_native`, for bfloat16 on a CPU that has products of them."""
