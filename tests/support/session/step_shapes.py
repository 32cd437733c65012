"""Step shapes of test engines: the minimum that fits every step, one more, or the defaults."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from rayserve_moe.execution.programs.buckets import CPUS

OF_USERS = dict(CPUS)
SAVED_S = 8.0
"""Assumed compile time at which a second prompt shape of the core model pays, and a third does not."""


def compile_fewest_shapes() -> None:
    """Compile one shape of each kind in this process where the settings list no sizes."""
    CPUS.update({name: replace(device, compile_s=float("inf")) for name, device in OF_USERS.items()})


def compiles_few() -> bool:
    """Return True if this process compiles the minimum of shapes."""
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
