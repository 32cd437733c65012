"""Step shapes that engines of tests compile: the fewest that hold every step, or the default shapes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from rayserve_moe.execution.programs.buckets import CPUS

OF_USERS = dict(CPUS)


def compile_fewest_shapes() -> None:
    """Compile one shape of each kind in this process where the settings list no sizes."""
    CPUS.update({name: replace(device, compile_s=float("inf")) for name, device in OF_USERS.items()})


@contextmanager
def shapes_of_users() -> Generator[None]:
    """Compile the default shapes inside the context."""
    with patch.dict(CPUS, OF_USERS):
        yield
