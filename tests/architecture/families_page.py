"""The page of model families, written from their modules by `python -m tests.architecture.families_page`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rayserve_moe.model.family_table import FAMILIES, spec_from_config
from rayserve_moe.model.layers.attention import GroupedAttention
from tests.support.models.families import FAMILY_CASES, config_of
from tests.support.text.tokenizer_forms import FORM_OF_FAMILY, FORMS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
INTRODUCTION = """# Model families

Written from `src/rayserve_moe/model/families` by `python -m tests.architecture.families_page`. A checkpoint is served
when its `config.json` names one of these architectures. "What it needs" lists the knobs of `model/spec.py` and
`model/layers` that are away from their defaults in the models on which every family is compared with transformers.
Another value of a key under "Served for" raises `UnsupportedModelError` with the key and the value; so do scalings of
the rotation other than YaRN and Llama 3's (and the fixed `alpha` of Hunyuan), and quantised files in a format that is
not read.

In DeepSeek-V3.2 and GLM-5 (`dsa`), an index chooses the `index_topk` tokens that each token sees. Equal scores go to
the lower position, so that the choice does not depend on chunks, other requests or drafts. A score of NaN is the
highest, here and in MiniMax-M3: the output shows it. `dsa_shared` layers take the choice of the last layer with an
index. Contexts of up to `index_topk` tokens have the bits of dense attention.

On TPUs, tokens that see at most `index_topk` tokens are attended by the paged kernel of dense attention. Beyond, a
kernel scores the keys and chooses, for prompts and single tokens alike; devices of the tensor axis share the tokens. A
kernel attends single tokens to copies of the chosen rows. Tokens of prompts share the pages that they read, under a
mask in the paged kernel, up to a context from which copies cost less: 60k tokens with 32 heads on a v5p device, 478k
with 16 heads on v6e.

In MiniMax-M3 (`block_gqa`), an index chooses the `sparse_topk_blocks` blocks of `sparse_block_size` keys that each
token sees, by each head of the index for the query heads of its KV heads. The score of a block is its largest product;
equal scores go to the lower block. Contexts of up to that many blocks have the bits of dense attention. Native CPU
kernels skip blocks that are not chosen. On TPUs, XLA scores the keys of longer contexts. With blocks of 128 and heads
of at least 128, the paged kernel reads only the chosen pages for single tokens, and masks prompts.

Keys of published files are honoured where transformers ignores them: `first_k_dense_replace` of Hy3, `rotary_dim` of
MiniMax-M3, `route_norm` of Trinity, `mlp_only_layers`, `norm_topk_prob` and `gating_types` of Laguna, and of MiMo
`hybrid_layer_pattern`, `moe_layer_freq`, `layernorm_epsilon`, `rope_theta`, the `swa_*` and both flags of sinks. A
window of MiMo is a token more than `sliding_window_size`, as in transformers. Ling 3 bounds activations by
`expert_swiglu_limit_list` and `share_expert_swiglu_limit_list`.

The files of Hy3 name no dtype and hold bfloat16. Multimodal models are served without their vision tower: an image in a
request is rejected with an error that names its field.

Of Gemma 4 the models with experts are served (26B-A4B). The heads of its layers without a window are read from
`global_head_dim` and `num_global_key_value_heads`, or from `per_layer_config`, which transformers writes.

