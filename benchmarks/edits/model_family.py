"""A new family of known layers: Mixtral's under another name, whose router weights are not renormalized."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.edits.sampling_parameter import PROMPT, SETTINGS
from benchmarks.edits.scratch import Edit, Insertion
from rayserve_moe import Engine
from rayserve_moe.checkpoints.synthetic import Drawn, SyntheticModel, write_checkpoint

EDIT = Edit(
    new_files={
        "model/families/toy_moe.py": '''"""Toy: Mixtral without a window, whose router weights are not renormalized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import heads_of, layers_of, outline_of
from rayserve_moe.model.config_rope import rope_of
from rayserve_moe.model.config_values import integer_of, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import ExpertSpec, ModelSpec, RouterSpec
from rayserve_moe.model.tensor_names import ATTENTION, BLOCK_SPARSE_EXPERTS, DECODER

ARCHITECTURE = "ToyMoeForCausalLM"

CHECKPOINT_RULES = DECODER | ATTENTION | BLOCK_SPARSE_EXPERTS


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json`; UnsupportedModelError names the key and the value that this family does not compute."""
    refuse_other_values(config, "toy_moe", hidden_act=("silu",), sliding_window=(None,))
    return ModelSpec(
        family="toy_moe",
        **outline_of(config, norm_eps=1e-5, max_positions=131072),
        layers=layers_of(config, "gqa"),
        dense_intermediate_size=0,
        mixers=(GroupedAttention(**heads_of(config), rope=rope_of(config, "toy_moe", theta=1e6)),),
        router=RouterSpec(
            num_experts=integer_of(config, "num_local_experts"),
            top_k=integer_of(config, "num_experts_per_tok"),
            renormalize=False,
        ),
        experts=ExpertSpec(integer_of(config, "intermediate_size")),
    )
'''
    },
    listings={
        "model/families/__init__.py": (
            Insertion(
                "from rayserve_moe.model.families import qwen3_moe as qwen3_moe\n",
                "from rayserve_moe.model.families import toy_moe as toy_moe\n",
            ),
        )
    },
)
TOP_K = 2
CONFIG: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
ARCHITECTURES = {"toy_moe": "ToyMoeForCausalLM", "mixtral": "MixtralForCausalLM"}
"""Both have tensors of the same names, so that a seed gives them the same weights."""


def observe() -> dict[str, Any]:
    """Return `[log-prob, id]` of every output by family, over the same random weights."""
    with TemporaryDirectory() as folder:
        return {name: _outputs(Path(folder) / name, architecture) for name, architecture in ARCHITECTURES.items()}


def _outputs(directory: Path, architecture: str) -> list[list[float]]:
    model = SyntheticModel(CONFIG | {"architectures": [architecture]}, drawn=Drawn(scale=0.2))
    with Engine(str(write_checkpoint(directory, model, dtype="float32")), **SETTINGS) as engine:
        answer = engine.generate(PROMPT, temperature=0, max_new_tokens=8, ignore_eos=True, return_logprob=True)
    assert isinstance(answer, dict), "one prompt has one answer"
    return [[logprob, token_id] for logprob, token_id, _ in answer["meta_info"]["output_token_logprobs"]]
