"""Native CPU kernel of Mamba-2 layers, as a function of arrays."""

# T tokens   D model width   L layers   N width of B and of C   I inner width   H heads   J taps

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.kernels.cpu_native.calls import MAMBA2, PREFIX
from rayserve_moe.kernels.reference.gated_delta import DeltaPools, Pieces

TAPS = ("c_taps_LJ1N", "b_taps_LJ1N", "x_taps_LJ1I")
BIASES = ("c_bias_LN", "b_bias_LN", "x_bias_LI")
VECTORS = ("decay_LH", "step_bias_LH", "skip_LH", "norm_LI")


def advance_layer(  # noqa: PLR0913 (the constants of a layer)
    normed_TD: jax.Array,
    weights: Mapping[str, jax.Array],
    pools: DeltaPools,
    pieces: Pieces,
    *,
    layer: jax.Array,
    eps: float,
    min_step: float,
) -> tuple[jax.Array, DeltaPools]:
    """Compute a Mamba-2 layer as `model.layers.mamba2` does by XLA: float32 [T, D], and the pools, in place.

    Roundings, rings and tokens that are not finite are as in `delta_call.advance_layer`.
    """
    nothing = jnp.zeros((0, 0), jnp.bfloat16)
    arrays = [normed_TD, *(weights[name] for name in (*MAMBA2, *TAPS))]
    arrays += [weights.get(name, nothing) for name in BIASES]
    arrays += [weights[name] for name in VECTORS]
    shapes = [jax.ShapeDtypeStruct(normed_TD.shape, jnp.float32)]
    shapes += [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools]
    aliases = {len(arrays) + 2 + place: 1 + place for place in range(len(pools))}
    call = jax.ffi.ffi_call(f"{PREFIX}mamba2", shapes, input_output_aliases=aliases)
    out_TD, *held = call(
        *arrays,
        jnp.stack((*pieces[:-1], *pieces.entries), axis=-1),
        jnp.asarray(layer, jnp.int32),
        *pools,
        eps=np.float32(eps),
        min_step=np.float32(min_step),
    )
    return out_TD, DeltaPools(*held)
