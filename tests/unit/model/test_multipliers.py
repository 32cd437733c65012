"""The multipliers of a model are those of its weights: of the embedding, of what layers add, and of the head."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.config.settings import ExpertSettings
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.execution.weights.placing import model_config
from rayserve_moe.model.families.qwen3_moe import spec_from_hf
from rayserve_moe.model.spec import FactorSpec
from rayserve_moe.model.transformer import embedded
from rayserve_moe.parallel.mesh import plan_for
from tests.support.engine.host_runners import TWO_SHAPES, new_runner
from tests.support.models.core import CORE_CONFIG
from tests.support.models.full_logits import prompt_logits_of

FACTORS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_divisor": 7.0}
SCALED = {
    "embedding_multiplier": {"table_VD": 3.0},
    "residual_multiplier": dict.fromkeys(("o_LHD", "down_MPFD", "down_NID"), 0.6),
    "logits_divisor": {"head_VD": 1 / 7},
}
"""The weights that may be multiplied instead."""
PROMPT = list(range(40, 64))


@pytest.fixture(scope="module")
def runner(tmp_path_factory) -> HostRunner:
    path = write_checkpoint(tmp_path_factory.mktemp("core") / "model", CORE_CONFIG, dtype="float32")
    runner = new_runner(path, **TWO_SHAPES)
    runner.load()
    return runner


def test_logits_are_capped_after_their_divisor(runner):
    """At half of the largest logit."""

    def logits_of(factors: FactorSpec) -> np.ndarray:
        spec = replace(runner.config.spec, factors=factors)
        return prompt_logits_of(runner, longest=len(PROMPT), spec=spec)(PROMPT)

    plain = logits_of(FactorSpec(logits_divisor=7.0))
    cap = float(np.abs(plain).max()) / 2
    capped = logits_of(FactorSpec(logits_divisor=7.0, logits_cap=cap))
    np.testing.assert_allclose(capped, cap * np.tanh(plain / cap), atol=1e-6 * cap)
    assert np.abs(capped).max() < 0.97 * cap


@pytest.mark.slow
def test_a_multiplier_is_rounded_to_the_dtype_of_the_embedding_if_the_model_rounds_it():
    """sqrt(2816) = 53.07 is 53 in bfloat16, where 265 and 265.3 lie on either side of a border between two numbers."""
    spec = spec_from_hf(CORE_CONFIG.hf_config("bfloat16"))
    table = np.full((spec.vocab_size, spec.hidden_size), 5.0)

    def first(*, dtype: str, is_rounded: bool) -> float:
        factors = FactorSpec(embedding_multiplier=2816**0.5, rounded_embedding_multiplier=is_rounded)
        config = model_config(replace(spec, factors=factors), plan_for(jax.devices()[:1]), experts=ExpertSettings())
        rows = jax.shard_map(
            lambda table_VD, ids_T: embedded({"embedding": {"table_VD": table_VD}}, ids_T, config=config),
            mesh=config.plan.mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(jnp.asarray(table, dtype), jnp.zeros(1, jnp.int32))
        return float(rows[0, 0])

    assert [first(dtype="bfloat16", is_rounded=is_rounded) for is_rounded in (True, False)] == [264.0, 266.0]
    assert first(dtype="float32", is_rounded=True) == first(dtype="float32", is_rounded=False)


def test_multipliers_are_those_of_weights_and_each_moves_the_logits(runner):
    served = runner.weights
    of_weights = prompt_logits_of(runner, longest=len(PROMPT))

    def with_scaled_weights(names) -> np.ndarray:
        factors = {name: factor for knob in names for name, factor in SCALED[knob].items()}
        runner.weights = replace(
            served,
            params={
                group: {name: array * np.float32(factors.get(name, 1)) for name, array in arrays.items()}
                for group, arrays in served.params.items()
            },
        )
        return of_weights(PROMPT)

    wanted = with_scaled_weights(FACTORS)
    runner.weights = served
    multiplied = replace(runner.config.spec, factors=FactorSpec(**FACTORS))
    logits = prompt_logits_of(runner, longest=len(PROMPT), spec=multiplied)(PROMPT)
    np.testing.assert_allclose(logits, wanted, atol=1e-5 * np.abs(wanted).max())
    for knob in FACTORS:
        without = with_scaled_weights(set(FACTORS) - {knob})
        assert np.abs(without - logits).max() > 1e-4, f"{knob} does nothing"
    runner.weights = served
