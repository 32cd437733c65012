"""The row of GPUs interpreted on a CPU: in the place of the reference, for runners that are prepared meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

from rayserve_moe.kernels.candidates import Candidate
from rayserve_moe.kernels.gpu.row import gpu_kernels, gpu_latents
from rayserve_moe.kernels.operations import Kernels
from rayserve_moe.kernels.table import CPU, KERNELS, LATENT_ATTENTION, SPARSE_ATTENTION

INTERPRETED: Kernels = replace(gpu_kernels(CPU, interpret=True), name="cpu")
"""The GPU row under the name of the CPU platform."""


@contextmanager
def gpu_row_instead() -> Iterator[None]:
    """Within the context, lay out models with the GPU row."""
    latents = (Candidate("triton", gpu_latents(interpret=True)),)
    with ExitStack() as stack:
        stack.enter_context(patch.dict(KERNELS, cpu=INTERPRETED))
        for by_name in (LATENT_ATTENTION, SPARSE_ATTENTION):
            stack.enter_context(patch.dict(by_name, cpu=latents))
        yield
