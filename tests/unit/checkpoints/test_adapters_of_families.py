"""Adapters of every matrix of every family, in every layout, merge as numpy merges them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rayserve_moe.checkpoints.adapters.config import adapter_config_of
from rayserve_moe.checkpoints.adapters.placing import merged_tensors
from rayserve_moe.checkpoints.files import CheckpointError, open_checkpoint
from rayserve_moe.model.family_table import rules_of, spec_from_config
from rayserve_moe.model.parameters import parameter_specs, parameters_in_files
from tests.support.checkpoints.adapters import LAYOUTS, make_adapter
from tests.support.models.families import FAMILY_CASES, FamilyCase, config_of, write_family

SAMPLED = ("gpt_oss", "granitemoe")
"""Families whose files hold all experts in a tensor: [in, out] with gate and up in turns, and under other names."""
FIRST = [
    pytest.param(case, id=case.name, marks=() if case.family in SAMPLED else pytest.mark.slow)
    for case in FAMILY_CASES
    if case.variant == 0
]


@pytest.mark.parametrize("case", FIRST)
def test_every_matrix_of_a_family_takes_an_adapter(case: FamilyCase, tmp_path: Path) -> None:
    checkpoint = write_family(case, tmp_path / "model", seed=3)
    files = open_checkpoint(checkpoint)
    spec, rules = spec_from_config(files.config), rules_of(files.config, files.tensors)
    tree = parameters_in_files(parameter_specs(spec, dtype="float32", tensor_size=2), rules, spec=spec)
    for layout in LAYOUTS if spec.experts.has_gate else ("per_expert",):
        made = make_adapter(checkpoint, layout)
        adapter = merged_tensors(adapter_config_of(made.config), made.tensors, tree=tree, rules=rules)
        merging = replace(files, adapter=adapter)
        for name, wanted in made.merged.items():
            np.testing.assert_allclose(merging.read(name), wanted, rtol=0, atol=1e-7, err_msg=f"{layout}: {name}")
            part = tuple(slice(size // 2, size) for size in wanted.shape)
            np.testing.assert_array_equal(merging.read(name, part), merging.read(name)[part])


def test_a_gate_of_experts_without_one_is_refused(tmp_path: Path) -> None:
    """Every other matrix of such a model takes an adapter: projections, both parts of experts, and of MLPs."""
    (case,) = (case for case in FAMILY_CASES if case.name == "nemotron_h-1")
    checkpoint = write_family(case, tmp_path / "model", seed=3)
    files = open_checkpoint(checkpoint)
    spec, rules = spec_from_config(files.config), rules_of(files.config, files.tensors)
    tree = parameter_specs(spec, dtype="float32")
    made = make_adapter(checkpoint, "per_expert")
    adapter = merged_tensors(adapter_config_of(made.config), made.tensors, tree=tree, rules=rules)
    merging = replace(files, adapter=adapter)
    for name, wanted in made.merged.items():
        np.testing.assert_allclose(merging.read(name), wanted, rtol=0, atol=1e-7, err_msg=name)
    assert {name.rsplit(".", 2)[-2] for name in made.merged} >= {"in_proj", "fc1_latent_proj", "up_proj", "gate"}
    gates = {name.replace("up_proj", "gate_proj"): value for name, value in made.tensors.items() if "experts.0" in name}
    with pytest.raises(CheckpointError, match="the experts of this model have no gate"):
        merged_tensors(adapter_config_of(made.config), gates, tree=tree, rules=rules)


def test_parts_of_a_fused_matrix_take_adapters_of_their_own() -> None:
    """Tinker has q, k and v apart, and this family's files do not: k changes its rows alone."""
    config = config_of(next(case for case in FAMILY_CASES if case.family == "bailing_moe_v2"))
    spec, rules = spec_from_config(config), rules_of(config)
    tree = parameters_in_files(parameter_specs(spec, dtype="float32", tensor_size=4), rules, spec=spec)
    name = "model.layers.1.attention.query_key_value.weight"
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    random = np.random.default_rng(0)
    a = random.normal(size=(4, config["hidden_size"])).astype(np.float32)
    b = random.normal(size=(kv_heads * size, 4)).astype(np.float32)
    module = "base_model.model.model.layers.1.self_attn.k_proj.lora_"
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 4}
    tensors = {f"{module}A.weight": a, f"{module}B.weight": b}
    adapter = merged_tensors(adapter_config_of(fields), tensors, tree=tree, rules=rules)
    shape = (heads + 2 * kv_heads) * size, config["hidden_size"]
    found = adapter.merged(name, np.zeros(shape, np.float32), index=[(0, each) for each in shape])
    of_k = slice(heads * size, (heads + kv_heads) * size)
    np.testing.assert_allclose(found[of_k], b @ a, rtol=1e-5, atol=1e-5)
    found[of_k] = 0
    assert not found.any()
