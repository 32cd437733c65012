"""An application that does not run is named with those that do, before any weight is sent."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rayserve_moe.rollouts import ray_weights


@pytest.mark.parametrize(("running", "told"), [({"qwen3-moe": 1, "a": 2}, "a, qwen3-moe"), ({}, "none")])
def test_an_unknown_application_is_refused_with_the_known_ones(monkeypatch, running, told):
    status = SimpleNamespace(status=lambda: SimpleNamespace(applications=running))
    monkeypatch.setattr(ray_weights, "serve", status)
    with pytest.raises(ValueError, match=rf"no application 'default' .* are: {told}$"):
        ray_weights.update_weights_over_ray({}, weight_version="1")
