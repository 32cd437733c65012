"""The table of expert backends, the choice of one for a step, and the backends without an exchange of rows.

`replicated` computes experts on the ranks that hold them from all tokens: each rank multiplies its own slots, and the
ranks add up. Tokens are gathered over the data axis. The sums of the ranks are partial ones, so their last bits depend
on the placement. `local` is the same on a single device: nothing is gathered and nothing is added up.
"""

# T tokens   D model width   K experts per token   W tokens of all data ranks   G chunks   Y = 2 * K + 1

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from rayserve_moe.experts.all_to_all import apply_all_to_all
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.pushed import apply_pushed
from rayserve_moe.experts.slot_mapping import PlacedExperts, choose_slots
from rayserve_moe.experts.tokens import LEAST_FUSED_CHUNK, SEND_BYTES, RoutedTokens, cut_into_chunks, take_part
from rayserve_moe.kernels.reference.expert_products import LayerExperts, ProductConfig
from rayserve_moe.parallel.sharding import DATA, TENSOR

RESULT_BYTES = 4 * SEND_BYTES
"""Results per assignment that a device holds at once where tokens are gathered."""


def apply_local(tokens: RoutedTokens, experts: PlacedExperts, *, config: ExpertConfig) -> jax.Array:
    """Return the MoE sum of each token [T, D] if this device holds all slots; ValueError with more devices."""
    if config.plan.num_expert_ranks > 1:
        raise ValueError(
            f"expert backend local is for one device, and experts lie over {config.plan.num_expert_ranks}: choose auto"
        )
    return _sums_of_my_slots(tokens, experts, config).astype(tokens.hidden_TD.dtype)


