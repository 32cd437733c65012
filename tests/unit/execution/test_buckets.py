"""Which shapes are compiled, and that every plan of the scheduler finds one."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.checkpoints.synthetic import FAMILY_PRESETS
from rayserve_moe.config.settings import ExpertSettings, SchedulerSettings
from rayserve_moe.execution.programs.buckets import (
    CPU,
    SMALL_MODEL,
    TPUS,
    device_of,
    filling_plan,
    step_cost,
    step_shapes,
)
from rayserve_moe.execution.step.pack import choose_shape
from rayserve_moe.execution.step.pytrees import StepShape
from rayserve_moe.execution.weights.placing import model_config
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.scheduling.step_plan import PREFILL_BLOCK_TOKENS as BLOCK
from tests.support.models.core import CORE_CONFIG

SPARING = replace(SMALL_MODEL, device=replace(CPU, compile_s=1e9))
LAVISH = replace(SMALL_MODEL, device=replace(CPU, compile_s=0.0))


def test_decode_shapes_are_those_that_were_asked_for():
    scheduler = SchedulerSettings(max_running_requests=4, max_step_tokens=64, decode_batch_sizes=(8, 1, 4, 4))
    assert step_shapes(scheduler, SPARING) == tuple(
        StepShape(*sizes, BLOCK) for sizes in ((1, 0), (4, 0), (8, 0), (8, 64 // BLOCK))
    )
    decode = [shape.num_singles for shape in step_shapes(scheduler, LAVISH) if not shape.num_blocks]
    assert decode == [1, 4, 8]


def test_where_compiling_is_dear_there_is_one_decode_shape_and_one_mixed_shape():
    scheduler = SchedulerSettings(max_running_requests=20, max_step_tokens=600)
    assert step_shapes(scheduler, SPARING) == (StepShape(20, 0, BLOCK), StepShape(20, -(-600 // BLOCK), BLOCK))


def test_where_it_is_free_padding_is_small():
    shapes = step_shapes(SchedulerSettings(max_running_requests=20, max_step_tokens=600), LAVISH)
    assert [s.num_singles for s in shapes if not s.num_blocks] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20]
    assert [s.num_blocks for s in shapes if s.num_blocks] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 19]


def test_a_step_on_a_tpu_has_two_single_tokens_at_least():
    """Products of one row are others to XLA; what fills the place is padding."""
    for rows in (1, 8):
        scheduler, cost = SchedulerSettings(max_running_requests=rows), replace(SMALL_MODEL, device=TPUS["v6e"])
        shapes = step_shapes(scheduler, cost)
        assert min(shape.num_singles for shape in shapes) >= 2 and len(set(shapes)) == len(shapes)
        assert filling_plan(shapes[0], max_model_len=64, num_rows=rows).num_chunks == min(rows, shapes[0].num_singles)


def test_what_fills_a_shape_has_one_token_of_the_null_page_or_blocks():
    """Two tokens of one page may not be given to a kernel that writes their rows."""
    for shape in (StepShape(1, 0, BLOCK), StepShape(8, 0, BLOCK), StepShape(8, 3, BLOCK)):
        plan = filling_plan(shape, max_model_len=64, num_rows=8)
        is_real = plan.chunks.starts >= 0
        assert is_real[0] and is_real.sum() == (shape.num_blocks or 1)
        assert plan.num_chunks == (shape.num_blocks or shape.num_singles)


@given(st.data())
def test_every_plan_has_a_shape_and_takes_the_smallest(data: st.DataObject):
    rows, budget = data.draw(st.integers(1, 300)), data.draw(st.integers(32, 4096))
    asked = data.draw(st.lists(st.integers(1, 400), max_size=3))
    sizes = (*asked, rows) if asked else ()
    scheduler = SchedulerSettings(max_running_requests=rows, max_step_tokens=budget, decode_batch_sizes=sizes)
    device = replace(
        data.draw(st.sampled_from([CPU, *TPUS.values()])), compile_s=data.draw(st.floats(0, 100)), horizon_s=1000.0
    )
    shapes = step_shapes(scheduler, replace(SMALL_MODEL, device=device))
    assert len(set(shapes)) == len(shapes), "no shape is compiled twice"
    num_singles = data.draw(st.integers(0, rows))
    num_blocks = data.draw(st.integers(0, -(-budget // BLOCK)))
    chosen = choose_shape(shapes, num_singles=num_singles, num_blocks=num_blocks)
    roomy = [s for s in shapes if s.num_singles >= num_singles and s.num_blocks >= num_blocks]
    assert chosen in roomy and chosen.num_tokens == min(shape.num_tokens for shape in roomy)


@pytest.mark.parametrize(("num_singles", "bucket"), [(1, 1), (2, 4), (4, 4), (5, 8)])
def test_a_decode_step_is_padded_to_the_next_size(num_singles, bucket):
    shapes = step_shapes(SchedulerSettings(max_running_requests=8, max_step_tokens=64, decode_batch_sizes=(1, 4, 8)))
    assert choose_shape(shapes, num_singles=num_singles, num_blocks=0) == StepShape(bucket, 0, BLOCK)


def test_a_step_beyond_all_shapes_is_our_own_fault():
    with pytest.raises(AssertionError, match="9 single tokens"):
        choose_shape(step_shapes(SchedulerSettings(max_running_requests=8)), num_singles=9, num_blocks=0)


@pytest.mark.parametrize("shape", ["qwen3_moe", "deepseek-v3-tiny", "gpt-oss-tiny"])
def test_a_model_costs_what_its_parameters_are(shape: str):
    model = FAMILY_PRESETS.get(shape, CORE_CONFIG)
    spec = spec_from_config(model.hf_config("float32"))
    config = model_config(spec, plan_for(jax.devices()[:4], data_size=2), experts=ExpertSettings())
    cost = step_cost(config, dtype="bfloat16")
    groups = parameter_specs(spec, dtype="float32").values()
    num_elements = sum(math.prod(param.shape) for params in groups for param in params.values())
    embedding = 2 * spec.vocab_size * spec.hidden_size + spec.hidden_size
    mlp_norms = spec.num_layers * spec.hidden_size
    counted = cost.dense_weights + spec.router.num_experts * cost.expert_weights
    assert counted == num_elements - embedding - mlp_norms
    assert cost.head_weights == spec.vocab_size * spec.hidden_size
    assert (cost.itemsize, cost.expert_itemsize, cost.tensor_size, cost.data_size) == (2, 2, 2, 2)
    narrow = replace(config, experts=replace(config.experts, weight_dtype="int8"))
    assert step_cost(narrow, dtype="bfloat16") == replace(cost, expert_itemsize=1)
    assert cost.device.flops == CPU.flops / 4, "emulated devices share one machine"


@pytest.mark.parametrize(
    ("kind", "chip"), [("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"), ("TPU7x", "7x")]
)
def test_a_tpu_is_known_by_its_kind(kind: str, chip: str):
    assert device_of(tpu(kind), num_devices=8) == TPUS[chip]


def test_an_unknown_tpu_counts_as_the_slowest():
    slowest = min(TPUS.values(), key=lambda device: device.bytes_per_s)
    assert device_of(tpu("TPU v99"), num_devices=8) == slowest


def tpu(kind: str) -> Any:
    return SimpleNamespace(platform="tpu", device_kind=kind)