In Nemotron-3 (`mamba2`) a layer is one of Mamba-2, attention, an MLP or experts. Layer ids and routing rows count all
of them. The step of a token is at least `time_step_min`, for prompts and single tokens; transformers bounds prompts
only. `NEXTN` drafts with a prediction layer of attention and experts (`mtp_hybrid_override_pattern` `*E`). On TPUs,
XLA computes the recurrence in pieces of up to 8 tokens, one after the other, and
[copies states](figures/families.md#how-to-read-it). Experts without a gate are multiplied by `grouped_ffn` or
`ragged_dot`, without the fused exchanges.

`swa` is grouped attention of layers with windows whose rotation or heads differ from the other layers.

Files may be quantised: block fp8 (`fp8`), MXFP4 (`mxfp4`), NVFP4 and fp8 of Model Optimizer (`modelopt`, or
`hf_quant_config.json` of older exports), and NVFP4, MXFP4, symmetric int4, int8 or fp8 of `compressed-tensors`, each
with a tensor per expert; block fp8, MXFP4 and NVFP4 of Model Optimizer also with a tensor of all experts. Weights are
decoded while they are read; `expert_dtype` holds experts in 8 bits.

The reference kernels compute every family in float32 and bfloat16 on any mesh, and the native CPU kernels in bfloat16.

A checkpoint's `tokenizer.json` may be byte-level (GPT-2's, tiktoken's and tekken's in that file), or fall back to bytes
as SentencePiece's do (Mixtral, Gemma). Without that file, `tiktoken.model` of Kimi-K2 and Moonlight, `hy.tiktoken` of
Hunyuan-A13B, or `tekken.json` of Mistral is read ([ADR 0039](adr/0039-tokenizers-of-rank-files.md)). A SentencePiece
`tokenizer.model` alone is refused. Code in a checkpoint is never run.

`make published` holds the tokenizers of Qwen3, DeepSeek-V3, gpt-oss, Llama 3.1, Mistral Nemo, Claude, Gemma 3 and
Llama 2 to transformers, and the rank files of Kimi-K2 and Mistral to tiktoken.

A model of each family is started with a small tokenizer in the published form of its own, which "Tokenizer" describes;
the published tokenizer is named where `make published` has it.

| Architecture | Model | What it needs | Served for | Tokenizer |
|---|---|---|---|---|
"""
LIMITS = ("expert_limit", "mlp_limit")
SEPARATE = ("layout", "fused_qkv")


def page() -> str:
    """Return the page's text."""
    return INTRODUCTION + "".join(_row(name, module) for name, module in sorted(FAMILIES.items()))


def _row(name: str, module: ModuleType) -> str:
    family = module.__name__.rsplit(".", 1)[1]
    knobs: dict[str, None] = {}
    for case in FAMILY_CASES:
        if case.family == family:
            knobs |= dict.fromkeys(_knobs(spec_from_config(config_of(case))))
    said = (module.__doc__ or "").split("\n")[0].rstrip(".")
    served_for = ", ".join(f"`{key}` {values}" for key, values in _served_for(module))
    return f"| `{name}` | {said} | {', '.join(f'`{knob}`' for knob in knobs)} | {served_for} | {_tokenizer(family)} |\n"


def _tokenizer(family: str) -> str:
    form = FORMS[FORM_OF_FAMILY[family]]
    return f"{form.said}: {form.published}" if form.published else form.said


def _knobs(spec: Any) -> Iterator[str]:
    for knob in fields(spec):
        value = getattr(spec, knob.name)
        if knob.name == "mixers":
            yield from (mixer.kind for mixer in value if mixer.kind != GroupedAttention.kind)
            yield from ("windows",) if spec.has_windows else ()
            yield from ("post_norms",) if spec.has_post_norms else ()
            yield from ("has_scalar",) if spec.has_scalars else ()
            yield from (name for name in LIMITS if any(getattr(layer, name) for layer in spec.layers))
            yield from (name for mixer in value for name in _knobs(mixer))
        elif is_dataclass(value) and knob.default is not None:
            yield from _knobs(value)
        elif knob.default not in (MISSING, value) and knob.name not in ("shared_size", "kind"):
            yield knob.name


def _served_for(module: ModuleType) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "refuse_other_values":
            for keyword in node.keywords:
                assert isinstance(keyword.value, ast.Tuple), keyword.arg
                values = [ast.unparse(value) for value in keyword.value.elts]
                yield str(keyword.arg), " or ".join(values).replace("'", "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
