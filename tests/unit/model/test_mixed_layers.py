"""A loop over layers of any kind computes what a loop for each run of equal layers computes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rayserve_moe.config.model_names import PRESETS
from rayserve_moe.model import layer_runs
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.mixed_layers import branch_counts, parts_of
from tests.support.engine.host_runners import new_runner
from tests.support.models.families import family_case, write_family
from tests.support.models.full_logits import PromptOutputs, prompt_outputs_of

LETTERS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
LINEAR, FULL = "linear_attention", "full_attention"
CHANGES = {
    "nemotron_h-0": {"layers_block_type": [LETTERS[letter] for letter in "MEMEM*E-MEM*EEM*-M"]},
    "bailing_hybrid-0": {
        "num_hidden_layers": 10,
        "layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL, FULL, LINEAR, LINEAR, FULL, LINEAR],
        "mlp_layer_types": ["dense", *["sparse"] * 8, "dense"],
        "expert_swiglu_limit_list": [0, 0, 0, 0.4, 0.4, 0, 0, 0.2, 0, 0],
        "share_expert_swiglu_limit_list": [0, 0.3, 0, 0, 0, 0, 0.5, 0.5, 0, 0],
    },
    "granitemoehybrid-0": {
        "num_hidden_layers": 9,
        "layers_block_type": [LINEAR, FULL, LINEAR, LINEAR, FULL, FULL, LINEAR, FULL, LINEAR],
    },
}
"""Orders of layers with too many runs for a loop each."""
LENGTH = 40


@pytest.mark.parametrize("name", CHANGES)
def test_outputs_are_those_of_a_loop_for_each_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_family(family_case(name), tmp_path / "model", seed=1, **CHANGES[name])
    runner = new_runner(path, dtype="float32")
    runner.load()
    spec, ids = runner.config.spec, np.random.default_rng(0).integers(3, 128, LENGTH).tolist()

    def computed(max_bodies: int) -> PromptOutputs:
        monkeypatch.setattr(layer_runs, "MAX_BODIES", max_bodies)
        is_mixed = [run.is_mixed for run in layer_runs.layer_runs(spec)]
        assert is_mixed == [True] if max_bodies < 6 else not any(is_mixed)
        return prompt_outputs_of(runner, longest=LENGTH)(ids)

    found, expected = computed(4), computed(99)
    np.testing.assert_allclose(
        found.logits_TV, expected.logits_TV, rtol=0, atol=1e-5 * np.abs(expected.logits_TV).max()
    )
    np.testing.assert_array_equal(found.ids_MTK, expected.ids_MTK)
    np.testing.assert_allclose(found.gates_MTK, expected.gates_MTK, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("preset", "counts"),
    [
        ("kimi-linear-48b-a3b", ((20, 7), (1, 26))),
        ("granite-4.0-h-small", ((36, 4),)),
        ("nemotron-3-nano-30b-a3b", ((23, 23, 6), (29, 23))),
        ("nemotron-3-super-120b-a12b", ((40, 40, 8), (48, 40))),
        ("ling-3.0-flash", ((35, 7), (2, 32, 1, 5, 2))),
        ("qwen3.5-35b-a3b", ()),
        ("mimo-v2-flash", ()),
    ],
)
def test_each_part_of_a_published_order_is_compiled_once(preset: str, counts: tuple[tuple[int, ...], ...]) -> None:
    spec = spec_from_config(json.loads((PRESETS / f"{preset}.json").read_text()))
    assert branch_counts(spec) == counts
    parts = parts_of([layer.kind for layer in spec.layers])
    for layer, mixer, ffn in zip(spec.layers, parts.mixer_L, parts.ffn_L, strict=True):
        assert parts.mixers[mixer].mixer == layer.mixer
        own = parts.ffns[ffn]
        assert (own.ffn, own.expert_limit, own.mlp_limit) == (layer.ffn, layer.expert_limit, layer.mlp_limit)
