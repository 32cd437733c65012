"""One device of a TPU topology, and programs compiled for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rayserve_moe.tools.hlo_text import ProgramText, read_program

TOPOLOGY_OF_CHIP = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x1", "v6e": "v6e:2x4", "7x": "tpu7x:2x2x1"}


@cache
def mesh_of_one(chip: str) -> Mesh:
    """A mesh of the first device of a small topology of `chip`."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY_OF_CHIP[chip]).devices
    return Mesh(np.asarray(devices[:1]), ("one",))


def compile_for(chip: str, run: Callable[..., Any], *shapes: Any, donate: int | None = None) -> Any:
    """Compile `run` of trees of shapes for one device of `chip`; argument number `donate` is given away."""
    mesh = mesh_of_one(chip)
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), shapes)
    with jax.set_mesh(mesh):
        return jax.jit(run, donate_argnums=() if donate is None else donate).lower(*placed).compile()


def text_of(compiled: Any) -> ProgramText:
    return read_program(compiled.as_text())
