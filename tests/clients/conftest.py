"""A real server over a tiny random checkpoint, for clients that others have published."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.checkpoints.synthetic import PRESETS, write_checkpoint
from tests.http.conftest import assert_idle, served
from tests.support.engine.shared_settings import SERVED
from tests.support.models.scripted import MODEL, scripted_engine

NUM_LAYERS, TOP_K = PRESETS["tiny"].num_hidden_layers, PRESETS["tiny"].num_experts_per_tok


def client_package(name: str) -> ModuleType:
    """Import a client, or skip the whole module where it is not installed; one that is there but broken is an error."""
    if find_spec(name.partition(".")[0]) is None:
        pytest.skip("`make clients` installs it", allow_module_level=True)
    return import_module(name)


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("clients") / "tiny", PRESETS["tiny"], dtype="float32")


@pytest.fixture(scope="package")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with Engine(model_path=str(checkpoint), served_model_name="m", **SERVED) as engine:
        yield engine


@pytest.fixture(scope="package")
def address(engine: Engine) -> Iterator[str]:
    with served(engine) as address:
        yield address


@pytest.fixture
def url(address: str, engine: Engine) -> Iterator[str]:
    """The server's address. Whatever a client did, the engine is idle and whole after it."""
    yield address
    assert_idle(engine)


@pytest.fixture(scope="package")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose model reasons, then calls two tools, whatever it is asked (`tests.support.models.scripted`)."""
    directory = tmp_path_factory.mktemp("clients")
    with scripted_engine(directory, served_model_name=MODEL, max_model_len=1024) as engine:
        yield engine


@pytest.fixture(scope="package")
def tool_address(scripted: Engine) -> Iterator[str]:
    with served(scripted) as address:
        yield address


@pytest.fixture
def tool_url(tool_address: str, scripted: Engine) -> Iterator[str]:
    """The address of a server whose model has tools, likewise."""
    yield tool_address
    assert_idle(scripted)


def uncached_rows(engine: Engine, token_ids: list[int]) -> np.ndarray:
    """Rows int [tokens - 1, layers, k] of a whole sequence that nothing is cached of: what any turns must add up to."""
    engine.loop.flush()
    answer = engine.generate(input_ids=token_ids, max_new_tokens=0, return_routed_experts=True)
    assert answer["meta_info"]["cached_tokens"] == 0
    info = answer["meta_info"]["routed_experts_info"]
    assert info["missing"] == [] and info["source"] == [[0, len(token_ids), "computed"]]
    raw = answer["meta_info"]["routed_experts"]
    return decode_int32(raw)[:-1]


def decode_int32(encoded: str) -> np.ndarray:
    """What a client of the sglang dialect does, by numpy and base64 alone."""
    return np.frombuffer(base64.b64decode(encoded), "<i4").reshape(-1, NUM_LAYERS, TOP_K)


def logprobs_of(engine: Engine, token_ids: list[int]) -> list[float | None]:
    """Log-probs of the tokens of a whole sequence, None for the first."""
    answer = engine.generate(input_ids=token_ids, max_new_tokens=0, return_logprob=True, logprob_start_len=0)
    entries = answer["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == token_ids
    return [entry[0] for entry in entries]
