"""Real servers over real engines: tiny random checkpoints, uvicorn in a thread, a free port."""

from __future__ import annotations

import contextlib
import time

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import load_file, save_file

from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from tests.support.engine import step_gate
from tests.support.engine.host_runners import shared_by_many
from tests.support.engine.shared_settings import ONE_ROW, SERVED, write_served
from tests.support.models.scripted import scripted_engine
from tests.support.serving.http_client import ask
from tests.support.serving.http_server import running

POISONED_TOKEN_ID = 300
"""It makes the logits NaN in the poisoned checkpoint, whose weights are all finite."""


@contextlib.contextmanager
def served(engine, **server_settings):
    """Serve an engine; yields the server's address."""
    state = ApiState(engine.loop, engine.tokenizer, ServerSettings(**server_settings))
    with running(create_api(state)) as url:
        yield url


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_served(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="session")
def other_checkpoint(tmp_path_factory):
    """Other weights for the same model."""
    return write_served(tmp_path_factory.mktemp("checkpoints") / "other", seed=1)


@pytest.fixture(scope="session")
def poisoned_checkpoint(tmp_path_factory):
    path = write_served(tmp_path_factory.mktemp("checkpoints") / "poisoned")
    weights = load_file(path / "model.safetensors")
    # Only this token has a value in one dimension, and the first layer's values overflow on it.
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, 0] = np.arange(len(embedding)) == POISONED_TOKEN_ID
    weights["model.layers.0.self_attn.v_proj.weight"][:, 0] = np.finfo(np.float32).max
    save_file(weights, path / "model.safetensors")
    return path


@pytest.fixture(scope="session")
def engine(checkpoint):
    with shared_by_many():
        engine = Engine(model_path=str(checkpoint), **SERVED)
    with engine:
        yield engine


@pytest.fixture(scope="module")
def second_engine(checkpoint):
    """Another replica of `engine`."""
    with shared_by_many():
        engine = Engine(model_path=str(checkpoint), **SERVED)
    with engine:
        yield engine


@pytest.fixture
def layout(engine):
    return engine.loop.card.routing


@pytest.fixture
def first_weights_afterwards(http, checkpoint):
    """Have the engine go on with its first weights, whatever a test has it serve."""
    yield
    ask(http, "/continue_generation")
    ask(http, "/update_weights_from_disk", model_path=str(checkpoint), weight_version="0")


@pytest.fixture(scope="session")
def small_engine(poisoned_checkpoint):
    """One running request, one waiting, no routing, and a token that makes the logits NaN."""
    with Engine(model_path=str(poisoned_checkpoint), max_waiting_requests=1, **ONE_ROW) as engine:
        yield engine


@pytest.fixture
def poisoned_states(poisoned_checkpoint):
    """A server of hidden states, with a token whose states are no numbers; its programs are those of `engine`."""
    with Engine(model_path=str(poisoned_checkpoint), **SERVED) as engine:
        with served(engine) as url, httpx.Client(base_url=url, timeout=600) as client:
            yield client
        assert_idle(engine)


@pytest.fixture(scope="session")
def url(engine):
    with served(engine) as url:
        yield url


@pytest.fixture(scope="session")
def small_url(small_engine):
    with served(small_engine) as url:
        yield url


@pytest.fixture
def http(url, engine):
    with httpx.Client(base_url=url, timeout=600) as client:
        yield client
    assert_idle(engine)


@pytest.fixture
def small_http(small_url, small_engine):
    with httpx.Client(base_url=small_url, timeout=600) as client:
        yield client
    assert_idle(small_engine)


@pytest.fixture
def unhurried(engine):
    """What is to be met while it runs still runs, however busy the machine is."""
    with step_gate.unhurried(engine.loop, delay_s=0.02):
        yield


@pytest.fixture
def client(url, engine):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        yield client
    assert_idle(engine)


@pytest.fixture(scope="session")
def scripted(tmp_path_factory):
    """An engine whose chats write what a script says (`tests.support.models.scripted`)."""
    with scripted_engine(tmp_path_factory.mktemp("checkpoints")) as engine:
        yield engine


@pytest.fixture(scope="session")
def scripted_url(scripted):
    with served(scripted) as url:
        yield url


@pytest.fixture
def scripted_http(scripted_url, scripted):
    with httpx.Client(base_url=scripted_url, timeout=600) as client:
        yield client
    assert_idle(scripted)


@pytest.fixture
def scripted_client(scripted_url, scripted):
    with openai.OpenAI(base_url=f"{scripted_url}/v1", api_key="unused", max_retries=0) as client:
        yield client
    assert_idle(scripted)


def assert_idle(engine, within_s=600.0):
    """Wait until nothing runs; then every page must be free."""
    deadline = time.monotonic() + within_s
    while (numbers := engine.loop.statistics())["requests_live"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert numbers["requests_live"] == 0
    engine.loop.check_integrity()
    numbers = engine.loop.statistics()
    assert numbers["pages_free"] == numbers["pages_total"]
    assert numbers["requests_running"] == numbers["requests_waiting"] == 0
