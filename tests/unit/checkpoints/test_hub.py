"""A model of the Hub is one commit, read by ranges of bytes from where the Hub says, or from its cache on this host."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest

from benchmarks.range_server import RangeServer
from rayserve_moe.checkpoints import hub, transfer
from rayserve_moe.checkpoints.files import CheckpointError, open_checkpoint
from rayserve_moe.checkpoints.model_path import located, with_small_files
from rayserve_moe.checkpoints.places import one_revision

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_server(indexed: Path, monkeypatch, tmp_path) -> Iterator[RangeServer]:
    """A Hub with one model, `org/model`, at one commit."""
    with RangeServer(indexed.parent, paths={rf"^/org/model/resolve/{COMMIT}/": "/model/"}) as server:
        files = [{"rfilename": f.name, "size": f.stat().st_size, "blobId": f.name} for f in indexed.iterdir()]
        model = {"id": "org/model", "sha": COMMIT, "siblings": files}
        for revision in ("", "/revision/main", f"/revision/{COMMIT}"):
            server.answers[f"/api/models/org/model{revision}"] = json.dumps(model).encode()
        server.headers = {"X-Repo-Commit": COMMIT}
        monkeypatch.setattr(transfer, "FIRST_WAIT_S", 0.001)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        for module in (huggingface_hub.constants, huggingface_hub.hf_api, huggingface_hub.file_download):
            monkeypatch.setattr(module, "ENDPOINT", server.url, raising=False)
        monkeypatch.setattr(
            huggingface_hub.constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            server.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield server


@pytest.mark.parametrize("path", ["org/model", "hf://org/model", "org/model@main", f"hf://org/model@{COMMIT}"])
def test_a_model_of_the_hub_is_read_at_its_commit(hub_server, indexed, tmp_path, path):
    assert located(path, cache_directory=tmp_path) == f"hf://org/model@{COMMIT}"
    files, wanted = open_checkpoint(path), open_checkpoint(indexed)
    assert files.is_remote and str(files.directory) == f"hf://org/model@{COMMIT}"
    for name in wanted.tensors:
        np.testing.assert_array_equal(files.read(name), wanted.read(name))
    files.check_unchanged()
    small = with_small_files(str(files.directory), cache_directory=tmp_path)
    assert (small / "tokenizer.json").read_bytes() == (indexed / "tokenizer.json").read_bytes()


def test_the_hub_is_asked_once_per_file_where_its_bytes_lie(hub_server, indexed, monkeypatch):
    asked = []
    metadata = huggingface_hub.get_hf_file_metadata
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: (asked.append(url), metadata(url))[1])
    files = open_checkpoint("org/model")
    for name in files.tensors:
        files.read(name)
    assert len(asked) == len(set(asked)) == len({entry.file for entry in files.tensors.values()}) + 2
    monkeypatch.setattr(hub, "LOCATION_S", -1.0)
    files = open_checkpoint("org/model")
    assert len(set(asked)) < len(asked), "an address that has grown old is asked for again"


def _cached(indexed: Path, cache: Path) -> Path:
    snapshot = cache / "hub" / "models--org--model" / "snapshots" / COMMIT
    shutil.copytree(indexed, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_a_whole_snapshot_in_the_cache_is_a_local_directory(hub_server, indexed, tmp_path):
    snapshot = _cached(indexed, tmp_path)
    assert open_checkpoint("org/model").directory == snapshot
    hub_server.faults.deny = 503
    assert open_checkpoint(f"hf://org/model@{COMMIT}").directory == snapshot, "a commit needs no Hub"


def test_a_snapshot_without_all_weights_is_none(hub_server, indexed, tmp_path):
    next(_cached(indexed, tmp_path).glob("*.safetensors")).unlink()
    assert open_checkpoint("org/model").is_remote


def test_without_the_hub_the_cache_serves(hub_server, indexed, tmp_path, caplog):
    snapshot = _cached(indexed, tmp_path)
    hub_server.faults.deny = 503
    assert one_revision("org/model") == f"hf://org/model@{COMMIT}"
    assert open_checkpoint("org/model").directory == snapshot
    assert "is read from the Hub's cache: the server answers 503" in caplog.text


def test_offline_and_not_in_the_cache_is_said(hub_server, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"^org/model: .*not in the Hub's cache while HF_HUB_OFFLINE is set$"):
        open_checkpoint("org/model")


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, "RepoNotFound", "no such directory, and no such model on the Hub that HF_TOKEN may see"),
        (404, "RepoNotFound", "no such directory, and no such model on the Hub that HF_TOKEN may see"),
        (403, "GatedRepo", "gated on the Hub: accept its terms there, and set HF_TOKEN"),
        (404, "RevisionNotFound", "the model has no revision main on the Hub"),
        (401, "", "not authorised"),
        (503, "", "the server answers 503, at each of 6 attempts"),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub_server, status, code, message):
    hub_server.faults.deny, hub_server.headers = status, {"X-Error-Code": code}
    with pytest.raises(CheckpointError, match=f"^org/model@main: {message}") as refused:
        open_checkpoint("org/model@main")
    assert "\n" not in str(refused.value)


def test_a_directory_wins_over_a_model_of_its_name(hub_server, indexed, tmp_path, monkeypatch):
    shutil.copytree(indexed, tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("org/model").directory == Path("org/model")
