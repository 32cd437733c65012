"""Tree of all parameters with shape, dtype, logical axes and location in a checkpoint.

Parameters are stacked over the layers of a kind, on leading dimensions: a mixer's in a group of its kind with the
preceding norm; experts over [MoE layers, expert slots]; norms ahead of feed-forward networks over the layers that have
one; norms after mixers and feed-forward networks over all layers. Loading, initialisation, sharding and memory sizing
read this tree.
"""

# L layers   D model width   V vocabulary

from __future__ import annotations

from collections.abc import Mapping

from rayserve_moe.model.layers.mlp import halves_in_files
from rayserve_moe.model.layers.moe import experts_in_files
from rayserve_moe.model.layers.table import FFNS, MIXERS
from rayserve_moe.model.param_spec import ParamSpec, norm_spec
from rayserve_moe.model.spec import ModelSpec


def parameter_specs(
    spec: ModelSpec,
    *,
    dtype: str,
    expert_dtype: str = "",
    tensor_size: int = 1,
    num_devices: int = 1,
    num_redundant: int = 0,
) -> dict[str, dict[str, ParamSpec]]:
    """Return all parameters of `spec` in compute dtype `dtype`; the router and its biases stay float32.

    `expert_dtype` is the dtype of expert weights if it differs: 8 bits with float32 scales. `tensor_size` devices share
    the heads and determine the copies of KV heads. `num_devices` devices share the vocabulary, which is padded to be
    divisible. A layer has `num_redundant` more expert slots than experts.
    """
    tree = {"embedding": _embedding_specs(spec, dtype, num_devices)}
    for mixer in spec.mixers:
        norm = _norm(spec, "attention_norm", dtype, spec.layers_with_mixer(mixer.kind))
        parameters = MIXERS[mixer.kind].parameters(mixer, spec, dtype=dtype, tensor_size=tensor_size)
        tree[mixer.kind] = {"norm_LD": norm} | parameters
    tree["mlp_norm"] = {"scale": _norm(spec, "mlp_norm", dtype, spec.layers_with_ffn())}
    layers = tuple(range(spec.num_layers))
    if spec.has_post_norms:
        tree["post_norms"] = {
            f"{part}_LD": _norm(spec, f"post_{part}_norm", dtype, layers) for part in ("mixer", "ffn")
        }
    if spec.has_scalars:
        scalars = ParamSpec((len(layers), 1), dtype, ("layers", None), "layer_scalar", layers, initial="ones")
        tree["layer_scalars"] = {"scalar_L1": scalars}
    for kind, ffn in FFNS.items():
        if spec.layers_with_ffn(kind):
            tree |= ffn.parameters(spec, dtype=dtype, expert_dtype=expert_dtype, num_redundant=num_redundant)
    return tree


def parameters_in_files(
    tree: dict[str, dict[str, ParamSpec]], rules: Mapping[str, str], *, spec: ModelSpec
) -> dict[str, dict[str, ParamSpec]]:
    """Return the parameters of a model in the forms of the files that `rules` name.

    The files of a family may hold experts, and gate and up of a gated MLP, in separate tensors or in one.
    """
    tree = {group: halves_in_files(params, rules) for group, params in tree.items()}
    return experts_in_files(tree, rules, spec=spec) if "experts" in tree else tree


def _norm(spec: ModelSpec, role: str, dtype: str, layers: tuple[int, ...]) -> ParamSpec:
    shape, axes = (len(layers), spec.hidden_size), ("layers", "model")
    return norm_spec(spec.norm_offset, shape, axes, role, dtype=spec.norm_dtype(dtype), layers=layers)


def _embedding_specs(spec: ModelSpec, dtype: str, num_devices: int) -> dict[str, ParamSpec]:
    table, words = (spec.vocab_size, spec.hidden_size), ("vocabulary", "model")
    rows = words if spec.tie_embeddings else ("vocabulary", "table_row")
    specs = {
        "table_VD": ParamSpec(table, dtype, rows, "embedding").padded("vocabulary", num_devices),
        "final_norm_D": norm_spec(
            spec.norm_offset, (spec.hidden_size,), ("model",), "final_norm", dtype=spec.norm_dtype(dtype)
        ),
    }
    if not spec.tie_embeddings:
        specs["head_VD"] = ParamSpec(table, dtype, words, "head").padded("vocabulary", num_devices)
    return specs