def apply_replicated(tokens: RoutedTokens, experts: PlacedExperts, *, config: ExpertConfig) -> jax.Array:
    """Return the MoE sum of each token [T, D], by a gather over data, then sums over all ranks.

    Over several slices each device of a tensor group gathers its part of the tokens, so that a token goes to another
    slice once and not once per device, nor does its sum.
    """
    plan, (num_tokens, width) = config.plan, tokens.hidden_TD.shape
    if plan.data_size == 1:
        out_TD = _sums_of_my_slots(tokens, experts, config)
        return _combine(out_TD, tokens, config)
    shared = plan.tensor_size if plan.num_slices > 1 else 1
    axes = DATA if shared == 1 else (DATA, TENSOR)
    part = take_part(tokens, plan.tensor_rank(), num_parts=shared) if shared > 1 else tokens

    def run(chunk: RoutedTokens) -> jax.Array:
        with jax.named_scope("dispatch"):
            gathered = _gather(chunk, axes)
        out_WD = _sums_of_my_slots(gathered, experts, config)
        with jax.named_scope("combine"):
            return jax.lax.psum_scatter(out_WD, axes, scatter_dimension=0, tiled=True)

    row_bytes = width * tokens.hidden_TD.dtype.itemsize
    most = max(1, RESULT_BYTES // (plan.data_size * shared * config.router.top_k * row_bytes))
    out_GTD = jax.lax.map(run, cut_into_chunks(part, min(len(part.valid_T), most)))
    out_TD = out_GTD.reshape(-1, width)[: len(part.valid_T)]
    if shared == 1:
        return _combine(out_TD, tokens, config)
    with jax.named_scope("combine"):
        out_TD = jax.lax.all_gather(out_TD.astype(tokens.hidden_TD.dtype), TENSOR, axis=0, tiled=True)
    return out_TD[:num_tokens]


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
    gathered = replicated_bytes(tokens_per_device, ep_size=ep_size, tensor_size=tensor_size, row_bytes=row_bytes)
    exchanged = all_to_all_bytes(
        tokens_per_device, ep_size=ep_size, tensor_size=tensor_size, top_k=top_k, row_bytes=row_bytes
    )
    if gathered <= exchanged:
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
    """Return the bytes that reach a device if tokens are gathered, with starting costs.

    Rows of the other data ranks come in, float32 sums (two rows' bytes each) go back, and sums are added over tensor.
    """
    num_tokens, data_size = tokens_per_device * tensor_size, ep_size // tensor_size
    over_data = 3 * (data_size - 1) * num_tokens * row_bytes
    over_tensor = 2 * 2 * (tensor_size - 1) * tokens_per_device * row_bytes
    num_collectives = 2 * (data_size > 1) + (tensor_size > 1)
    return over_data + over_tensor + num_collectives * START_BYTES


def all_to_all_bytes(tokens_per_device: int, *, ep_size: int, tensor_size: int, top_k: int, row_bytes: int) -> int:
    """Return the bytes that reach a device if tokens are exchanged, evenly routed, with starting costs.

    A row per assignment is received and a result is sent back, but for the part that stays on its rank; then sums are
    shared over tensor. The counts that announce the rows are small.
    """
    num_moved = tokens_per_device * top_k * (ep_size - 1) // ep_size
    over_tensor = (tensor_size - 1) * tokens_per_device * row_bytes
    return 2 * num_moved * row_bytes + over_tensor + (3 + (tensor_size > 1)) * START_BYTES


def _gather(tokens: RoutedTokens, axes: str | tuple[str, ...]) -> RoutedTokens:
    """Gather the tokens of all ranks of `axes`: hidden states, and with one more collective all else, as integers."""
    hidden_TD, ids_TK, gates_TK, valid_T = tokens
    bits_TK = jax.lax.bitcast_convert_type(gates_TK, jnp.int32)
    choice_TY = jnp.concatenate([ids_TK, bits_TK, valid_T[:, None].astype(jnp.int32)], axis=1)
    hidden_WD, choice_WY = (jax.lax.all_gather(array, axes, axis=0, tiled=True) for array in (hidden_TD, choice_TY))
    ids_WK, bits_WK, valid_W1 = jnp.split(choice_WY, [ids_TK.shape[1], 2 * ids_TK.shape[1]], axis=1)
    return RoutedTokens(hidden_WD, ids_WK, jax.lax.bitcast_convert_type(bits_WK, jnp.float32), valid_W1[:, 0] > 0)


def _combine(out_TD: jax.Array, tokens: RoutedTokens, config: ExpertConfig) -> jax.Array:
    """Add up the sums of the devices of a tensor group, in the tokens' dtype."""
    with jax.named_scope("combine"):
        return config.plan.sum_over_tensor(out_TD).astype(tokens.hidden_TD.dtype)


def _sums_of_my_slots(tokens: RoutedTokens, experts: PlacedExperts, config: ExpertConfig) -> jax.Array:
    """Return the sum of this rank's slots for each token: float32 [T, D]. Every rank chooses the same slots."""
    hidden_TD, ids_TK, gates_TK, valid_T = tokens
    num_local = config.num_local_slots
    with jax.named_scope("dispatch"):
        home_T1 = _home_ranks(len(valid_T), config)
        slots_TK = choose_slots(ids_TK, valid_T, experts.maps, layer=experts.layer, rank=home_T1, config=config)
        local_TK = slots_TK - config.plan.expert_rank() * num_local
        is_here_TK = (local_TK >= 0) & (local_TK < num_local) & valid_T[:, None]
        local_TK = jnp.where(is_here_TK, local_TK, num_local)
    product = ProductConfig(num_local, ids_TK.size / config.router.num_experts, config.activation)
    with jax.named_scope("experts"):
        of_layer = LayerExperts(experts.weights, experts.layer * num_local, product)
        return config.kernels.experts.sums(hidden_TD, local_TK, gates_TK, of_layer)


def _home_ranks(num_tokens: int, config: ExpertConfig) -> jax.Array:
    """First rank of the data rank that each gathered token comes from: [T, 1]."""
    per_data_rank = num_tokens // config.plan.mesh.shape[DATA]
    return (jnp.arange(num_tokens, dtype=jnp.int32) // per_data_rank * config.plan.tensor_size)[:, None]
