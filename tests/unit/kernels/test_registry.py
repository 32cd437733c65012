"""Every table of kernels is whole, is found by its name, and says the same of itself in every process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.candidates import Candidate, Operation, supports_all
from rayserve_moe.kernels.table import CPU, KERNELS, TPU

DATA = {
    "name",
    "dtype",
    "dtypes",
    "unreachable_bytes",
    "adds_devices_in_order",
    "carries_ranks",
    "has_packed_rows",
    "decay_places",
    "tile",
    "parameters",
    "compiler_options",
}
MAY_BE_ABSENT = {
    "describe_singles",
    "choose",
    "norm_and_project",
    "project",
    "advance_layer",
    "advance_mamba2_layer",
    "choose_tokens",
    "choose_blocks",
    "last_kept",
    "kept_words",
    "project_and_write",
    "products",
    "absorb",
    "expand",
}


def functions_of(record: Any) -> Iterator[Any]:
    """Yield the functions of a table, with the ones of its parts and of all candidates."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Operation):
            assert value.candidates or field.name in MAY_BE_ABSENT
            yield from (each.run for each in value.candidates)
        elif isinstance(value, Candidate):
            yield from functions_of(value.run) if dataclasses.is_dataclass(value.run) else [value.run]
        elif dataclasses.is_dataclass(value) and field.name not in DATA:
            yield from functions_of(value)
        elif field.name not in DATA | MAY_BE_ABSENT:
            yield value


@pytest.mark.parametrize("name", KERNELS)
def test_a_table_has_a_function_for_every_block(name):
    functions = list(functions_of(KERNELS[name]))
    assert len(functions) >= 14 and all(map(callable, functions))
    assert KERNELS[name].name == name


@pytest.mark.parametrize("name", KERNELS)
def test_the_last_candidate_of_an_operation_takes_every_call(name):
    kernels = KERNELS[name]
    attention, experts, recurrence = kernels.attention, kernels.experts, kernels.recurrence
    for operation in (kernels.add_norm, experts.results, experts.sums, attention.project, recurrence.advance):
        assert not operation.candidates or operation.candidates[-1].unsupported_reason is supports_all
        names = [each.name for each in operation.candidates]
        assert len(names) == len(set(names))


def test_a_choice_names_the_reasons_against_the_candidates_before_it():
    small = Candidate("small", abs, lambda number: "" if number < 10 else f"{number} is not below 10")
    even = Candidate("even", abs, lambda number: "odd" if number % 2 else "")
    operation = Operation((small, even, Candidate("any", abs)))
    assert [str(operation.choose(number)) for number in (-3, 12, 13)] == [
        "small",
        "even (small: 12 is not below 10)",
        "any (small: 13 is not below 10; even: odd)",
    ]
    assert operation(-13) == 13 and str(operation.with_first(Candidate("first", abs)).choose(3)) == "first"
    fused = Operation((even,))
    assert fused.choose(1).candidate is None and str(fused.choose(1)) == "separate (even: odd)"
    with pytest.raises(AssertionError, match="no candidate takes this call"):
        fused(1)


def test_what_identifies_a_program_is_the_name_of_its_table_and_no_address():
    assert [repr(kernels) for kernels in KERNELS.values()] == [f"Kernels({name})" for name in KERNELS]


def test_the_example_of_the_docs_is_the_reference():
    text = (Path(__file__).parents[3] / "docs" / "add_a_kernel.md").read_text()
    example: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], example)
    rows, scales = jnp.arange(24.0).reshape(3, 8), jnp.linspace(0.5, 2, 16).reshape(2, 8)
    call = {"layer": 1, "eps": 1e-6}
    for own, wanted in zip(
        example["add_and_norm"](rows, rows, scales, **call, interpret=True),
        CPU.add_norm(rows, rows, scales, **call),
        strict=True,
    ):
        np.testing.assert_allclose(own, wanted)
    table, many = example["TPU_OWN_NORM"], jnp.zeros((8, 8))
    assert str(table.add_norm.choose(rows, rows, scales, **call)) == "own_norm"
    assert str(table.add_norm.choose(many, many, scales, **call)) == "add_norm (own_norm: 8 tokens, not 4 or fewer)"
    assert table.attention is TPU.attention
