"""Prediction layers beside the decoder load in every form of a family's files, and are refused where parts miss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.config.settings import SettingsError
from tests.unit.execution.test_file_forms import FORMS, Tensors, in_form, plain, rewritten
from tests.unit.execution.test_staged_weights import loaded


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMS)
def test_prediction_layers_do_not_depend_on_the_form_of_files(tmp_path: Path, form: str):
    """Nor do those that an update brings."""
    family, counted = FORMS[form][0], {"mtp_num_hidden_layers": 1}
    first, second = (plain(tmp_path / f"plain{seed}", family, seed=seed, **counted) for seed in (1, 2))
    paths = in_form(first, tmp_path / "other", form), first, second
    runner, expected, later = (loaded(path, drafts_by="NEXTN") for path in paths)
    jax.tree.map(np.testing.assert_array_equal, runner.weights.draft, expected.weights.draft)
    runner.staged.read(str(second))
    jax.tree.map(np.testing.assert_array_equal, runner.staged.take(runner.weights).draft, later.weights.draft)


def without_a_norm(tensors: Tensors) -> Tensors:
    return {name: array for name, array in tensors.items() if name != "mtp.norm.weight"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((), r"no multi-token prediction layer \(no tensor mtp\.fc\.weight\)"),
        ((without_a_norm,), r"1 tensor missing: mtp\.norm\.weight"),
    ],
)
def test_a_prediction_layer_that_is_not_whole_is_refused(tmp_path: Path, changes: Any, message: str):
    """A model without the first change has none."""
    counted = {"mtp_num_hidden_layers": len(changes)}
    path = rewritten(plain(tmp_path / "plain", "qwen3_next", **counted), tmp_path / "other", *changes)
    with pytest.raises((SettingsError, CheckpointError), match=message):
        loaded(path, drafts_by="NEXTN")
