"""The one tree that states every parameter's shape, dtype, logical axes, and place in a checkpoint.

Parameters of like layers are stacked on leading dimensions: attention over all layers, dense MLPs over the dense
layers, experts over [MoE layers, expert slots]. Loading, initialising, sharding and memory sizing all read this tree.
"""

# L layers   M MoE layers   N dense layers   D model width   H query heads   G KV heads   h head width
# R query latent   C latent, kept with the rotated key in kv_a   E experts   P expert slots   F expert width
# I dense width   V vocabulary

from __future__ import annotations

from dataclasses import replace

from rayserve_moe.model.expert_parameters import dense_specs, router_specs, shared_specs, slot_specs
from rayserve_moe.model.param_spec import TRANSPOSED, FileForm, ParamSpec
from rayserve_moe.model.spec import LatentSpec, ModelSpec


def kv_repeats(spec: ModelSpec, tensor_size: int) -> int:
    """How often each KV head is held, so that every device of the tensor axis has one."""
    return max(1, tensor_size // spec.attention.num_kv_heads)


def parameter_specs(
    spec: ModelSpec,
    *,
    dtype: str,
    expert_dtype: str = "",
    tensor_size: int = 1,
    num_devices: int = 1,
    num_redundant: int = 0,
) -> dict[str, dict[str, ParamSpec]]:
    """State all parameters of `spec` in compute dtype `dtype` (the router and its biases stay float32).

    `expert_dtype` is that of the matrices of experts where it is another: of 8 bits, with float32 scales.
    `tensor_size` is the number of devices that share the heads: it decides how often KV heads are repeated.
    `num_devices` are all of them: they share the vocabulary, which is padded until it divides. A layer has
    `num_redundant` expert slots more than experts.
    """
    tree = {
        "embedding": _embedding_specs(spec, dtype, num_devices),
        "attention": _latent_specs(spec, spec.attention.latent, dtype)
        if spec.attention.latent
        else _attention_specs(spec, dtype, kv_repeats(spec, tensor_size)),
        "mlp_norm": {"scale": _norm(spec, "mlp_norm", dtype)},
        "experts": router_specs(spec)
        | slot_specs(spec, dtype=dtype, expert_dtype=expert_dtype, num_redundant=num_redundant),
    }
    if spec.dense_layer_ids:
        tree["dense"] = dense_specs(spec, dtype)
    if spec.experts.shared != "none":
        tree["shared"] = shared_specs(spec, dtype)
    return tree


def _norm(spec: ModelSpec, role: str, dtype: str) -> ParamSpec:
    return ParamSpec(
        (spec.num_layers, spec.hidden_size), dtype, ("layers", "model"), role, _all_layers(spec), initial="ones"
    )


def _all_layers(spec: ModelSpec) -> tuple[int, ...]:
    return tuple(range(spec.num_layers))


def _embedding_specs(spec: ModelSpec, dtype: str, num_devices: int) -> dict[str, ParamSpec]:
    table, words = (spec.vocab_size, spec.hidden_size), ("vocabulary", "model")
    rows = words if spec.tie_embeddings else ("vocabulary", "table_row")
    specs = {
        "table_VD": ParamSpec(table, dtype, rows, "embedding").padded("vocabulary", num_devices),
        "final_norm_D": ParamSpec((spec.hidden_size,), dtype, ("model",), "final_norm", initial="ones"),
    }
    if not spec.tie_embeddings:
        specs["head_VD"] = ParamSpec(table, dtype, words, "head").padded("vocabulary", num_devices)
    return specs


def _attention_specs(spec: ModelSpec, dtype: str, repeats: int) -> dict[str, ParamSpec]:
    attention, layers = spec.attention, _all_layers(spec)
    width, q_width = spec.hidden_size, attention.num_heads * attention.head_dim
    kv_width = attention.num_kv_heads * attention.head_dim * repeats

    def project(role: str, shape: tuple[int, int], axes: tuple[str, str]) -> ParamSpec:
        return ParamSpec((len(layers), *shape), dtype, ("layers", *axes), role, layers, file=TRANSPOSED)

    def of_kv_heads(spec: ParamSpec) -> ParamSpec:
        return replace(spec, file=replace(spec.file, repeats=repeats, repeat_width=attention.head_dim))

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
    if attention.qk_norm == "full":
        specs["q_norm_LH"] = per_layer("q_norm", q_width, "heads", "ones")
        specs["k_norm_LG"] = of_kv_heads(per_layer("k_norm", kv_width, "kv_heads", "ones"))
    if attention.sinks:
        specs["sinks_LA"] = per_layer("sinks", attention.num_heads, "heads", "normal")
    if attention.bias:
        specs["q_bias_LH"] = per_layer("q_bias", q_width, "heads", "normal")
        specs["k_bias_LG"] = of_kv_heads(per_layer("k_bias", kv_width, "kv_heads", "normal"))
        specs["v_bias_LG"] = of_kv_heads(per_layer("v_bias", kv_width, "kv_heads", "normal"))
    if attention.output_bias:
        specs["o_bias_LD"] = per_layer("o_bias", width, "model", "normal")
    return specs | (_cut_out_of_one(specs, spec) if attention.fused_qkv else {})


def _cut_out_of_one(specs: dict[str, ParamSpec], spec: ModelSpec) -> dict[str, ParamSpec]:
    """Parameters of q, k and v whose columns follow each other in one tensor of the file."""
    attention = spec.attention
    q_width, kv_width = (count * attention.head_dim for count in (attention.num_heads, attention.num_kv_heads))
    starts = {"q_": 0, "k_": q_width, "v_": q_width + kv_width}
    return {
        name: replace(found, file=replace(found.file, start=starts[name[:2]], num_columns=q_width + 2 * kv_width))
        for name, found in specs.items()
        if name[:2] in starts and "norm" not in name
    }


def _latent_specs(spec: ModelSpec, latent: LatentSpec, dtype: str) -> dict[str, ParamSpec]:
    """Latent attention: what leads into latents is held by every device, what leads out of them by heads.

    A file has the keys and values of a head next to each other in one tensor (role `kv_b`), we hold them apart, each as
    it lies there: XLA copies the right side of a product per head whose heads stand last, in every layer.
    """
    attention, layers = spec.attention, _all_layers(spec)
    width, cached = spec.hidden_size, latent.kv_lora_rank + latent.rope_dim
    q_width, o_width = (attention.num_heads * size for size in (attention.head_dim, latent.value_dim))
    q_latent = latent.q_lora_rank

    def stack(role: str, shape: tuple[int, ...], axes: tuple[str | None, ...], initial: str = "normal") -> ParamSpec:
        axes, file = ("layers", *axes), FileForm(transposed=len(shape) > 1)
        return ParamSpec((len(layers), *shape), dtype, axes, role, layers, file=file, initial=initial)

    def of_latent(first: int, size: int) -> ParamSpec:
        both = stack("kv_b", (latent.kv_lora_rank, attention.num_heads * size), (None, "heads"))
        file = replace(both.file, repeat_width=size, period=latent.nope_dim + latent.value_dim, start=first)
        return replace(both, file=file).as_in_files()

    specs = {
        "norm_LD": _norm(spec, "attention_norm", dtype),
        "kv_a_LDC": stack("kv_a", (width, cached), ("model", None)),
        "kv_a_norm_LC": stack("kv_a_norm", (latent.kv_lora_rank,), (None,), "ones"),
        "k_b_LHC": of_latent(0, latent.nope_dim),
        "v_b_LHC": of_latent(latent.nope_dim, latent.value_dim),
        "o_LHD": stack("o", (o_width, width), ("heads", "model")),
    }
    if q_latent is None:
        specs["q_LDH"] = stack("q", (width, q_width), ("model", "heads"))
    else:
        specs["q_a_LDR"] = stack("q_a", (width, q_latent), ("model", None))
        specs["q_a_norm_LR"] = stack("q_a_norm", (q_latent,), (None,), "ones")
        specs["q_b_LRH"] = stack("q_b", (q_latent, q_width), (None, "heads"))
    if attention.bias:
        specs["kv_a_bias_LC"] = stack("kv_a_bias", (cached,), (None,))
        if q_latent is not None:
            specs["q_a_bias_LR"] = stack("q_a_bias", (q_latent,), (None,))
    if attention.output_bias:
        specs["o_bias_LD"] = stack("o_bias", (width,), ("model",))
    return specs
