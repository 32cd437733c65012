"""Adapters beside the weights: every matrix lands in the columns that a parameter holds, or the adapter is rejected."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rayserve_moe.checkpoints.adapters.config import adapter_config_of
from rayserve_moe.checkpoints.adapters.unmerged import held_adapter
from rayserve_moe.checkpoints.files import CheckpointError, open_checkpoint
from rayserve_moe.checkpoints.names import tensor_name
from rayserve_moe.config.adapters import AdapterSettings
from rayserve_moe.model.adapters import adapted_matrices
from rayserve_moe.model.family_table import rules_of, spec_from_config
from rayserve_moe.model.parameters import parameter_specs, parameters_in_files
from tests.support.checkpoints.adapters import LAYOUTS, make_adapter, make_adapter_beside
from tests.support.models.families import FAMILY_CASES, FamilyCase, config_of, write_family

SETTINGS = AdapterSettings(num_slots=2, max_rank=6)
SAMPLED = ("deepseek_v3", "bailing_moe_v2")
"""Families with latents, and with queries, keys and values in a tensor."""
FIRST = [
    pytest.param(case, id=case.name, marks=() if case.family in SAMPLED else pytest.mark.slow)
    for case in FAMILY_CASES
    if case.variant == 0
]


def held(config, tensors, model, *, names=(), dtype="float32", tensor_size=1, experts=False, shares_outer=False):
    spec, rules = spec_from_config(model), rules_of(model, names)
    specs = parameter_specs(spec, dtype=dtype, tensor_size=tensor_size)
    tree = parameters_in_files(specs, rules, spec=spec)
    matrices = list(adapted_matrices(specs, spec, experts=experts, shares_outer=shares_outer))
    found = held_adapter(
        adapter_config_of(config), tensors, matrices=matrices, tree=tree, rules=rules, settings=SETTINGS, dtype=dtype
    )
    return found, {(matrix.group, matrix.name): matrix for matrix in matrices}


@pytest.mark.parametrize("case", FIRST)
def test_products_are_what_merging_adds_to_each_parameter(case: FamilyCase, tmp_path: Path):
    """Place matrices with copied KV heads, and parameters that are parts of a file's tensor."""
    checkpoint = write_family(case, tmp_path / "model", seed=3)
    files, made = open_checkpoint(checkpoint), make_adapter_beside(checkpoint, seed=5, rank=3)
    pairs, matrices = held(made.config, made.tensors, files.config, names=files.tensors, tensor_size=4)
    assert set(pairs) == set(matrices)
    spec, rules = spec_from_config(files.config), rules_of(files.config, files.tensors)
    tree = parameters_in_files(parameter_specs(spec, dtype="float32", tensor_size=4), rules, spec=spec)
    for (group, name), (a_LRI, b_LRO) in pairs.items():
        form = tree[group][name]
        for place, layer in enumerate(form.layers):
            tensor = rules[form.role].format(layer=layer, expert=None)
            delta = made.merged[tensor] - files.read(tensor).astype(np.float64)
            columns = form.columns_in_file(0, form.filled_shape[form.column_dim])
            np.testing.assert_allclose(b_LRO[place].T @ a_LRI[place], delta[columns], atol=1e-6, err_msg=name)
        assert not a_LRI[:, 3:].any() and not b_LRO[:, 3:].any(), "ranks are padded by zeros"


QWEN = config_of(next(case for case in FAMILY_CASES if case.family == "qwen3_moe"))
MODULE = "base_model.model.model.layers.1."


def one_pair(module: str, outputs: int, inputs: int, rank: int = 4):
    random = np.random.default_rng(0)
    return {
        f"{MODULE}{module}.lora_A.weight": random.normal(size=(rank, inputs)).astype(np.float32),
        f"{MODULE}{module}.lora_B.weight": random.normal(size=(outputs, rank)).astype(np.float32),
    }


def config(rank: int = 4, **fields):
    return {"peft_type": "LORA", "r": rank, "lora_alpha": 8, **fields}


