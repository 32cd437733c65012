"""Weights of a trainer reach a server as it would have read them, rounded by the same rule."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import load_file

from rayserve_moe import Engine
from rayserve_moe.checkpoints.bucket import SentTensor
from rayserve_moe.rollouts.answers import Refused
from rayserve_moe.rollouts.client import BlockingRolloutClient
from rayserve_moe.rollouts.weights import HeldDtypes, WeightSending, rounded, sent_tensors
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from tests.support.engine.shared_settings import ONE_ROW, write_served
from tests.support.serving.http_server import running

ROUTER = "model.layers.2.mlp.gate.weight"
HELD = HeldDtypes("bfloat16", ("model.layers.*.mlp.gate.weight",))


@given(arrays(np.float32, 8, elements=st.floats(-(2.0**99), 2.0**99, width=32)))
def test_rounding_is_to_nearest_even(values):
    found = rounded({"a": values, ROUTER: values}, HELD)
    np.testing.assert_array_equal(found["a"], values.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(found[ROUTER], values)
    np.testing.assert_array_equal(rounded({"a": jnp.asarray(values)}, HELD)["a"], found["a"])
    np.testing.assert_array_equal(rounded(found, HELD)["a"], found["a"])


@pytest.mark.parametrize("wrong", [np.full(3, np.inf, np.float32), np.full(3, 3.4e38, np.float32), np.arange(3)])
def test_what_cannot_be_served_is_refused(wrong):
    with pytest.raises(ValueError, match="a "):
        rounded({"a": wrong}, HELD)


@given(st.sets(st.integers(0, 99)))
def test_a_difference_makes_the_one_of_the_other_in_the_fewest_bytes(positions):
    base = np.arange(100, dtype=np.float32)
    changed = base.copy()
    changed[list(positions)] = -1
    found = sent_tensors({"a": changed}, {"a": base})
    assert bool(found) == bool(positions)
    for tensor in found:
        made, at = base.copy(), slice(None) if tensor.positions is None else tensor.positions
        made[at] = tensor.values
        np.testing.assert_array_equal(made, changed)
        sent = tensor.values.nbytes + (0 if tensor.positions is None else tensor.positions.nbytes)
        assert sent <= min(8 * len(positions), 400)


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return [write_served(folder / str(seed), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def client(paths) -> Iterator[BlockingRolloutClient]:
    with (
        Engine(model_path=str(paths[0]), dtype="float32", **ONE_ROW) as engine,
        running(create_api(ApiState(engine.loop, engine.tokenizer))) as url,
        BlockingRolloutClient(url) as client,
    ):
        client.engine = engine
        yield client


def served(client: BlockingRolloutClient) -> dict[str, list[np.ndarray]]:
    """What lies on the devices."""
    params = client.engine.runner.weights.params
    return {f"{group}.{name}": np.array(array) for group in params for name, array in params[group].items()}


def test_a_call_serves_what_the_disk_would(client, paths):
    """Whole, then a delta of what differs, in many buckets; and a wrong base changes nothing."""
    first, other = (load_file(path / "model.safetensors") for path in paths)
    assert client.model_info()["dtype"] == "float32"
    wanted = {}
    for path in paths:
        client.update_weights(str(path), weight_version="disk")
        wanted[path] = served(client)
    answer = client.update_weights_from(first, weight_version="wire", bucket_bytes=100_000)
    assert answer["success"] and client.weight_version() == answer["weight_version"] == "wire"
    np.testing.assert_equal(served(client), wanted[paths[0]])
    with pytest.raises(Refused, match="base_version"):
        client.update_weights_from(other, weight_version="never", base=first, base_version="disk")
    np.testing.assert_equal(served(client), wanted[paths[0]])
    some = {name: value.copy() for name, value in first.items()}
    some[ROUTER][0, :3] = other[ROUTER][0, :3]
    client.update_weights_from(
        {name: jnp.asarray(value) for name, value in some.items()}, weight_version="3", base=first
    )
    client.update_weights_from(other, weight_version="4", base=some)
    np.testing.assert_equal(served(client), wanted[paths[1]])
    with pytest.raises(Refused, match=r"no tensor model\.x"):
        client.update_weights_from({"model.x": first[ROUTER]}, weight_version="never")
    assert client.weight_version() == "4"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, asyncio.CancelledError, MemoryError])
def test_a_client_that_is_interrupted_between_buckets_leaves_nothing_staged(interruption, client, paths, monkeypatch):
    whole, staged = WeightSending.buckets, []

    def interrupted(sending: WeightSending, tensors: list[SentTensor], *, is_delta: bool) -> Iterator[Any]:
        yield next(iter(whole(sending, tensors, is_delta=is_delta)))
        staged.append(client.engine.loop.control.tensors.num_staged(sending.update_id))
        raise interruption

    first, other = (load_file(path / "model.safetensors") for path in paths)
    client.update_weights_from(first, weight_version="whole")
    before, tensors = served(client), client.engine.loop.control.tensors
    monkeypatch.setattr(WeightSending, "buckets", interrupted)
    with pytest.raises(interruption):
        client.update_weights_from(other, weight_version="never", bucket_bytes=100_000, update_id=interruption.__name__)
    assert staged == [1] and tensors.num_staged(interruption.__name__) == 0
    assert client.weight_version() == "whole"
    np.testing.assert_equal(served(client), before)
