"""The trainer's checkpoints: weights, optimizer, step and history in one directory that appears whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples.grpo.trainer import TrainerState

ARRAYS, FACTS, KEPT = "arrays.npz", "facts.json", 2
_NAME = "step-{:06d}"


def save(state: TrainerState, facts: dict[str, Any], *, step: int, directory: Path) -> None:
    """Write the state after `step` steps, then remove all but the last checkpoints."""
    for cut_off in directory.glob("unfinished-*"):
        shutil.rmtree(cut_off)
    unfinished = directory / f"unfinished-{os.getpid()}"
    unfinished.mkdir(parents=True)
    leaves = jax.tree.leaves(state)
    np.savez(unfinished / ARRAYS, *map(np.asarray, leaves))
    (unfinished / FACTS).write_text(json.dumps({"step": step, **facts}), encoding="utf-8")
    for file in (unfinished / ARRAYS, unfinished / FACTS):
        _flush(file)
    final = directory / _NAME.format(step)
    shutil.rmtree(final, ignore_errors=True)
    unfinished.rename(final)
    _flush(directory)
    for old in checkpoints_in(directory)[:-KEPT]:
        shutil.rmtree(old)


def load(like: TrainerState, directory: Path) -> tuple[TrainerState, dict[str, Any]] | None:
    """Read the last checkpoint, with a state of the same form as `like`; None where there is none."""
    found = checkpoints_in(directory)
    if not found:
        return None
    with np.load(found[-1] / ARRAYS) as arrays:
        leaves = [arrays[f"arr_{number}"] for number in range(len(arrays.files))]
    facts = json.loads((found[-1] / FACTS).read_text(encoding="utf-8"))
    return jax.tree.unflatten(jax.tree.structure(like), [jax.numpy.asarray(leaf) for leaf in leaves]), facts


def checkpoints_in(directory: Path) -> list[Path]:
    """The whole checkpoints, oldest first."""
    return sorted(directory.glob(_NAME.format(0).replace("0" * 6, "*")))


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """A path to write to; `file` is what was written there once all of it is on the disk, and what it was before."""
    unfinished = file.with_name(f"{file.name}.unfinished")
    yield unfinished
    _flush(unfinished)
    unfinished.replace(file)


def _flush(path: Path) -> None:
    """Have the disk hold what was written to a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
