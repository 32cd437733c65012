"""Step shapes that engines of tests compile: the fewest that hold every step, one more, or the default shapes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from rayserve_moe.execution.programs.buckets import CPUS

OF_USERS = dict(CPUS)
SAVED_S = 8.0
"""Seconds that a second shape of prompts saves over the core model, and a third one does not."""


def compile_fewest_shapes() -> None:
    """Compile one shape of each kind in this process where the settings list no sizes."""
    CPUS.update({name: replace(device, compile_s=float("inf")) for name, device in OF_USERS.items()})


def compiles_few() -> bool:
    """Return whether this process compiles the fewest shapes."""
    return CPUS != OF_USERS


@contextmanager
def two_shapes_of_prompts() -> Generator[None]:
    """Compile one more shape with prompts inside the context, unless all shapes are compiled."""
    several = {name: replace(device, compile_s=SAVED_S) for name, device in OF_USERS.items()}
    with patch.dict(CPUS, several if compiles_few() else {}):
        yield


@contextmanager
def shapes_of_users() -> Generator[None]:
    """Compile the default shapes inside the context."""
    with patch.dict(CPUS, OF_USERS):
        yield
