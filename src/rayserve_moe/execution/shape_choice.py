"""Which sizes of a step are worth compiling: seconds lost to padding against seconds spent on compiling.

Plain arithmetic over a model of what steps cost. Every host of a group comes to the same sizes: nothing here looks at
the machine that it runs on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

SecondsOf = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Seconds of a step of `real` items in a shape made for `size` of them, elementwise, broadcast."""

MOST_DIGITS = 3


@dataclass(frozen=True)
class Device:
    """What one device does in a second, and what a shape costs at the start.

    `block_s` is what every attention block costs per layer, padding or not. `compile_s` counts compiling, and the
    first run, of one shape while others are compiled beside it. Over `horizon_s` of steps a shape has to earn that
    back. Where `fills_blocks`, an expert computes whole blocks of rows, sized for the mean load of a full step.
    """

    bytes_per_s: float
    flops: float
    block_s: float
    compile_s: float
    horizon_s: float
    fills_blocks: bool = False


CPU = Device(1.2e10, 1.2e11, 30e-6, compile_s=2.5, horizon_s=600.0, fills_blocks=True)
"""What our float32 steps reach on two cores of an AMD EPYC: all emulated devices together.

A horizon of ten minutes: such a server is for a look, or a test.
"""

TPUS = {
    "v5e": Device(8.19e11, 1.97e14, 1e-6, compile_s=15.0, horizon_s=3600.0),
    "v5p": Device(2.765e12, 4.59e14, 1e-6, compile_s=15.0, horizon_s=3600.0),
    "v6e": Device(1.64e12, 9.18e14, 1e-6, compile_s=15.0, horizon_s=3600.0),
    "7x": Device(3.69e12, 1.153e15, 1e-6, compile_s=15.0, horizon_s=3600.0),
}
"""Memory bandwidth and bfloat16 peak as Google publishes them per chip; 7x has two devices to a chip.

A step compiles in about 60 s, four of them at a time.
"""

TPU_OF_KIND = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "7x",
}
