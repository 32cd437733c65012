"""Within `no_float32`, torch computes in float64 whatever code asks for."""

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
def test_what_asks_for_float32_is_computed_in_float64(compute):
    values = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    with float64.no_float32():
        found = compute(values)
    assert found.dtype is torch.float64 and not torch.equal(found, found.float().double())
    assert torch.get_default_dtype() is torch.float32


def test_float32_that_comes_in_is_refused():
    weights = torch.ones(3, dtype=torch.float32)
    with pytest.raises(AssertionError, match="returned float32"), float64.no_float32():
        weights * 2
