"""TPUs accept `invariant_products` for the models and layouts whose steps are proven to add up rows in one order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from rayserve_moe.config.settings import SettingsError
from rayserve_moe.execution import native_kernels, tpu_invariance
from rayserve_moe.execution.programs.specs import programs_of, step_name
from rayserve_moe.execution.served_model import ServedModel
from rayserve_moe.execution.tpu_invariance import check_invariance, unsupported_kernels, unsupported_reason
from rayserve_moe.kernels.operations import Kernels
from rayserve_moe.kernels.reference import layers
from rayserve_moe.kernels.row_blocks import at_once
from rayserve_moe.kernels.table import TPU, TPU_INVARIANT
from rayserve_moe.model.spec import UnsupportedModelError
from rayserve_moe.tools.row_sums import PRODUCT, compared, differences, traced_sums
from rayserve_moe.tools.served_cases import case_of_model, lay_out

MODEL, SLICE = "qwen3-30b-a3b", "v6e:2x4"
MODELS = (MODEL, "gpt-oss-20b", "qwen3.5-35b-a3b")
slow = partial(pytest.param, marks=pytest.mark.slow)


def served_on(model: str, topology: str = SLICE, *, tp: int = 0, **values: Any) -> ServedModel:
    given = {"invariant_products": "on", "max_model_len": 4096, **values}
    return lay_out(case_of_model(model, topology, tp=tp, num_layers=4, values=given))


def smallest_and_largest(served: ServedModel) -> tuple[str, ...]:
    """Return the names of two steps. They sample other numbers of tokens, too."""
    return step_name(served.shapes[0]), step_name(served.shapes[-1])


def traced_differences(served: ServedModel) -> set[str]:
    """Return the lines whose sums differ between steps by what jax traces, without products of XLA."""
    plan, names = served.config.plan, smallest_and_largest(served)
    steps = [step for step in programs_of(served, num_pages=64) if step.name in names]
    sums = {step.name: traced_sums(step, plan) for step in steps}
    own = {name: [one for one in found if one.in_kernel or one.operation != PRODUCT] for name, found in sums.items()}
    return {each.line for each in compared(own)}


@pytest.mark.parametrize("model", MODELS)
def test_models_whose_compiled_steps_were_compared_are_accepted(model: str, monkeypatch: pytest.MonkeyPatch):
    served = served_on(model)
    family = served.config.spec.family
    assert served.config.kernels.name == TPU_INVARIANT.name
    assert unsupported_kernels(served) == ""
    with pytest.raises(SettingsError, match=f"compiled steps of {family} were not compared; set auto"):
        check_invariance(served)
    monkeypatch.setattr(tpu_invariance, "COMPILED_FAMILIES", frozenset({family}))
    check_invariance(served)


@pytest.mark.parametrize(
    ("model", "values", "reason"),
    [
        (MODEL, {"num_redundant_experts": 8}, "steps compute experts by .*; set expert_backend all_to_all"),
        (MODEL, {"expert_dtype": "int8"}, "steps compute experts by .*; set expert_backend all_to_all"),
        (MODEL, {"expert_backend": "replicated"}, "expert_backend replicated: a collective adds up"),
        (MODEL, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8"),
        (MODEL, {"max_loras": 2}, "max_loras"),
    ],
)
def test_others_are_refused_by_name(model: str, values: dict[str, Any], reason: str):
    with pytest.raises(SettingsError, match=f"invariant_products on: .*{reason}.*; set auto"):
        check_invariance(served_on(model, **values))


def test_kernels_of_other_attention_are_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="the tpu_invariant kernels have no multi-head latent attention"):
        served_on("deepseek-v3", "v6e:8x8")


def test_other_kernels_have_no_reason():
    assert unsupported_reason(served_on("gpt-oss-20b", invariant_products="auto")) == ""


@pytest.mark.parametrize("model", [MODEL, slow("gpt-oss-20b"), slow("qwen3.5-35b-a3b")])
def test_sums_of_steps_are_alike_as_traced(model: str):
    assert traced_differences(served_on(model)) == set()


FREE: dict[str, Kernels] = {
    "sum and norm": replace(TPU_INVARIANT, add_norm=TPU.add_norm),
    "rows": replace(TPU_INVARIANT, by_rows=at_once),
    "router": replace(TPU_INVARIANT, experts=replace(TPU_INVARIANT.experts, router_scores=layers.router_scores)),
    "sampling": replace(TPU_INVARIANT, sampling=TPU.sampling),
}
"""Tables with one operation whose order of sums depends on the rows of a step."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("planted", FREE)
def test_a_planted_free_tile_is_found(planted: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(native_kernels.INVARIANT, "tpu", FREE[planted])
    assert traced_differences(served_on(MODEL)) != set()


def differs(model: str, where: str) -> Any:
    """Return a model that servers refuse because its compiled steps add up rows in several orders."""
    return pytest.param(model, marks=pytest.mark.xfail(strict=True, raises=AssertionError, reason=f"XLA: {where}"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        differs(
            "gpt-oss-20b", "windows of 256 or 1,024 columns in the output of attention; other emitters in the router"
        ),
        differs("qwen3.5-35b-a3b", "other emitters for projections of 2,048 columns"),
    ],
)
def test_compiled_steps_add_up_rows_in_one_order(model: str):
    served = served_on(model)
    assert list(map(str, differences(served, names=smallest_and_largest(served)))) == []


@pytest.mark.slow
def test_a_head_that_the_compiler_turns_around_is_found(monkeypatch: pytest.MonkeyPatch):
    """The compiler swaps the head's operands in a decode step of one sequence, not in a step of 256."""
    monkeypatch.setitem(native_kernels.INVARIANT, "tpu", replace(TPU_INVARIANT, head=TPU.head))
    found = differences(served_on(MODEL, max_running_requests=32, precompile_bs_paddings=[4, 32]))
    assert any("head_logits" in each.line for each in found)
