"""A model that cannot be served is named by its config, before anything else reads the directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.config.load import settings_from
from rayserve_moe.execution.card import describe_model
from rayserve_moe.model.spec import UnsupportedModelError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": "4"}, "num_attention_heads"),
        ({"rope_scaling": "yarn"}, "rope"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_parameters: a yarn scaling has no factor; null derives it"),
        ({"quantization_config": "mxfp4"}, "quantization_config must be an object, found 'mxfp4'"),
    ],
)
def test_a_value_of_the_model_is_not_blamed_on_the_tokenizer(
    core_checkpoint: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    for file in core_checkpoint.iterdir():
        if not file.name.endswith("safetensors"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises((UnsupportedModelError, CheckpointError), match=f"config.json: {message}"):
        describe_model(settings_from({"model_path": str(tmp_path)}))
