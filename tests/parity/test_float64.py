"""Torch computes in float64 within `no_float32`, even where code requests float32."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
float64 = pytest.importorskip("tests.parity.float64", reason="float64 is torch's")

pytestmark = pytest.mark.parity


@pytest.mark.parametrize(
    "compute",
    [
        lambda values: values.float(),
        lambda values: values.to(torch.float32),
        lambda values: values.type(torch.float32),
        lambda values: torch.nn.functional.softmax(values, dim=-1, dtype=torch.float32),
        lambda values: values + torch.zeros(3, dtype=torch.float32),
        lambda values: values + torch.full((3,), 0.5),
    ],
    ids=["float", "to", "type", "softmax", "zeros", "default"],
)
def test_requests_for_float32_compute_in_float64(compute):
    values = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    with float64.no_float32():
        found = compute(values)
    assert found.dtype is torch.float64 and not torch.equal(found, found.float().double())
    assert torch.get_default_dtype() is torch.float32


def test_float32_inputs_are_rejected():
    weights = torch.ones(3, dtype=torch.float32)
    with pytest.raises(AssertionError, match="returned float32"), float64.no_float32():
        weights * 2
