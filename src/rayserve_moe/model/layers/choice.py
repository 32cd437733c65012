"""Kernels and size constraints of a model, collected over its mixers and feed-forward networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rayserve_moe.kernels.attention_config import PoolFormat
from rayserve_moe.kernels.candidates import Choice
from rayserve_moe.kernels.operations import AttentionKernels, Kernels
from rayserve_moe.model.layers.table import FFNS, MIXERS
from rayserve_moe.model.spec import MixerSpec, ModelSpec, UnsupportedModelError

NO_POOL_LIMITS = PoolFormat()
"""A pool that every attention takes."""


def attention_choices(spec: ModelSpec, kernels: Kernels, *, pool: PoolFormat) -> dict[str, Choice[AttentionKernels]]:
    """Return the choice of attention for a pool, by kind of mixer.

    Raises: UnsupportedModelError if a mixer has no attention in a table.
    """
    choices = {}
    for own in spec.mixers:
        if (choice_of := MIXERS[own.kind].attention) is not None:
            try:
                choices[own.kind] = choice_of(own, kernels, pool=pool)
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"{spec.family}: {error}") from error
    return choices


def kernels_for(spec: ModelSpec, kernels: Kernels, *, pool: PoolFormat = NO_POOL_LIMITS) -> Kernels:
    """Return the table with the attention of a model for a pool.

    Raises: UnsupportedModelError with the reason of each candidate if none is usable.
    """
    for choice in attention_choices(spec, kernels, pool=pool).values():
        if choice.candidate is None:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.rejected.items())
            raise UnsupportedModelError(f"{spec.family}: no attention of the {kernels.name} kernels: {reasons}")
        kernels = replace(kernels, attention=choice.candidate.run)
    return kernels


def divided_sizes(spec: ModelSpec, tensor_size: int) -> dict[str, int]:
    """Return the sizes that must be divisible by `tensor_size`, by their keys in `config.json`."""
    sizes = _of_mixers(spec, lambda own: own.divided_sizes(tensor_size))
    for kind, ffn in FFNS.items():
        sizes |= ffn.divided_sizes(spec) if spec.layers_with_ffn(kind) else {}
    return sizes


def summed_widths(spec: ModelSpec, tensor_size: int) -> dict[str, int]:
    """Return the widths that products of mixers on a device sum over, by their keys in `config.json`."""
    return {"hidden_size": spec.hidden_size} | _of_mixers(spec, lambda own: own.summed_widths(tensor_size))


def _of_mixers(spec: ModelSpec, sizes_of: Callable[[MixerSpec], dict[str, int]]) -> dict[str, int]:
    """Return the sizes of all mixers by key. If a later mixer differs in a size, that key names its kind."""
    sizes: dict[str, int] = {}
    for own in spec.mixers:
        for name, size in sizes_of(own).items():
            sizes[name if sizes.get(name, size) == size else f"{name} ({own.kind})"] = size
    return sizes
