"""Facts of a model that all of its mixers and feed-forward networks add to: its kernels, and sizes that have to fit."""

from __future__ import annotations

from rayserve_moe.kernels.table import Kernels
from rayserve_moe.model.layers.table import FFNS, MIXERS
from rayserve_moe.model.spec import ModelSpec, UnsupportedModelError


def kernels_for(spec: ModelSpec, kernels: Kernels, *, prefers_flat: bool = False) -> Kernels:
    """Return the table with the kernels that the mixers of a model take.

    `prefers_flat`: with flat rows also where other rows would do.
    Raises: UnsupportedModelError where a mixer has no kernels there.
    """
    for own in spec.mixers:
        try:
            kernels = MIXERS[own.kind].kernels(own, kernels, prefers_flat=prefers_flat)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{spec.family}: {error}") from error
    return kernels


def divided_sizes(spec: ModelSpec, tensor_size: int) -> dict[str, int]:
    """Return the sizes that `tensor_size` devices have to divide, by their keys in `config.json`."""
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
