"""The one tree that states every parameter's shape, dtype, logical axes, and place in a checkpoint.

Parameters of like layers are stacked on leading dimensions: attention over all layers, dense MLPs over the dense
layers, experts over [MoE layers, expert slots]. Loading, initialising, sharding and memory sizing all read this tree.
"""

# L layers   M MoE layers   N dense layers   D model width   H query heads   G KV heads   h head width
# E experts   P expert slots   F expert width   I dense width   V vocabulary

from __future__ import annotations

from dataclasses import dataclass, replace

from rayserve_moe.model.spec import ModelSpec


@dataclass(frozen=True)
class ParamSpec:
    """One parameter array.

    `axes` names one logical axis per dimension (see `parallel.sharding`). `role` is the key of the family's
    CHECKPOINT_RULES under which the tensors are found. `layers` lists the layer ids stacked on dimension 0 (empty:
    not stacked); `num_experts` > 0 stacks expert slots on dimension 1, each with one of that many experts: which one is
    decided when weights are loaded. A file holds each piece with shape `file_shape`, transposed where `transposed`
    (files hold [out, in], we hold [in, out]).
    `repeats` > 1 holds every `repeat_width` columns of the file's last dimension (as we hold it) that many times in
    a row: KV heads, where there are fewer of them than devices. The last `num_padding` entries of the vocabulary are
    zeros that no file holds: so it divides over the devices. `initial` is `normal` or `ones`, for synthetic
    checkpoints. `layout` says how a device's share lies in memory (`kernels.cpu_native.layout.LAYOUTS`).
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]
    role: str
    layers: tuple[int, ...] = ()
    num_experts: int = 0
    transposed: bool = False
    initial: str = "normal"
    layout: str = ""
    repeats: int = 1
    repeat_width: int = 1
    num_padding: int = 0

    @property
    def num_stacked_dims(self) -> int:
        return int(bool(self.layers)) + int(bool(self.num_experts))

    @property
    def file_stack(self) -> tuple[int, ...]:
        """How many layers, and then experts, have a tensor of their own in files."""
        return tuple(size for size in (len(self.layers), self.num_experts) if size)

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape of one tensor of the checkpoint as we hold it."""
        return self.shape[self.num_stacked_dims :]

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of one tensor of the checkpoint as files hold it."""
        *outer, last = self.filled_shape
        shape = (*outer, last // self.repeats)
        return shape[::-1] if self.transposed else shape

    @property
    def filled_shape(self) -> tuple[int, ...]:
        """`piece_shape` without padding."""
        axes = self.axes[self.num_stacked_dims :]
        return tuple(
            size - self.num_padding if axis == "vocabulary" else size
            for size, axis in zip(self.piece_shape, axes, strict=True)
        )


ParamTree = dict[str, "ParamSpec | ParamTree"]


def kv_repeats(spec: ModelSpec, tensor_size: int) -> int:
    """How often each KV head is held, so that every device of the tensor axis has one."""
    return max(1, tensor_size // spec.attention.num_kv_heads)


def parameter_specs(
    spec: ModelSpec, *, dtype: str, tensor_size: int = 1, num_devices: int = 1, num_redundant: int = 0
) -> dict[str, dict[str, ParamSpec]]:
    """State all parameters of `spec` in compute dtype `dtype` (the router stays float32).

    `tensor_size` is the number of devices that share the heads: it decides how often KV heads are repeated.
    `num_devices` are all of them: they share the vocabulary, which is padded until it divides. A layer has
    `num_redundant` expert slots more than experts.
    """
    tree = {
        "embedding": _embedding_specs(spec, dtype, num_devices),
        "attention": _attention_specs(spec, dtype, kv_repeats(spec, tensor_size)),
        "mlp_norm": {"scale": _norm(spec, "mlp_norm", dtype)},
        "experts": _expert_specs(spec, dtype, spec.router.num_experts + num_redundant),
    }
    if spec.dense_layer_ids:
        tree["dense"] = _dense_specs(spec, dtype)
    return tree


def _norm(spec: ModelSpec, role: str, dtype: str) -> ParamSpec:
    return ParamSpec(
        (spec.num_layers, spec.hidden_size), dtype, ("layers", "model"), role, _all_layers(spec), initial="ones"
    )


def _all_layers(spec: ModelSpec) -> tuple[int, ...]:
    return tuple(range(spec.num_layers))


def _embedding_specs(spec: ModelSpec, dtype: str, num_devices: int) -> dict[str, ParamSpec]:
    padding = -spec.vocab_size % num_devices
    table = (spec.vocab_size + padding, spec.hidden_size)
    specs = {
        "table_VD": ParamSpec(table, dtype, ("vocabulary", "model"), "embedding", num_padding=padding),
        "final_norm_D": ParamSpec((spec.hidden_size,), dtype, ("model",), "final_norm", initial="ones"),
    }
    if not spec.tie_embeddings:
        specs["head_VD"] = ParamSpec(table, dtype, ("vocabulary", "model"), "head", num_padding=padding)
    return specs


def _attention_specs(spec: ModelSpec, dtype: str, repeats: int) -> dict[str, ParamSpec]:
    attention, layers = spec.attention, _all_layers(spec)
    width, q_width = spec.hidden_size, attention.num_heads * attention.head_dim
    kv_width = attention.num_kv_heads * attention.head_dim * repeats

    def project(role: str, shape: tuple[int, int], axes: tuple[str, str]) -> ParamSpec:
        return ParamSpec((len(layers), *shape), dtype, ("layers", *axes), role, layers, transposed=True)

    def of_kv_heads(spec: ParamSpec) -> ParamSpec:
        return replace(spec, repeats=repeats, repeat_width=attention.head_dim)

    def per_layer(role: str, size: int, axis: str, initial: str) -> ParamSpec:
        return ParamSpec((len(layers), size), dtype, ("layers", axis), role, layers, initial=initial)

    specs = {
        "norm_LD": _norm(spec, "attention_norm", dtype),
        "q_LDH": project("q", (width, q_width), ("model", "heads")),
        "k_LDG": of_kv_heads(project("k", (width, kv_width), ("model", "kv_heads"))),
        "v_LDG": of_kv_heads(project("v", (width, kv_width), ("model", "kv_heads"))),
        "o_LHD": project("o", (q_width, width), ("heads", "model")),
    }
    if attention.qk_norm == "head":
        specs["q_norm_Lh"] = per_layer("q_norm", attention.head_dim, "head_dim", "ones")
        specs["k_norm_Lh"] = per_layer("k_norm", attention.head_dim, "head_dim", "ones")
    if attention.bias:
        specs["q_bias_LH"] = per_layer("q_bias", q_width, "heads", "normal")
        specs["k_bias_LG"] = of_kv_heads(per_layer("k_bias", kv_width, "kv_heads", "normal"))
        specs["v_bias_LG"] = of_kv_heads(per_layer("v_bias", kv_width, "kv_heads", "normal"))
    if attention.output_bias:
        specs["o_bias_LD"] = per_layer("o_bias", width, "model", "normal")
    return specs


def _expert_specs(spec: ModelSpec, dtype: str, num_slots: int) -> dict[str, ParamSpec]:
    layers, num_experts = spec.moe_layer_ids, spec.router.num_experts
    width, inner = spec.hidden_size, spec.experts.intermediate_size

    def stack(role: str, shape: tuple[int, int], axes: tuple[str, str]) -> ParamSpec:
        return ParamSpec(
            (len(layers), num_slots, *shape),
            dtype,
            ("layers", "expert_slots", *axes),
            role,
            layers,
            num_experts,
            True,
        )

    return {
        "router_MDE": ParamSpec(
            (len(layers), width, num_experts), "float32", ("layers", "model", None), "router", layers, transposed=True
        ),
        "gate_MPDF": stack("expert_gate", (width, inner), ("model", "expert_inner")),
        "up_MPDF": stack("expert_up", (width, inner), ("model", "expert_inner")),
        "down_MPFD": stack("expert_down", (inner, width), ("expert_inner", "model")),
    }


def _dense_specs(spec: ModelSpec, dtype: str) -> dict[str, ParamSpec]:
    layers, width, inner = spec.dense_layer_ids, spec.hidden_size, spec.dense_intermediate_size

    def project(role: str, shape: tuple[int, int], axes: tuple[str, str]) -> ParamSpec:
        return ParamSpec((len(layers), *shape), dtype, ("layers", *axes), role, layers, transposed=True)

    return {
        "gate_NDI": project("dense_gate", (width, inner), ("model", "dense_inner")),
        "up_NDI": project("dense_up", (width, inner), ("model", "dense_inner")),
        "down_NID": project("dense_down", (inner, width), ("dense_inner", "model")),
    }
