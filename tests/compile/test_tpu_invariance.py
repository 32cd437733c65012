"""TPUs accept `invariant_products` for the models and layouts whose steps are proven to add up rows in one order."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rayserve_moe.config.settings import SettingsError
from rayserve_moe.execution import compared_steps, native_kernels
from rayserve_moe.execution.compared_steps import difference_from_compared
from rayserve_moe.execution.programs.specs import programs_of, step_name
from rayserve_moe.execution.served_model import ServedModel
from rayserve_moe.execution.tpu_invariance import check_invariance, unsupported_kernels, unsupported_reason
from rayserve_moe.kernels.operations import Kernels
from rayserve_moe.kernels.reference import layers
from rayserve_moe.kernels.row_blocks import at_once
from rayserve_moe.kernels.table import TPU, TPU_INVARIANT
from rayserve_moe.model.spec import UnsupportedModelError
from rayserve_moe.tools.row_sums import PRODUCT, compared, differences, traced_sums
from rayserve_moe.tools.served_cases import case_of_config, case_of_model, lay_out

ROOT = Path(__file__).parents[2]
MODEL, SLICE = "qwen3-30b-a3b", "v6e:2x4"
COMPARED_WITH = f"compiled steps of {MODEL} were compared"
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


def compared_server(model: str = MODEL, topology: str = SLICE, *, tp: int = 0, **values: Any) -> ServedModel:
    """Return the whole model on a server whose compiled steps were compared, with other values."""
    given = {"invariant_products": "on", **values}
    return lay_out(case_of_model(model, topology, tp=tp, values=given))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_model_len": 4096, "num_pages": 100},
        {"precompile_bs_paddings": [16], "max_step_tokens": 512},
        {"host_cache_mib": 100, "enable_prefix_caching": False},
        {"enable_return_routed_experts": True},
    ],
    ids=["defaults", "few pages", "fewer steps", "host pages", "rows of routed experts"],
)
def test_a_server_whose_compiled_steps_were_compared_is_accepted(values: dict[str, Any]):
    served = compared_server(**values)
    assert served.config.kernels.name == TPU_INVARIANT.name
    check_invariance(served)


def test_the_config_for_eight_chips_is_accepted():
    case = case_of_config(ROOT / "configs/qwen3_30b_a3b_v6e8.yaml")
    assert case.settings.replay.enabled
    compiling = replace(case.settings.compile, invariant_products="on")
    check_invariance(lay_out(replace(case, settings=replace(case.settings, compile=compiling))))


def test_only_the_base_of_the_rotation_may_be_another():
    case = case_of_model(MODEL, SLICE, values={"invariant_products": "on", "max_model_len": 4096})
    rotation = {"rope_type": "default", "rope_theta": 1e7}
    longer = {**case.model, "rope_parameters": rotation, "max_position_embeddings": 262_144}
    check_invariance(lay_out(replace(case, model=longer)))
    scaled = rotation | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    with pytest.raises(SettingsError, match=f"the sizes or the rotation of this model: {COMPARED_WITH}"):
        check_invariance(lay_out(replace(case, model={**longer, "rope_parameters": scaled})))


@pytest.mark.parametrize("model", ["gpt-oss-20b", "qwen3.5-35b-a3b"])
def test_models_whose_compiled_steps_were_not_compared_are_refused_by_name(model: str):
    served = served_on(model)
    assert unsupported_kernels(served) == ""
    reason = f"compiled steps of {served.config.spec.family} were not compared; set auto"
    with pytest.raises(SettingsError, match=f"invariant_products on: {reason}"):
        check_invariance(served)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model": "qwen3-235b-a22b"}, "the sizes or the rotation of this model"),
        ({"topology": "v6e:4x4"}, "data_parallel_size 16"),
        ({"topology": "v5p:2x2x2"}, "chip v5p"),
        ({"topology": "v6e:4x4", "tp": 2}, "devices of a data rank 2"),
        ({"page_size": 64}, "page_size 64"),
        ({"max_model_len": 400}, "max_model_len 400"),
        ({"max_running_requests": 32}, "max_running_requests 32"),
        ({"max_step_tokens": 2048}, "step prefill_2048"),
        ({"precompile_bs_paddings": [6, 16]}, "step decode_6"),
        ({"structured_output": False}, "structured_output False"),
        (
            {"enable_return_routed_experts": True, "enable_return_router_gates": True},
            "enable_return_router_gates True",
        ),
        ({"enable_return_hidden_states": True}, "enable_return_hidden_states True"),
        ({"speculative_algorithm": "NGRAM"}, "speculative_algorithm NGRAM"),
        ({"enable_eplb": True}, "enable_eplb True"),
        ({"eplb_dispatch": "static"}, "settings of prefill_1024"),
    ],
    ids=lambda each: "" if isinstance(each, str) else ", ".join(each),
)
def test_other_values_than_those_of_the_compared_server_are_refused_by_name(values: dict[str, Any], reason: str):
    """Some have experts that differ by step as well, which `check_invariance` names first."""
    served = compared_server(**values)
    assert difference_from_compared(served).startswith(f"{reason}: {COMPARED_WITH}")
    with pytest.raises(SettingsError, match=r"invariant_products on: .*; set auto"):
        check_invariance(served)


def test_another_compiler_than_that_of_the_comparison_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    others = [replace(known, versions={**known.versions, "libtpu": "0.0.1"}) for known in compared_steps.COMPARED]
    monkeypatch.setattr(compared_steps, "COMPARED", others)
    with pytest.raises(SettingsError, match=rf"libtpu [\d.]+: {COMPARED_WITH} with 0\.0\.1; set auto"):
        check_invariance(compared_server())


@pytest.mark.parametrize(
    ("variable", "flag"), [("XLA_FLAGS", "--xla_allow_excess_precision=true"), ("LIBTPU_INIT_ARGS", "--xla_tpu_x=1")]
)
def test_flags_of_the_compiler_are_refused_by_name(variable: str, flag: str, monkeypatch: pytest.MonkeyPatch):
    served = compared_server()
    monkeypatch.setenv(variable, f"{os.environ.get(variable, '')} {flag}")
    assert difference_from_compared(served) == f"{flag}: {COMPARED_WITH} without"


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
            "gpt-oss-20b",
            "other windows in the output of attention, and in the head where prompts are scored; other emitters in the "
            "router",
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


@pytest.mark.slow
def test_weights_of_experts_that_the_compiler_adds_up_are_found(monkeypatch: pytest.MonkeyPatch):
    """The compiler adds eight weights up in lanes in a small step, and across rows of registers in a large one."""
    free = replace(TPU_INVARIANT, experts=replace(TPU_INVARIANT.experts, total=layers.total_of))
    monkeypatch.setitem(native_kernels.INVARIANT, "tpu", free)
    found = differences(served_on(MODEL), names=("decode_2", "prefill_512"))
    assert any("total_of" in each.line for each in found)
