"""Malformed adapters of every layout: each is refused by the name of a tensor, and nothing that serves changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from tests.http.test_adapters import LOAD, UNLOAD, refusal
from tests.http.test_adapters_beside import ASK, BESIDE
from tests.support.checkpoints.adapters import LAYOUTS, MadeAdapter, make_adapter_beside
from tests.support.engine.shared_settings import write_served
from tests.support.serving.http_client import GENERATE, ask
from tests.support.serving.http_server import running as serving

pytestmark = pytest.mark.slow
Tensors = dict[str, np.ndarray]
DIGITS = "9" * 5000


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served(tmp_path_factory.mktemp("served") / "tiny", seed=11)


@pytest.fixture(scope="module")
def http(base: Path) -> Iterator[httpx.Client]:
    with Engine(str(base), **BESIDE, lora_experts=True) as engine:
        state = ApiState(engine.loop, engine.tokenizer, ServerSettings())
        with serving(create_api(state)) as url, httpx.Client(base_url=url, timeout=60) as client:
            yield client


def of_experts(tensors: Tensors, side: str = "A") -> str:
    """Return the name of the last tensor of experts on a side."""
    return [name for name in tensors if ".experts" in name and f"lora_{side}" in name][-1]


def without_half(tensors: Tensors) -> str:
    del tensors[of_experts(tensors, "B")]
    return of_experts(tensors)


def with_nan(tensors: Tensors) -> str:
    name = of_experts(tensors, "B")
    tensors[name] = tensors[name].copy()
    tensors[name].flat[-1] = np.nan
    return name


def transposed(tensors: Tensors) -> str:
    name = of_experts(tensors)
    tensors[name] = np.swapaxes(tensors[name], -1, -2)
    return name


def cut(tensors: Tensors) -> str:
    """Remove the last row: a rank, or a part of the ranks of all experts."""
    name = of_experts(tensors)
    tensors[name] = tensors[name][..., :-1, :]
    return name


def flattened(tensors: Tensors) -> str:
    name = of_experts(tensors)
    tensors[name] = tensors[name].reshape(-1)
    return name


def empty(tensors: Tensors) -> str:
    for side in "AB":
        tensors[of_experts(tensors, side)] = np.zeros((0, 4, 0), np.float32)
    return of_experts(tensors)


def renamed(tensors: Tensors, module: str) -> str:
    """Move a pair to another module."""
    old = of_experts(tensors).partition(".lora_A")[0]
    for side in "AB":
        tensors[f"{module}.lora_{side}.weight"] = tensors.pop(f"{old}.lora_{side}.weight")
    return module[:12]  # long names are shortened


def of_a_far_expert(tensors: Tensors) -> str:
    return renamed(tensors, f"base_model.model.model.layers.0.mlp.experts.{DIGITS}.up_proj")


def of_a_far_layer(tensors: Tensors) -> str:
    return renamed(tensors, f"base_model.model.model.layers.{DIGITS}.mlp.experts.w3")


def among_many_others(tensors: Tensors) -> str:
    """Add twenty thousand pairs of a module that the model does not have."""
    module = "base_model.model.model.layers.0.mlp.experts.0.proj_"
    half = np.zeros((1, 1), np.float32)
    tensors |= {f"{module}{number}.lora_{side}.weight": half for number in range(20_000) for side in "AB"}
    return f"{module}0"


FAULTS: tuple[Callable[[Tensors], str], ...] = (
    *(without_half, with_nan, transposed, cut, flattened, empty),
    *(of_a_far_expert, of_a_far_layer, among_many_others),
)
CONFIGS = {
    "rank 2 by the": {"r": 2},
    "exceeds max_lora_rank": {"r": 5},
    "is not finite in": {"lora_alpha": 1e308},
    "more than 3 repetitions": {"rank_pattern": {".*" * 30 + "!": 4}},
}
"""Changes of the config, by a part of the message that refuses them."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_malformed_adapters_are_refused_by_name_and_change_nothing(
    http: httpx.Client, base: Path, tmp_path: Path, layout: str
):
    made = make_adapter_beside(base, seed=1, rank=3, experts=layout)
    wide = make_adapter_beside(base, seed=1, experts=layout, rank=5)
    ask(http, LOAD, lora_name="good", lora_path=str(made.write(tmp_path / "good")))
    served = answers(http)
    for number, fault in enumerate(FAULTS):
        tensors = dict(made.tensors)
        name = fault(tensors)
        message = refused(http, replace(made, tensors=tensors), tmp_path / f"{number}")
        assert name.removesuffix(".lora_A.weight") in message, f"{fault.__name__}: {message}"
    for number, (part, changes) in enumerate(CONFIGS.items()):
        broken = wide if changes.get("r") == 5 else made
        message = refused(http, replace(broken, config=broken.config | changes), tmp_path / f"config {number}")
        assert part in message, message
    key = refusal(http.post(LOAD, json={"lora_name": "good@0123456789ab", "lora_path": str(tmp_path / "good")}))
    assert "may not end in @" in key, "a resumed request could take it for the bytes that it began with"
    assert answers(http) == served
    assert [each["id"] for each in http.get("/v1/models").json()["data"]][1:] == ["good"]
    again = ask(http, LOAD, lora_name="again", lora_path=str(tmp_path / "good"))
    assert again["success"] and answers(http, "again")[1] == served[1]
    for name in ("good", "again"):
        ask(http, UNLOAD, lora_name=name)


def refused(http: httpx.Client, adapter: MadeAdapter, directory: Path) -> str:
    """Return the message that refuses an adapter, beside the weights and merged alike."""
    path = str(adapter.write(directory))
    message = refusal(http.post(LOAD, json={"lora_name": "bad", "lora_path": path}))
    merged = http.post(LOAD, json={"lora_name": "bad", "lora_path": path, "merge": True})
    assert merged.status_code == 400 or "max_lora_rank" in message, "a merged adapter may have any rank"
    if merged.status_code == 200:
        ask(http, UNLOAD, lora_name="bad", weight_version="0")
    assert len(message) < 1000 and "\n" not in message and str(directory) not in message
    return message


def answers(http: httpx.Client, name: str = "good") -> list[list[int]]:
    """Return the ids of the base and of an adapter."""
    return [ask(http, GENERATE, **ASK | {"lora_path": each})["output_ids"] for each in (None, name)]
