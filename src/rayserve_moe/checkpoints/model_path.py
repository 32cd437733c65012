"""Where the checkpoint that a setting names lies: a directory, or a synthetic one that is made on first use."""

from __future__ import annotations

from pathlib import Path

from rayserve_moe.checkpoints.synthetic import ensure_checkpoint

SYNTHETIC_PREFIX = "synthetic:"


def resolve_model_path(model_path: str, *, cache_directory: Path) -> Path:
    """Return the directory of `model_path`; `synthetic:<preset>` is written under `cache_directory` if not there yet.

    CheckpointError for an unknown preset. A plain path is returned as it is; opening it finds out whether it is one.
    """
    if not model_path.startswith(SYNTHETIC_PREFIX):
        return Path(model_path).expanduser()
    preset = model_path.removeprefix(SYNTHETIC_PREFIX)
    return ensure_checkpoint(cache_directory / "checkpoints" / preset, preset)
