"""Reader of rotary embeddings in a `config.json`, in the old and the new spelling of its keys."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rayserve_moe.model.config_values import amount_of, flag_of, integer_of, number_of, object_of, refuse_other_values
from rayserve_moe.model.spec import Llama3Spec, QueryScaleSpec, RopeSpec, UnsupportedModelError, YarnSpec


def rope_of(
    config: Mapping[str, Any],
    family: str,
    *,
    theta: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    alpha_dim: int | None = None,
) -> RopeSpec:
    """Read `rope_parameters`, or `rope_scaling` beside `rope_theta`; `theta` is the default of the family.

    With `alpha_dim`, the rotary width, a `dynamic` scaling with a fixed `alpha` is converted to its equivalent theta.

    Raises: UnsupportedModelError for another type, or for a partial rotation if `rotary_dim` is None.
    """
    rope = _parameters(config)
    found = number_of(rope, "rope_theta", number_of(config, "rope_theta", theta))
    kind = _kind(rope)
    if kind == "dynamic" and alpha_dim and alpha_dim > 2 and rope.get("alpha") is not None:
        found *= number_of(rope, "alpha", 1.0) ** (alpha_dim / (alpha_dim - 2))
        kind = "default"
    refuse_other_values({"rope_type": kind}, family, rope_type=("default", "yarn", "llama3"))
    if rotary_dim is None:
        refuse_other_values({"partial_rotary_factor": _partial(config)}, family, partial_rotary_factor=(1.0,))
    if found < 1:
        raise UnsupportedModelError(f"config.json: rope_theta = {found:g} (with its scaling) is less than 1")
    yarn = _yarn(config, rope) if kind == "yarn" else None
    if yarn and found <= 1:
        raise UnsupportedModelError(f"config.json: rope_theta = {found:g} must exceed 1 for a yarn scaling")
    llama3 = _llama3(config, rope) if kind == "llama3" else None
    return RopeSpec(found, rotary_dim=rotary_dim, interleaved=interleaved, yarn=yarn, llama3=llama3)


def rope_of_type(
    config: Mapping[str, Any], family: str, kind: str, *, head_dim: int, default: Mapping[str, Any]
) -> RopeSpec:
    """Read the rotation of layers of a type, `rope_parameters[kind]`; a config without `rope_parameters` has `default`.

    Raises: UnsupportedModelError if the config has no rotation for this type, or another type of rotation.
    """
    if config.get("rope_scaling") is not None:
        raise UnsupportedModelError(
            f"config.json: rope_scaling = {reprlib.repr(config['rope_scaling'])} is not supported for {family} "
            "(only rope_parameters per layer type)"
        )
    of_types = object_of(config, "rope_parameters")
    found = of_types.get(kind) if of_types else default
    if not isinstance(found, Mapping):
        raise UnsupportedModelError(
            f"config.json: rope_parameters must have an object for {kind!r}, found {reprlib.repr(dict(of_types))}"
        )
    if _kind(found) == "proportional":
        return _proportional(found, family, head_dim=head_dim, theta=default["rope_theta"])
    own = {**config, "rope_parameters": found}
    return rope_of(own, family, rotary_dim=rotary_dim_of(own, head_dim, default=head_dim))


def _proportional(rope: Mapping[str, Any], family: str, *, head_dim: int, theta: float) -> RopeSpec:
    """Read a rotation of the first pairs among all pairs of a head, by `partial_rotary_factor`; `theta` is the default.

    Raises: UnsupportedModelError for a scaling, or if no pair or more than all pairs turn.
    """
    refuse_other_values(rope, family, factor=(1.0,))
    share = number_of(rope, "partial_rotary_factor", 1.0)
    num_pairs = int(share * head_dim // 2)
    if not 1 <= num_pairs <= head_dim // 2:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor = {share:g} turns {num_pairs} of {head_dim // 2} pairs of a head"
        )
    found = rope_of({"rope_parameters": {"rope_theta": rope.get("rope_theta")}}, family, theta=theta)
    return replace(found, turning_pairs=None if num_pairs == head_dim // 2 else num_pairs)


def rotary_dim_of(config: Mapping[str, Any], head_dim: int, *, default: int) -> int | None:
    """Return the number of rotated elements per head, by `partial_rotary_factor` or `default`; None for all."""
    key, width = "rotary_dim", default
    if (factor := _partial(config)) is not None:
        key = f"partial_rotary_factor = {reprlib.repr(factor)}"
        width = int(head_dim * number_of({"partial_rotary_factor": factor}, "partial_rotary_factor", 1.0))
    if width % 2 or not 2 <= width <= head_dim:
        raise UnsupportedModelError(
            f"config.json: {key} rotates {width} of head_dim = {head_dim} elements, not an even number"
        )
    return None if width == head_dim else width


def score_scale_of(config: Mapping[str, Any], head_dim: int) -> float | None:
    """Return the scale of attention scores by `mscale_all_dim` of a yarn scaling; None for head_dim ** -0.5."""
    rope = _parameters(config)
    if _kind(rope) == "default" or not (weight := amount_of(rope, "mscale_all_dim")):
        return None
    grown = _mscale(_factor(config, rope), weight)
    return head_dim**-0.5 * grown * grown


def query_scale_of(config: Mapping[str, Any]) -> QueryScaleSpec | None:
    """Return the factor of queries by `llama_4_scaling_beta` of the rotation; None if it has none."""
    rope = _parameters(config)
    beta = amount_of(rope, "llama_4_scaling_beta")
    return QueryScaleSpec(beta, _original_length(config, rope)) if beta else None


def _kind(rope: Mapping[str, Any]) -> Any:
    kinds = (kind for key in ("rope_type", "type") if (kind := rope.get(key)) is not None)
    return next(kinds, "default")


def _parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    scaling, parameters = (object_of(config, key) for key in ("rope_scaling", "rope_parameters"))
    found = scaling or parameters
    nested = [key for key, value in found.items() if isinstance(value, Mapping)]
    if nested:
        raise UnsupportedModelError(f"config.json: rope_parameters per layer type ({nested[0]!r}) are not supported")
    return found


def _partial(config: Mapping[str, Any]) -> Any:
    found = _parameters(config).get("partial_rotary_factor")
    return config.get("partial_rotary_factor") if found is None else found


def _yarn(config: Mapping[str, Any], rope: Mapping[str, Any]) -> YarnSpec:
    factor = _factor(config, rope)
    mscale, mscale_all = (amount_of(rope, key) for key in ("mscale", "mscale_all_dim"))
    grown = _mscale(factor, mscale) / _mscale(factor, mscale_all) if mscale and mscale_all else _mscale(factor, 1.0)
    return YarnSpec(
        factor=factor,
        original_length=_original_length(config, rope),
        beta_fast=number_of(rope, "beta_fast", 32.0),
        beta_slow=number_of(rope, "beta_slow", 1.0),
        truncate=flag_of(rope, "truncate", True),
        attention_factor=number_of(rope, "attention_factor", grown),
    )


def _llama3(config: Mapping[str, Any], rope: Mapping[str, Any]) -> Llama3Spec:
    factors = [number_of(rope, key, 0.0) for key in ("factor", "low_freq_factor", "high_freq_factor")]
    if factors[0] < 1 or factors[1] >= factors[2]:
        raise UnsupportedModelError(
            f"config.json: factors {factors} of a llama3 scaling must be at least 1, and low below high"
        )
    return Llama3Spec(factors[0], _original_length(config, rope), factors[1], factors[2])


def _original_length(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    key = "original_max_position_embeddings"
    return integer_of(rope if config.get(key) is None else config, key, integer_of(config, "max_position_embeddings"))


def _factor(config: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
    if "factor" not in rope:
        raise UnsupportedModelError("config.json: rope_parameters: a yarn scaling has no factor; null derives it")
    if rope["factor"] is None:
        return integer_of(config, "max_position_embeddings") / _original_length(config, rope)
    factor = number_of(rope, "factor", 1.0)
    if factor < 1:
        raise UnsupportedModelError(f"config.json: factor = {reprlib.repr(factor)} of a yarn scaling is less than 1")
    return factor


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
