"""Options that make up a model: sizes in place of those of a model's config."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

MIXERS = {"gqa": "qwen3-30b-a3b", "windowed": "gpt-oss-120b", "mla": "deepseek-v3", "delta": "qwen3-next-80b-a3b"}
"""Presets by the mixer of their layers; `windowed` and `delta` alternate with full attention."""


@dataclass(frozen=True)
class Size:
    """A size of a model."""

    help: str
    keys: tuple[str, ...]
    """Keys of `config.json`; the first that a family has counts."""
    minimum: int = 1


SIZES: dict[str, Size] = {
    "layers": Size("number of layers", ("num_hidden_layers",)),
    "width": Size("width of the hidden state", ("hidden_size",)),
    "heads": Size("query heads", ("num_attention_heads",)),
    "kv_heads": Size("key and value heads", ("num_key_value_heads",)),
    "head_dim": Size("width of a head", ("head_dim", "v_head_dim")),
    "latent_width": Size("width of the latent keys of --mixer mla", ("kv_lora_rank",)),
    "experts": Size("experts of a layer", ("num_experts", "n_routed_experts", "num_local_experts")),
    "top_k": Size("experts of a token", ("num_experts_per_tok",)),
    "expert_width": Size("inner width of an expert", ("moe_intermediate_size", "intermediate_size")),
    "shared_width": Size("inner width of the shared expert", ("shared_expert_intermediate_size",)),
    "dense_layers": Size("first layers without experts", ("first_k_dense_replace",), minimum=0),
    "vocabulary": Size("tokens of the vocabulary", ("vocab_size",)),
    "positions": Size("maximum tokens of a sequence", ("max_position_embeddings",)),
}
"""Sizes by option."""


def flag(name: str) -> str:
    """Return an option as it is typed."""
    return f"--{name.replace('_', '-')}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("made-up model", "sizes in place of those of --model, or of a preset of --mixer")
    group.add_argument("--mixer", choices=list(MIXERS), default="", help="layers of a made-up model, without --model")
    for name, size in SIZES.items():
        group.add_argument(flag(name), type=int, help=size.help)
    group.add_argument("--save-config", default="", help="write config.json to this folder, for compile-check --model")


def requested_sizes(options: argparse.Namespace) -> dict[str, int]:
    """Return the sizes that were passed. Raises ValueError for one that is too small."""
    sizes = {name: value for name in SIZES if (value := getattr(options, name)) is not None}
    for name, value in sizes.items():
        if value < SIZES[name].minimum:
            raise ValueError(f"{flag(name)} {value} is less than {SIZES[name].minimum}")
    return sizes
