"""Where the checkpoint that a setting names lies: a directory, the package's own, or one that is made on first use."""

from __future__ import annotations

from pathlib import Path

from rayserve_moe.checkpoints.files import CheckpointError
from rayserve_moe.checkpoints.synthetic import ensure_checkpoint

SYNTHETIC_PREFIX = "synthetic:"
TRAINED_PREFIX = "trained:"
TRAINED = {"calculator": Path(__file__).parent / "calculator"}
"""Checkpoints that come with the package, as `examples/train_calculator.py` makes them."""


def resolve_model_path(model_path: str, *, cache_directory: Path) -> Path:
    """Return the directory of `model_path`; `synthetic:<preset>` is written under `cache_directory` if not there yet.

    `trained:<name>` is one of `TRAINED`. CheckpointError for an unknown preset or name. A plain path is returned as it
    is; opening it finds out whether it is one.
    """
    if model_path.startswith(TRAINED_PREFIX):
        name = model_path.removeprefix(TRAINED_PREFIX)
        if name not in TRAINED:
            raise CheckpointError(f"no trained checkpoint {name!r}; there are {', '.join(TRAINED)}")
        return TRAINED[name]
    if model_path.startswith(SYNTHETIC_PREFIX):
        preset = model_path.removeprefix(SYNTHETIC_PREFIX)
        return ensure_checkpoint(cache_directory / "checkpoints" / preset, preset)
    return Path(model_path).expanduser()
