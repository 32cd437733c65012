"""Kernels whose device times others have published, compiled for those chips; peers' own come from their wheels.

`python -m benchmarks.calibration_kernels NAME DUMP_FOLDER WHEELS` compiles one and prints its reading as JSON.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.config.load import set_environment_defaults
from rayserve_moe.tools.compile_check import COMPILER_ENVIRONMENT, use_host_alone
from rayserve_moe.tools.estimate.bundles import Spent, read_schedule
from rayserve_moe.tools.estimate.dump import DumpFolder, dump_environment

PEER = "tpu-inference"
PEER_WHEEL = f"{PEER}==0.28.0"
"""The last release before the published times that has the kernel."""
TOPOLOGIES = {"v5e": "v5e:2x4", "v6e": "v6e:2x4", "tpu7x": "tpu7x:2x2x1"}


class NoWheelError(RuntimeError):
    """A peer's kernel without the peer's wheel."""


@dataclass(frozen=True)
class Kernel:
    """A kernel at the shape of a published time."""

    chip: str
    build: Callable[[Path], tuple[Callable[..., Any], Sequence[jax.ShapeDtypeStruct]]]
    """Returns the function and its arguments, given the folder of wheels."""
    open_trips: tuple[float, ...] = ()
    """Trips per entry of each loop that only a run counts, in order."""


def _array(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def _copy(_: Path) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    return lambda array: array.copy(), [_array(4096, 4096)]


def _product(_: Path) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    return partial(jax.lax.dot, preferred_element_type=jnp.bfloat16), [_array(8192, 8192)] * 2


def _blocked_product(
    _: Path, *, size: int, block: tuple[int, int, int]
) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """Return the product that the documentation of jax measures: blocks of rows x inner x columns, sums in float32."""
    rows, inner, columns = block

    def multiply(left: Any, right: Any, out: Any, sums: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            sums[...] = jnp.zeros_like(sums)

        sums[...] += jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == size // inner - 1)
        def _() -> None:
            out[...] = sums[...].astype(out.dtype)

    specs = [
        pl.BlockSpec((rows, inner), lambda i, j, k: (i, k)),
        pl.BlockSpec((inner, columns), lambda i, j, k: (k, j)),
    ]
    semantics = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))
    run = pl.pallas_call(
        multiply,
        out_shape=_array(size, size),
        grid=(size // rows, size // columns, size // inner),
        in_specs=specs,
        out_specs=pl.BlockSpec((rows, columns), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)],
        compiler_params=semantics,
    )
    return run, [_array(size, size)] * 2


def _grouped(
    wheels: Path, *, shape: tuple[int, int, int], rows: int, dtype: Any = jnp.bfloat16
) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """Return the peer's grouped product, imported without the peer's package, which loads a server."""
    folder = unpacked(wheels)
    package = types.ModuleType("tpu_inference")
    package.__path__ = [str(folder / "tpu_inference")]
    sys.modules["tpu_inference"] = package
    gmm = importlib.import_module("tpu_inference.kernels.megablox.gmm_v2").gmm_v2
    arguments = [_array(rows, shape[1]), _array(*shape, dtype=dtype), _array(shape[0], dtype=jnp.int32)]
    return gmm, arguments


def _trips(groups: int, used: int) -> tuple[float, ...]:
    """Return trips of the grouped product: groups, tiles of a group, rows to clear before and behind, tiles."""
    return groups, used / groups, 1.0, 1.0, used


FP8 = jnp.float8_e4m3fn
LARGE, NARROW, WIDE = (64, 4096, 2048), (512, 4096, 256), (512, 512, 4096)
KERNELS: dict[str, Kernel] = {
    "copy on v6e": Kernel("v6e", _copy),
    "copy on tpu7x": Kernel("tpu7x", _copy),
    "product on v5e": Kernel("v5e", _product),
    "blocked product, 128 x 128 x 128": Kernel(
        "v5e", partial(_blocked_product, size=1024, block=(128, 128, 128))
    ),
    "blocked product, 512 x 1024 x 1024": Kernel(
        "v5e", partial(_blocked_product, size=4096, block=(512, 1024, 1024))
    ),
    "gmm_v2 64 x 4096 x 2048 bf16": Kernel("tpu7x", partial(_grouped, shape=LARGE, rows=96), _trips(64, 30)),
    "gmm_v2 64 x 4096 x 2048 fp8": Kernel("tpu7x", partial(_grouped, shape=LARGE, rows=96, dtype=FP8), _trips(64, 30)),
    "gmm_v2 512 x 4096 x 256 bf16": Kernel("tpu7x", partial(_grouped, shape=NARROW, rows=80), _trips(512, 72)),
    "gmm_v2 512 x 4096 x 256 fp8": Kernel(
        "tpu7x", partial(_grouped, shape=NARROW, rows=80, dtype=FP8), _trips(512, 72)
    ),
    "gmm_v2 512 x 512 x 4096 fp8": Kernel("tpu7x", partial(_grouped, shape=WIDE, rows=80, dtype=FP8), _trips(512, 72)),
}  # fmt: skip
"""Kernels by the names in `calibration_points`."""


def download(wheels: Path) -> None:
    """Download the peer's wheel into a cache. Raises CalledProcessError if pip fails."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PEER_WHEEL, "-d", str(wheels)]
    subprocess.run(command, check=True)


def unpacked(wheels: Path) -> Path:
    """Return the folder with the contents of the peer's wheel. Raises NoWheelError if it was not downloaded."""
    name, _, version = PEER_WHEEL.partition("==")
    found = sorted(wheels.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    if not found:
        raise NoWheelError(f"skipped: {PEER_WHEEL} is not in {wheels}; --download gets it")
    folder = wheels / version
    if not folder.exists():
        with zipfile.ZipFile(found[0]) as archive:
            archive.extractall(folder)
    return folder


def reading_of(name: str, *, dump: Path, wheels: Path) -> Spent:
    """Compile a kernel and return what its schedule spends; the process must not have loaded libtpu before."""
    set_environment_defaults(COMPILER_ENVIRONMENT | dump_environment(dump))
    use_host_alone()
    kernel = KERNELS[name]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[kernel.chip]).devices
    mesh = jax.sharding.Mesh(np.asarray(devices[:1]), ("one",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with jax.set_mesh(mesh):
        run, arguments = kernel.build(wheels)
        placed = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=whole) for each in arguments]
        jax.jit(run).lower(*placed).compile()
    schedules = [read_schedule(text) for text in DumpFolder(dump).take().values()]
    largest = max(schedules, key=lambda schedule: schedule.num_bundles)
    spent = largest.spent(trips_each=kernel.open_trips)
    if not kernel.open_trips:
        return spent
    # The peer's copies may go either way, so the schedule does not tell where it begins to read: in its last loop.
    before = largest.spent(trips_each=(*kernel.open_trips[:-1], 0.0)).bundles
    alone = sum(not any(loop.first <= at <= loop.last for loop in largest.loops) for at in largest.waits)
    return replace(spent, lead_bundles=before, num_waits=alone)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(reading_of(sys.argv[1], dump=Path(sys.argv[2]), wheels=Path(sys.argv[3])))))
