"""Which experts bfloat16 chooses: native kernels beside transformers, and transformers beside itself; needs torch.

    python -m benchmarks.bfloat16_routing [--out FILE.json]

One random checkpoint in bfloat16 per family that transformers has: 8 layers, 256 wide, 64 experts, top 8. A
token-layer differs where its set of experts does. Transformers runs eager attention, with its experts `eager` or by
`grouped_mm`. Some of its families round router logits to bfloat16, ours never do: those run a second time with their
routers in float32, weights of experts rounded as before.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.routing_table import bfloat16_routing as as_table
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.replay.encoding import extract_routed_experts_from_meta_info
from tests.parity.family_reference import reference_model, routers_of, score
from tests.support.models.families import FAMILY_CASES, FamilyCase

SIZES = {"hidden_size": 256, "num_hidden_layers": 8, "vocab_size": 512}
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 64)
TOP_K = dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 8)
PROMPTS = np.random.default_rng(9).integers(3, SIZES["vocab_size"], (16, 64)).tolist()
ROUTED_IN_BFLOAT16 = (
    "qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss", "minimax_m2", "granitemoe", "afmoe", "laguna",
    "gemma4_text", "step3p5",
)  # fmt: skip
"""Families whose routers transformers computes in the model's dtype."""
FAMILIES = tuple(case.family for case in FAMILY_CASES if not case.variant and case.family in CONFIG_MAPPING)


def larger_case(family: str) -> FamilyCase:
    """Return the first case of a family with more layers and experts, so that bfloat16 shows."""
    (case,) = (case for case in FAMILY_CASES if case.family == family and not case.variant)
    changes = {name: size for name, size in (EXPERTS | TOP_K).items() if name in case.config}
    num_layers = SIZES["num_hidden_layers"]
    by_layer = {
        name: (value * num_layers)[:num_layers] for name, value in case.config.items() if isinstance(value, list)
    }
    return FamilyCase(family, 0, {**case.config, **SIZES, **changes, **by_layer})


def measure(family: str, directory: Path) -> dict[str, Any]:
    """Return shares of token-layers with different sets for each pair of ways to compute them, and `token_layers`."""
    whole, rounded = directory / "float32", directory / "bfloat16"
    reference_model(larger_case(family)).save(whole)
    load(whole, experts="eager", dtype=torch.bfloat16).save_pretrained(rounded)
    for file in whole.glob("tokenizer*"):
        (rounded / file.name).write_bytes(file.read_bytes())
    chosen = {"native": native(rounded)}
    models = {"float32": ("eager", torch.float32)} | {name: (name, torch.bfloat16) for name in ("eager", "grouped_mm")}
    for name, (experts, dtype) in models.items():
        model = load(rounded, experts=experts, dtype=dtype)
        chosen[name] = score(model, PROMPTS).chosen
        if dtype == torch.bfloat16 and family in ROUTED_IN_BFLOAT16:
            route_in_float32(model)
            chosen[f"{name}, float32 router"] = score(model, PROMPTS).chosen
    sets = {name: np.sort(ids, axis=-1) for name, ids in chosen.items()}
    names = list(sets)
    differing = {
        f"{a} | {b}": float((sets[a] != sets[b]).any(-1).mean()) for i, a in enumerate(names) for b in names[i + 1 :]
    }
    return {"token_layers": int(np.prod(sets["native"].shape[:2])), "differing": differing}


def load(path: Path, *, experts: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of transformers from its files."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation=experts, local_files_only=True
    ).eval()


def route_in_float32(model: PreTrainedModel) -> None:
    """Have routers compute in float32; the weights that they give experts stay bfloat16."""
    for router in routers_of(model):
        router.float()
        router.register_forward_pre_hook(lambda _router, inputs: (inputs[0].float(), *inputs[1:]))
        router.register_forward_hook(
            lambda _router, _inputs, outputs: (outputs[0], outputs[1].to(torch.bfloat16), outputs[2])
        )


def native(path: Path) -> np.ndarray:
    """Return experts of all tokens by the native kernels: [tokens, MoE layers, k]."""
    with Engine(
        str(path), cpu_kernels="native", dtype="bfloat16", enable_return_routed_experts=True,
        max_running_requests=4, num_pages=64, max_step_tokens=64, precompile_bs_paddings=[4],
    ) as engine:  # fmt: skip
        answers = engine.generate(input_ids=PROMPTS, sampling_params={"max_new_tokens": 0}, return_routed_experts=True)
        layout = engine.card.routing
    return np.concatenate([_rows(answer, layout) for answer in answers])


def _rows(answer: dict[str, Any], layout: Any) -> np.ndarray:
    flat = extract_routed_experts_from_meta_info(answer)
    return flat.reshape(-1, layout.num_hidden_layers, layout.top_k)[:, list(layout.layer_ids)]


def measure_all(families: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Measure every family; note each as it ends."""
    found = {}
    for family in families:
        with tempfile.TemporaryDirectory(prefix="routing-") as directory:
            found[family] = measure(family, Path(directory))
        note(f"{family}: {found[family]['differing']}")
    return found


def main() -> None:
    """Measure, print the table, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--out", type=Path, default=RESULTS / "bfloat16_routing.json")
    arguments = parser.parse_args()
    machine = machine_facts(load_before_start())
    result = {"machine": machine, "families": measure_all(arguments.families)}
    print(as_table(result))
    save({"bfloat16_routing": result}, arguments.out)


if __name__ == "__main__":
    main()