def test_matrices_are_rounded_once_with_the_scale_in_b():
    outputs, inputs = QWEN["hidden_size"], QWEN["num_attention_heads"] * QWEN["head_dim"]
    tensors = one_pair("self_attn.o_proj", outputs, inputs)
    pairs, _ = held(config(use_rslora=True), tensors, QWEN, dtype="bfloat16")
    ((key, (a_LRI, b_LRO)),) = pairs.items()
    assert key[1] == "o_LHD" and a_LRI.dtype == b_LRO.dtype == ml_dtypes.bfloat16
    a, b = tensors.values()
    np.testing.assert_array_equal(a_LRI[1, :4], a.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(b_LRO[1, :4], (b.T * np.float32(4.0)).astype(ml_dtypes.bfloat16))
    assert not a_LRI[0].any() and not b_LRO[0].any(), "other layers have none"


def test_a_rank_above_the_programs_is_rejected():
    tensors = one_pair("self_attn.o_proj", QWEN["hidden_size"], QWEN["num_attention_heads"] * QWEN["head_dim"], 7)
    with pytest.raises(CheckpointError, match=r"o_proj.* rank 7 exceeds max_lora_rank 6"):
        held(config(7), tensors, QWEN)


OFTEN = {
    *(("qwen3_moe", layout) for layout in LAYOUTS),
    *((family, layout) for family in ("gpt_oss", "deepseek_v3", "qwen3_next") for layout in ("fused", "shared_outer")),
}
WITHOUT_GATE = {"nemotron_h": ("per_expert", "shared_outer")}
"""Layouts of families whose experts have no gate; the others hold gate and up together."""
EXPERT_LAYOUTS = [
    pytest.param(family, layout, marks=() if (family, layout) in OFTEN else pytest.mark.slow)
    for family in sorted({case.family for case in FAMILY_CASES})
    for layout in WITHOUT_GATE.get(family, LAYOUTS)
]


@pytest.mark.parametrize(("family", "layout"), EXPERT_LAYOUTS)
def test_experts_take_what_merging_adds_to_each(family: str, layout: str, tmp_path: Path):
    """In every layout, of files with tensors per expert, with halves and with gate and up in turn."""
    case = next(case for case in FAMILY_CASES if case.family == family)
    checkpoint = write_family(case, tmp_path / "model", seed=3)
    files, made = open_checkpoint(checkpoint), make_adapter_beside(checkpoint, seed=5, rank=3, experts=layout)
    pairs, matrices = held(made.config, made.tensors, files.config, names=files.tensors, experts=True)
    assert set(pairs) == set(matrices)
    spec, rules = spec_from_config(files.config), rules_of(files.config, files.tensors)
    tree = parameters_in_files(parameter_specs(spec, dtype="float32"), rules, spec=spec)
    for (group, name), (a_LERI, b_LERO) in pairs.items():
        form = tree[group][name]
        if not form.num_experts:
            continue
        columns = form.columns_in_file(0, form.filled_shape[form.column_dim])
        for place, expert in np.ndindex(a_LERI.shape[:2]):
            tensor = tensor_name(form, (place, expert), rules=rules)
            delta = made.merged[tensor] - files.read(tensor).astype(np.float64)
            delta = delta[expert] if form.file.has_all_experts else delta
            delta = delta if form.file.transposed or form.column_dim == 0 else delta.T
            ours = b_LERO[place, expert].T @ a_LERI[place, expert]
            np.testing.assert_allclose(ours, delta[columns], atol=1e-6, err_msg=f"{name} {place} {expert}")
        assert not a_LERI[:, :, 3:].any() and not b_LERO[:, :, 3:].any(), "ranks are padded by zeros"


SHARED_HALVES = {"gate_MPDF": 0, "up_MPDF": 0, "down_MPFD": 1}
"""The part of each pair that experts share."""


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_a_matrix_that_experts_share_is_held_once(family: str, tmp_path: Path):
    """A shared matrix equals the matrix of each expert, also from a file that repeats it for every expert."""
    case = next(case for case in FAMILY_CASES if case.family == family)
    checkpoint = write_family(case, tmp_path / "model", seed=3)
    files = open_checkpoint(checkpoint)
    made = make_adapter_beside(checkpoint, seed=5, rank=3, experts="shared_outer")
    repeated = {name: _for_each_expert(name, made.tensors) for name in made.tensors}
    num = spec_from_config(files.config).router.num_experts
    for tensors in (made.tensors, repeated):
        once, _ = held(made.config, tensors, files.config, names=files.tensors, experts=True, shares_outer=True)
        each, _ = held(made.config, tensors, files.config, names=files.tensors, experts=True)
        assert set(once) == set(each)
        for (group, name), pair in once.items():
            for part, array in enumerate(pair):
                is_shared = group == "experts" and SHARED_HALVES[name] == part
                wanted = each[group, name][part]
                assert array.ndim == wanted.ndim - is_shared
                np.testing.assert_array_equal(np.repeat(array[:, None], num, 1) if is_shared else array, wanted)


def _for_each_expert(name: str, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return a tensor of experts with a matrix for each; others as they are."""
    other = tensors[name.replace("lora_A", "lora_X").replace("lora_B", "lora_A").replace("lora_X", "lora_B")]
    times = max(1, len(other) // len(tensors[name])) if ".experts." in name else 1
    return np.repeat(tensors[name], times, axis=0)


@pytest.mark.parametrize("layout", ["fused", "per_expert", "per_parameter", "sglang"])
def test_experts_that_do_not_share_are_rejected_by_name(layout: str, tmp_path: Path):
    case = next(case for case in FAMILY_CASES if case.family == "qwen3_moe")
    made = make_adapter_beside(write_family(case, tmp_path / "model", seed=3), seed=5, rank=3, experts=layout)
    with pytest.raises(CheckpointError, match=r"tensor .*experts.*lora_A.* differ in .* by lora_shared_outer"):
        held(made.config, made.tensors, QWEN, experts=True, shares_outer=True)


@pytest.mark.parametrize(
    ("alpha", "value", "dtype"), [(1e308, 1.0, "float32"), (1e3, 3e38, "float32"), (4.0, 3.4e38, "bfloat16")]
)
def test_an_adapter_that_its_scale_makes_infinite_is_rejected(alpha: float, value: float, dtype: str):
    pair = one_pair("self_attn.o_proj", QWEN["hidden_size"], QWEN["num_attention_heads"] * QWEN["head_dim"])
    tensors = {name: np.full_like(each, value) for name, each in pair.items()}
    with pytest.raises(CheckpointError, match=rf"o_proj\.lora_A.* is not finite in {dtype}"):
        held(config(lora_alpha=alpha), tensors, QWEN, dtype=dtype)


def test_ranks_of_experts_above_the_programs_are_rejected(tmp_path: Path):
    case = next(case for case in FAMILY_CASES if case.family == "qwen3_moe")
    checkpoint = write_family(case, tmp_path / "model", seed=3)
    made = make_adapter_beside(checkpoint, seed=5, rank=7, experts="per_expert")
    of_experts = {name: value for name, value in made.tensors.items() if ".experts." in name}
    with pytest.raises(CheckpointError, match=r"experts.* rank 7 exceeds max_lora_rank 6"):
        held(made.config, of_experts, QWEN, experts=True)


def test_a_router_or_experts_are_rejected_with_the_name_of_the_merged_load(tmp_path: Path):
    router = one_pair("mlp.gate", spec_from_config(QWEN).router.num_experts, QWEN["hidden_size"])
    with pytest.raises(CheckpointError, match=r"gate\.lora_A.*takes no adapter beside the weights.*merge: true"):
        held(config(), router, QWEN)
    case = next(case for case in FAMILY_CASES if case.family == "qwen3_moe")
    made = make_adapter(write_family(case, tmp_path / "model", seed=3), "fused", others=False)
    with pytest.raises(CheckpointError, match=r"experts.*set lora_experts.*merge: true"):
        held(made.config, made.tensors, QWEN)
