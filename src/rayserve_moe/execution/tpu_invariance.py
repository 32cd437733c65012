"""Models and layouts for which TPUs support `invariant_products`.

The kernels of `tpu_invariant` add up a row in one order in every step, or the server refuses. `tools.row_sums` proves
it for the compiled steps of a model.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from rayserve_moe.config.settings import DRAFT_MODELS, SettingsError
from rayserve_moe.execution.compared_steps import difference_from_compared
from rayserve_moe.execution.kernel_report import device_shapes, expert_shapes, kernel_report, shaped
from rayserve_moe.execution.served_model import ServedModel
from rayserve_moe.experts.addition_order import adds_by_device
from rayserve_moe.experts.backends import ALL_TO_ALL, DEVICE_SUMS, LOW_LATENCY, choose_backend
from rayserve_moe.kernels.table import TPU_INVARIANT
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.layers.gated_delta import GatedDelta

PROVEN = (GroupedAttention, GatedDelta)
"""Mixers whose traced sums are the same in steps of all sizes."""
REPLICATED, FUSED, DELTA_RULE = "replicated", "fused", "delta_rule"


def check_invariance(served: ServedModel) -> None:
    """Raise SettingsError if `invariant_products` is on and some step could add up a row in another order."""
    if reason := unsupported_reason(served):
        raise SettingsError(f"invariant_products on: {reason}; set auto")


def unsupported_reason(served: ServedModel) -> str:
    """Return why steps with the kernels `tpu_invariant` could differ; empty if they cannot, or for other kernels."""
    if served.config.kernels.name != TPU_INVARIANT.name:
        return ""
    return unsupported_kernels(served) or difference_from_compared(served)


def unsupported_kernels(served: ServedModel) -> str:
    """Return why the traced sums of steps could differ; empty if they cannot."""
    return next((reason for reasons in (_of_layout, _of_model, _of_experts) for reason in reasons(served)), "")


def _of_layout(served: ServedModel) -> Iterator[str]:
    settings = served.settings
    if settings.adapters.num_slots:
        yield "max_loras: products of adapters depend on the size of a step"
    if settings.speculation.algorithm in DRAFT_MODELS:
        yield f"speculative_algorithm {settings.speculation.algorithm}: sums of the draft model are not proven"
    if settings.cache.kv_dtype == "fp8":
        yield "kv_cache_dtype fp8: its sums are not proven"


def _of_model(served: ServedModel) -> Iterator[str]:
    for own in served.config.spec.mixers:
        if not isinstance(own, PROVEN):
            yield f"sums of {own.kind} layers are not proven"
    report = kernel_report(served)
    for operation, text in report.items():
        if operation != "experts" and " tokens: " in text:
            yield f"steps compute {operation} by different kernels: {text}"
    recurrence = report.get("recurrence", DELTA_RULE)
    if recurrence.partition(" ")[0] != DELTA_RULE:
        yield f"the recurrence is computed by {recurrence}"


def _of_experts(served: ServedModel) -> Iterator[str]:
    """Yield the reason if steps compute experts by kernels that add up in different orders."""
    config, plan, found = served.config, served.config.plan, {}
    params = device_shapes(config, dtype=served.dtype)["experts"]
    with jax.set_mesh(plan.mesh):  # kernels ask the current mesh which chip they are for
        for shape in served.shapes:
            rows_TD = shaped(shape.num_tokens, config.spec.exchanged_width, dtype=jnp.dtype(served.dtype))
            tokens, experts = expert_shapes(rows_TD, params, config=config)
            experts = experts._replace(maps=served.weights.maps)
            name = choose_backend(tokens, experts, config=config.experts).name
            if name in (LOW_LATENCY, DEVICE_SUMS) and adds_by_device(tokens, experts, config.experts):
                name = DEVICE_SUMS
            found[ALL_TO_ALL if name == FUSED else name] = shape.num_tokens
    if len(found) > 1:
        shown = ", ".join(f"{name} ({num_tokens} tokens)" for name, num_tokens in found.items())
        yield f"steps compute experts by {shown}; set expert_backend {ALL_TO_ALL}"
    elif REPLICATED in found and plan.data_size > 1:
        yield f"expert_backend {REPLICATED}: a collective adds up in an order of its size"
