"""Every table of kernels is whole, is found by its name, and says the same of itself in every process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.table import CPU, KERNELS, TPU

DATA = {"name", "dtype", "dtypes", "has_flat_rows", "parameters", "compiler_options"}
MAY_BE_ABSENT = {"describe_singles", "choose", "add_norm", "norm_and_project"}


def functions_of(record: Any) -> Iterator[Any]:
    """What a table has for the fields that hold functions, those of its parts as well."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if dataclasses.is_dataclass(value) and field.name not in DATA:
            yield from functions_of(value)
        elif field.name not in DATA | MAY_BE_ABSENT:
            yield value


@pytest.mark.parametrize("name", KERNELS)
def test_a_table_has_a_function_for_every_block(name):
    functions = list(functions_of(KERNELS[name]))
    assert len(functions) == 14 and all(map(callable, functions))
    assert KERNELS[name].name == name


def test_what_identifies_a_program_is_the_name_of_its_table_and_no_address():
    assert [repr(kernels) for kernels in KERNELS.values()] == [f"Kernels({name})" for name in KERNELS]


def test_the_example_of_the_docs_is_the_reference():
    text = (Path(__file__).parents[3] / "docs" / "add_a_kernel.md").read_text()
    example: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], example)
    rows, scale = jnp.arange(24.0).reshape(3, 8), jnp.linspace(0.5, 2, 8)
    np.testing.assert_allclose(example["rms_norm"](rows, scale, 1e-6, interpret=True), CPU.norm(rows, scale, 1e-6))
    assert example["TPU_OWN_NORM"].norm is example["rms_norm"] and example["TPU_OWN_NORM"].attention is TPU.attention
