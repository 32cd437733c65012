"""Random draft models in published formats: EAGLE and EAGLE3 heads, and layers of multi-token prediction."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

SCALE = 0.2
AUX_KEY = "eagle_aux_hidden_state_layer_ids"
ENTERED, LEFT = [0, 1, 3], [0, 1, 2]
"""Layers of a target of three: the first by what enters them, also behind the last; the others by what leaves them."""


def write_eagle_head(
    directory: Path,
    target: dict[str, Any],
    *,
    algorithm: str = "EAGLE3",
    num_words: int = 0,
    seed: int = 0,
    layer: str = "midlayer",
    **config: Any,
) -> Path:
    """Write a head with random weights for a target of this `config.json`; `num_words` are those of its vocabulary, 0
    for all."""
    generator = np.random.default_rng(seed)
    width, words = target["hidden_size"], target["vocab_size"]
    is_eagle3 = algorithm == "EAGLE3"
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
    own = {
        **sizes,
        "architectures": ["LlamaForCausalLMEagle3" if is_eagle3 else "LlamaForCausalLMEagle"],
        "hidden_size": width,
        "vocab_size": words,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 512,
        "eagle_config": {AUX_KEY: LEFT} if is_eagle3 and AUX_KEY not in config else {},
        **({"draft_vocab_size": num_words} if num_words else {}),
        **config,
    }
    q_width, kv_width = (own[f"num_{kind}_heads"] * own["head_dim"] for kind in ("attention", "key_value"))
    read = 2 * width if is_eagle3 else width
    shapes = {
        "fc.weight": (width, (3 if is_eagle3 else 2) * width),
        f"{layer}.self_attn.q_proj.weight": (q_width, read),
        f"{layer}.self_attn.k_proj.weight": (kv_width, read),
        f"{layer}.self_attn.v_proj.weight": (kv_width, read),
        f"{layer}.self_attn.o_proj.weight": (width, q_width),
        f"{layer}.mlp.gate_proj.weight": (own["intermediate_size"], width),
        f"{layer}.mlp.up_proj.weight": (own["intermediate_size"], width),
        f"{layer}.mlp.down_proj.weight": (width, own["intermediate_size"]),
        f"{layer}.post_attention_layernorm.weight": (width,),
    }
    if is_eagle3:
        shapes |= {f"{layer}.{norm}.weight": (width,) for norm in ("input_layernorm", "hidden_norm")}
        shapes |= {"norm.weight": (width,), "lm_head.weight": (num_words or words, width)}
    else:
        shapes["fc.bias"] = (width,)
    tensors = {name: _drawn(generator, shape) for name, shape in shapes.items()}
    if num_words:
        ids = np.sort(generator.choice(words, num_words, replace=False))
        tensors["d2t"] = ids - np.arange(num_words)
        tensors["t2d"] = np.isin(np.arange(words), ids)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(own))
    save_file(tensors, directory / "model.safetensors")
    return directory


def with_prediction_layer(directory: Path, target: Path, *, seed: int = 0) -> Path:
    """Copy a checkpoint of one file with a random layer behind its last: one of its kind, and what joins its inputs."""
    shutil.copytree(target, directory)
    config = json.loads((target / "config.json").read_text())
    tensors, generator = load_file(target / "model.safetensors"), np.random.default_rng(seed)
    last, width = config["num_hidden_layers"] - 1, config["hidden_size"]
    before, behind = (f"model.layers.{layer}." for layer in (last, last + 1))
    like = {name.replace(before, behind): array for name, array in tensors.items() if name.startswith(before)}
    own = {name: _drawn(generator, array.shape).astype(array.dtype) for name, array in like.items()}
    own[f"{behind}eh_proj.weight"] = _drawn(generator, (width, 2 * width))
    own |= {f"{behind}{norm}.weight": _drawn(generator, (width,)) for norm in ("enorm", "hnorm", "shared_head.norm")}
    own[f"{behind}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    own[f"{behind}shared_head.head.weight"] = tensors["lm_head.weight"]
    (directory / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    save_file(tensors | own, directory / "model.safetensors")
    return directory


def _drawn(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    jitter = generator.standard_normal(shape) * SCALE
    return (jitter + (len(shape) == 1)).astype(np.float32)
