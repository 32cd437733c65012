"""Kernels and size constraints of a model, collected over its mixers and feed-forward networks."""

from __future__ import annotations

from rayserve_moe.kernels.table import Kernels
from rayserve_moe.model.layers.table import FFNS, MIXERS
from rayserve_moe.model.spec import ModelSpec, UnsupportedModelError


def kernels_for(spec: ModelSpec, kernels: Kernels, *, prefers_flat: bool = False) -> Kernels:
    """Return the kernel table for the mixers of a model; `prefers_flat` selects flat rows if there is a choice.

    Raises: UnsupportedModelError if the platform has no kernels for a mixer.
    """
    for own in spec.mixers:
        try:
            kernels = MIXERS[own.kind].kernels(own, kernels, prefers_flat=prefers_flat)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{spec.family}: {error}") from error
    return kernels


def divided_sizes(spec: ModelSpec, tensor_size: int) -> dict[str, int]:
    """Return the sizes that must be divisible by `tensor_size`, by their keys in `config.json`."""
    sizes: dict[str, int] = {}
    for own in spec.mixers:
        sizes |= own.divided_sizes(tensor_size)
    for kind, ffn in FFNS.items():
        sizes |= ffn.divided_sizes(spec) if spec.layers_with_ffn(kind) else {}
    return sizes


def summed_widths(spec: ModelSpec, tensor_size: int) -> dict[str, int]:
    """Return the widths that products of mixers on a device sum over, by their keys in `config.json`."""
    widths = {"hidden_size": spec.hidden_size}
    for own in spec.mixers:
        widths |= own.summed_widths(tensor_size)
    return widths
