"""Model specs with other knobs of their only mixer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.layers.latent import LatentAttention
from rayserve_moe.model.spec import ModelSpec


def attention_of(spec: ModelSpec) -> GroupedAttention:
    """Return the knobs of the only mixer, which is grouped-query attention."""
    (own,) = spec.mixers
    assert isinstance(own, GroupedAttention), own
    return own


def latent_of(spec: ModelSpec) -> LatentAttention:
    """Return the knobs of the only mixer, which is latent attention."""
    (own,) = spec.mixers
    assert isinstance(own, LatentAttention), own
    return own


def with_attention(spec: ModelSpec, *, kind: str = "", windows: Sequence[int] = (), **knobs: Any) -> ModelSpec:
    """Return the model with other knobs of a mixer or of that one's rotation, and with `windows` of its layers.

    The mixer is the one of a `kind`, or the only one.
    """
    (own,) = (mixer for mixer in spec.mixers if kind in ("", mixer.kind))
    assert isinstance(own, GroupedAttention | LatentAttention), own
    of_rope = {name: value for name, value in knobs.items() if hasattr(own.rope, name)}
    others = {name: value for name, value in knobs.items() if name not in of_rope}
    layers = spec.layers
    if windows:
        layers = tuple(replace(layer, window=window) for layer, window in zip(layers, windows, strict=True))
    rope = replace(own.rope, **of_rope) if of_rope else own.rope
    mixer = replace(own, **{"rope": rope, **others})
    mixers = tuple(mixer if each is own else each for each in spec.mixers)
    return replace(spec, mixers=mixers, layers=layers)
