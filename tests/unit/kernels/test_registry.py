"""Every table of kernels is whole, is found by its name, and says the same of itself in every process."""

from __future__ import annotations

import dataclasses

import pytest

from rayserve_moe.kernels.registry import CPU, KERNELS

FUNCTIONS = [field.name for field in dataclasses.fields(CPU) if field.name not in {"name", "layouts", "dtype"}]


@pytest.mark.parametrize("name", KERNELS)
def test_a_table_has_a_function_for_every_block(name):
    assert all(callable(getattr(KERNELS[name], function)) for function in FUNCTIONS)
    assert KERNELS[name].name == name


def test_what_identifies_a_program_is_the_name_of_its_table_and_no_address():
    assert [repr(kernels) for kernels in KERNELS.values()] == [f"Kernels({name})" for name in KERNELS]
