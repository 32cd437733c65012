"""Tables split by vocabulary over all devices answer as whole tables do, each data rank for its own tokens."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.kernels.table import CPU
from rayserve_moe.model import vocabulary
from rayserve_moe.model.decoder_layers import ModelConfig
from rayserve_moe.model.families.qwen3_moe import spec_from_hf
from rayserve_moe.model.transformer import embedded
from rayserve_moe.model.vocabulary import local_logits, look_up
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.parallel.sharding import ParallelPlan
from rayserve_moe.parallel.vocabulary_part import vocabulary_part
from tests.support.models.core import CORE_CONFIG

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (8, 1), (1, 8)]
NUM_WORDS, NUM_ROWS, WIDTH, NUM_TOKENS = 29, 32, 6, 5
BY_RANK, WHOLE = PartitionSpec("data"), PartitionSpec()


def plan_of(layout: tuple[int, int]) -> ParallelPlan:
    return plan_for(jax.devices()[: layout[0] * layout[1]], data_size=layout[0])


def drawn_table() -> np.ndarray:
    """A table whose last rows are padding: words that must never be chosen, though their scores would be high."""
    table = np.random.default_rng(0).standard_normal((NUM_ROWS, WIDTH)).astype(np.float32)
    table[NUM_WORDS:] = 100
    return table


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk", [NUM_TOKENS, 2, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_those_of_the_whole_table(layout, chunk, dtype, monkeypatch):
    plan, table = plan_of(layout), drawn_table().astype(dtype)
    monkeypatch.setattr(vocabulary, "GATHERED_BYTES", chunk * plan.data_size * WIDTH * table.itemsize)
    ids = np.random.default_rng(1).integers(0, NUM_WORDS, (plan.data_size, NUM_TOKENS))
    ids[0] = [0, NUM_WORDS - 1, 3, 4, 3]

    def on_device(table, ids):
        return look_up(table, ids[0], plan=plan)[None]

    parts = (plan.partition(("vocabulary", "model")), BY_RANK)
    run = jax.shard_map(on_device, mesh=plan.mesh, in_specs=parts, out_specs=BY_RANK, check_vma=False)
    np.testing.assert_array_equal(jax.jit(run)(table, ids), table[ids])


def test_what_a_table_is_padded_with_enters_no_stream():
    plan, spec = plan_of((2, 1)), spec_from_hf(CORE_CONFIG.hf_config("float32"))
    table = np.random.default_rng(3).standard_normal((spec.vocab_size, spec.hidden_size)).astype(np.float32)
    padded = np.pad(table, [(0, 0), (0, 5)], constant_values=100)
    ids = np.random.default_rng(4).integers(0, spec.vocab_size, (plan.data_size, NUM_TOKENS))
    config = ModelConfig(spec, ExpertConfig(spec.router, CPU, plan))

    def on_device(table, ids):
        return embedded({"embedding": {"table_VD": table}}, ids[0], config=config)[None]

    parts = (plan.partition(("vocabulary", "table_row")), BY_RANK)
    run = jax.shard_map(on_device, mesh=plan.mesh, in_specs=parts, out_specs=BY_RANK, check_vma=False)
    np.testing.assert_array_equal(jax.jit(run)(padded, ids), table[ids])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_the_whole_head_and_padding_has_none(layout):
    plan, table = plan_of(layout), drawn_table()
    part = vocabulary_part(plan, num_words=NUM_WORDS, multiple=NUM_ROWS // plan.mesh.size)
    hidden = np.random.default_rng(2).standard_normal((plan.data_size, NUM_TOKENS, WIDTH)).astype(np.float32)
    everywhere = PartitionSpec(("tensor", "data"))

    def on_device(table, hidden):
        score = partial(jnp.einsum, "VD,SD->SV", table)
        return local_logits(hidden[0], score, part=part, plan=plan)[None]

    parts = (plan.partition(("vocabulary", "model")), BY_RANK)
    run = jax.shard_map(on_device, mesh=plan.mesh, in_specs=parts, out_specs=everywhere, check_vma=False)
    found = np.concatenate(np.asarray(jax.jit(run)(table, hidden)), axis=1)
    expected = (hidden.astype(np.float64) @ table[:NUM_WORDS].T).reshape(-1, NUM_WORDS)
    np.testing.assert_allclose(found[:, :NUM_WORDS], expected, atol=1e-5)
    assert np.isneginf(found[:, NUM_WORDS:]).all()


def test_one_data_rank_needs_no_other():
    """A sum of rows over devices is all that is in the program: scores stay where they are."""
    plan = plan_of((1, 2))
    part = vocabulary_part(plan, num_words=NUM_ROWS)

    def on_device(table, ids):
        hidden = look_up(table, ids, plan=plan)
        return local_logits(hidden, lambda rows: rows @ table.T, part=part, plan=plan)

    parts = (plan.partition(("vocabulary", "model")), WHOLE)
    by_words = plan.partition((None, "vocabulary"))
    run = jax.shard_map(on_device, mesh=plan.mesh, in_specs=parts, out_specs=by_words, check_vma=False)
    text = jax.jit(run).lower(drawn_table(), np.zeros(NUM_TOKENS, np.int32)).as_text()
    counts = [text.count(f"stablehlo.{name}") for name in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter")]
    assert counts == [1, 0, 0, 0]
