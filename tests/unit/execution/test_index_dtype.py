"""Keys of an index take a byte per number where that is set, and nothing where no layer reads them."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from rayserve_moe.config.load import settings_from
from rayserve_moe.config.settings import SettingsError
from rayserve_moe.execution.served_model import ServedModel, runner_settings, served_model
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.states import token_states
from rayserve_moe.parallel.mesh import plan_for
from tests.support.models.families import FAMILY_CASES, config_of


def served(name: str, **settings: Any) -> ServedModel:
    (case,) = [case for case in FAMILY_CASES if case.name == name]
    found = settings_from({"model_path": "unused", "num_pages": 8, "dtype": "bfloat16", **settings})
    spec = spec_from_config(config_of(case))
    return served_model(spec, plan_for(jax.devices()[:1]), settings=runner_settings(found, found.model))


def bytes_of(model: ServedModel) -> dict[str, int]:
    """Bytes of a token in each state of a layer."""
    return {
        state.kind.name: state.row_bytes(model.config.plan, dtype=model.kv_dtype)
        for state in token_states(model.config)
    }


def test_keys_of_8_bits_take_half_the_memory_of_bfloat16():
    plain, narrow = bytes_of(served("deepseek_v32-0")), bytes_of(served("deepseek_v32-0", index_cache_dtype="fp8"))
    assert plain == {"latent_kv": 2 * (24 + 8), "index_keys": 2 * 16}
    assert narrow == {**plain, "index_keys": 16}
    model = served("deepseek_v32-0", index_cache_dtype="fp8")
    (pool,) = model.state(8).pools["index_keys"]
    assert pool.dtype.itemsize == 1 and pool.shape[-1] == 16


@pytest.mark.parametrize(("max_model_len", "is_kept"), [(24, False), (20, False), (25, True), (100, True)])
def test_contexts_within_the_choice_keep_no_keys(max_model_len: int, is_kept: bool):
    """With 24 chosen tokens and pages of 8."""
    model = served("glm_moe_dsa-1", max_model_len=max_model_len, page_size=8)
    assert ("index_keys" in bytes_of(model)) == ("index_keys" in model.state(8).pools) == is_kept


def test_models_without_an_index_refuse_it():
    for case in ("qwen3_moe-0", "minimax_m3_vl_text-1"):
        with pytest.raises(
            SettingsError, match=f"index_cache_dtype: {case[:-2]} has no sparse attention with an index"
        ):
            served(case, index_cache_dtype="fp8")
