"""Sampling parameters of prompts, in SGLang's names: what may be given, and the seed of every prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

INT32_MAX = 2**31 - 1


class BadRow(ValueError):
    """A prompt that cannot be asked for; says why, without repeating it."""


def _number(least: float, most: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and least <= value <= most


def _whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _truth(value: Any) -> bool:
    return isinstance(value, bool)


def _strings(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value))


def _token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_whole(0, INT32_MAX), value))


def _biases(value: Any) -> bool:
    if not isinstance(value, Mapping) or not all(map(_number(-100, 100), value.values())):
        return False
    return all(isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 10 for name in value)


SAMPLING: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "max_new_tokens": ("a whole number that is not negative", _whole(0, INT32_MAX)),
    "min_new_tokens": ("a whole number that is not negative", _whole(0, INT32_MAX)),
    "temperature": ("a number from 0 to 100", _number(0, 100)),
    "top_p": ("a number above 0, at most 1", _number(1e-12, 1)),
    "top_k": ("a whole number, -1 or 0 for all tokens", _whole(-1, INT32_MAX)),
    "min_p": ("a number from 0 to 1", _number(0, 1)),
    "stop": ("a string or a list of strings", _strings),
    "stop_token_ids": ("a list of token ids", _token_ids),
    "ignore_eos": ("true or false", _truth),
    "skip_special_tokens": ("true or false", _truth),
    "no_stop_trim": ("true or false", _truth),
    "presence_penalty": ("a number from -2 to 2", _number(-2, 2)),
    "frequency_penalty": ("a number from -2 to 2", _number(-2, 2)),
    "repetition_penalty": ("a number from 0.01 to 100", _number(0.01, 100)),
    "logit_bias": ("an object of numbers from -100 to 100 by token id in digits", _biases),
    "sampling_seed": ("a whole number of 64 bits", _whole(-(2**63), 2**63 - 1)),
}
"""By name: what a value should be, and whether it is."""


def check_sampling(params: object) -> dict[str, Any]:
    """Return sampling parameters as they are; BadRow names what is unknown, or not as it should be."""
    if not isinstance(params, Mapping):
        raise BadRow("`sampling_params` should be an object")
    if not SAMPLING.keys() >= params.keys():
        raise BadRow(f"`sampling_params` may only hold {', '.join(SAMPLING)}")
    for name, value in params.items():
        wanted, is_right = SAMPLING[name]
        if not is_right(value):
            raise BadRow(f"`sampling_params.{name}` should be {wanted}")
    return dict(params)


def seed_of(job_seed: int, prompt_id: str, *, sampling: Mapping[str, Any]) -> int:
    """The seed of a prompt, 32 bits; all its samples share it, and differ by their numbers.

    It depends on nothing but the job's seed, or the prompt's own `sampling_seed` in its place, and the prompt's id.
    """
    text = f"{sampling.get('sampling_seed', job_seed)}/{prompt_id}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
