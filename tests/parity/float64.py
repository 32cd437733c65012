"""Run a model of transformers in float64, even where its code requests float32."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of `model` with its float32 parameters and buffers in float64; call it within `no_float32`."""
    return copy.deepcopy(model).double()


@contextmanager
def no_float32() -> Iterator[None]:
    """Compute in float64 where code requests float32 or no dtype.

    Raises:
        AssertionError: If a function of torch returns float32 all the same.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(default)


class _Float64(TorchFunctionMode):
    """Replaces float32 by float64 in the arguments of every function of torch."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        keywords = {name: _wider(value) for name, value in (kwargs or {}).items()}
        result = func(*(_wider(value) for value in args), **keywords)
        assert getattr(result, "dtype", None) is not torch.float32, f"{func} returned float32"
        return result


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
