"""A model behind a URL starts, and takes other weights, as one in a directory; what clients may name has a root."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.range_server import RangeServer
from rayserve_moe.cluster.group_executor import GroupExecutor
from rayserve_moe.config.load import settings_from
from rayserve_moe.config.settings import ClusterSettings, ParallelSettings, Settings, UpdateSettings
from rayserve_moe.execution.card import describe_model
from rayserve_moe.execution.runner import RunnerSettings
from rayserve_moe.requests.records import WeightsRefusedError
from tests.unit.execution.test_staged_weights import assert_weights, loaded


@pytest.fixture(autouse=True)
def _kept_here(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("rayserve_moe.checkpoints.range_cache.FREE_SHARE", 0.0)


@pytest.fixture
def server(core_checkpoint: Path) -> Iterator[RangeServer]:
    with RangeServer(core_checkpoint.parents[1]) as running:
        yield running


def url_of(server: RangeServer, path: Path) -> str:
    return f"{server.url}/{path.relative_to(server.folder)}"


def described(url: str, **changes: object) -> tuple[RunnerSettings, Settings]:
    settings = settings_from({"model_path": url, **changes})
    return describe_model(settings).runner, settings


def test_a_model_behind_a_url_is_described_by_its_own_files(server, core_checkpoint):
    url = url_of(server, core_checkpoint)
    remote, local = (
        describe_model(settings_from({"model_path": url})),
        describe_model(settings_from({"model_path": str(core_checkpoint)})),
    )
    assert replace(remote.card, path="") == replace(local.card, path="") and remote.card.path == url
    assert remote.tokenizer.backing.get_vocab() == local.tokenizer.backing.get_vocab()


def test_a_runner_loads_from_a_url_and_a_second_start_reads_no_tensor_again(server, core_checkpoint):
    url = url_of(server, core_checkpoint)
    runner = loaded(url)
    assert_weights(runner, core_checkpoint, runner.placement)
    before = server.sent.tensor_bytes()
    loaded(url)
    assert server.sent.tensor_bytes() == before


def test_weights_are_staged_from_a_url_below_a_root(server, core_checkpoint, other_checkpoint):
    url = url_of(server, other_checkpoint)
    runner = loaded(core_checkpoint, weight_roots=(server.url,))
    runner.staged.read(url)
    runner.weights = runner.staged.take(runner.weights)
    assert_weights(runner, other_checkpoint, runner.placement)
    server.faults.deny = 403
    with pytest.raises(WeightsRefusedError, match=r"^config.json: access is forbidden \(403\)"):
        runner.staged.read(url)
    with pytest.raises(WeightsRefusedError, match=r"^the checkpoint: lies outside of weight_roots$"):
        loaded(core_checkpoint, weight_roots=(f"{server.url}/runs",)).staged.read(url)


@pytest.mark.parametrize(
    ("roots", "message"),
    [
        ((), "a URL must be below an entry of weight_roots, and no entry is a URL"),
        (("/weights",), "a URL must be below an entry of weight_roots, and no entry is a URL"),
        (("gs://bucket/runs",), "http://127.0.0.1:9/other: lies outside of weight_roots"),
    ],
)
def test_clients_of_a_server_reach_no_url_without_a_root(core_checkpoint, roots, message):
    runner, _ = described(str(core_checkpoint))
    updates = replace(runner, updates=UpdateSettings(weight_roots=roots))
    executor = GroupExecutor(updates, parallel=ParallelSettings(), cluster=ClusterSettings())
    with pytest.raises(WeightsRefusedError, match=f"^{message}$"):
        executor.stage_weights("http://127.0.0.1:9/other", None)
