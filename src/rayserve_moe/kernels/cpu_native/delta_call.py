"""Native CPU kernel of layers with a delta rule, as a function of arrays."""

# T tokens   D model width   L layers   R rows, or width between two products   C tokens of a chunk
# K key heads   H value heads   d key width   v value width   x decays of a head

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.kernels.cpu_native.calls import DELTA, DELTA_IN_TWO, DELTA_VECTORS, PREFIX
from rayserve_moe.kernels.reference.delta_gates import GateRule
from rayserve_moe.kernels.reference.gated_delta import DeltaPools, Pieces


def advance_layer(  # noqa: PLR0913 (constants, by keyword)
    normed_TD: jax.Array,
    weights: Mapping[str, jax.Array],
    pools: DeltaPools,
    pieces: Pieces,
    *,
    layer: jax.Array,
    eps: float,
    gates: GateRule,
) -> tuple[jax.Array, DeltaPools]:
    """Compute a layer as `model.layers.gated_delta` does by XLA: float32 [T, D], and the pools, in place.

    Roundings are the same, except within the recurrence. `weights` are stacked over all layers. Entries of `pools` have
    the reference's form. Rings have an order that only this kernel reads: keys [R, K, d, C], fresh values [R, H, C, v],
    decays [R, H, x, C]. A token that is not finite is computed as zeros, and its output is NaN.
    """
    columns, num_layers = (*pieces[:-1], *pieces.entries), len(weights["o_LHD"])
    # Of two products, the second has the name of the single one with R for D: a_LRH for a_LDH.
    matrices = (weights.get(name, weights.get(name.replace("D", "R"))) for name in DELTA)
    rates = weights["decay_LH"] if "decay_LH" in weights else weights["decay_L1H11"]
    shapes = [jax.ShapeDtypeStruct(normed_TD.shape, jnp.float32)]
    shapes += [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools]
    arguments = (
        normed_TD,
        *matrices,
        *(weights[name] for name in ("o_LHD", *DELTA_VECTORS)),
        rates.reshape(num_layers, -1),
        weights["decay_bias_LH"],
        weights["norm_Lv"],
        *(weights.get(name, jnp.zeros((0, 0, 0), jnp.bfloat16)) for name in DELTA_IN_TWO[:2]),
        jnp.stack(columns, axis=-1),
        jnp.asarray(layer, jnp.int32),
    )
    aliases = {len(arguments) + place: 1 + place for place in range(len(pools))}
    call = jax.ffi.ffi_call(f"{PREFIX}delta", shapes, input_output_aliases=aliases)
    out_TD, *arrays = call(
        *arguments,
        *pools,
        eps=np.float32(eps),
        decay_floor=np.float32(gates.decay_floor),
        rounds_decays=gates.rounds_decays,
        has_sigmoid=gates.output == "sigmoid",
    )
    return out_TD, DeltaPools(*arrays)
