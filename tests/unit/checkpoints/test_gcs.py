"""`gs://` goes through gcsfs: ranges of bytes from a server that speaks Google's JSON API, its refusals in one line."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from benchmarks.range_server import RangeServer
from rayserve_moe.checkpoints import remote, transfer
from rayserve_moe.checkpoints.files import CheckpointError, open_checkpoint


@pytest.fixture
def bucket(indexed: Path, monkeypatch) -> Iterator[RangeServer]:
    """Google's storage with `gs://bucket/model`."""
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    pytest.importorskip("gcsfs", reason="gcsfs is the extra `gcs`")
    download = {r"^/download/storage/v1/b/bucket/o/model(%2F|/)": "/model/"}
    with RangeServer(indexed.parent, paths=download) as server:
        for file in indexed.iterdir():
            described = {"name": f"model/{file.name}", "bucket": "bucket", "size": str(file.stat().st_size)}
            described |= {"generation": "1", "kind": "storage#object"}
            for slash in ("/", "%2F"):
                server.answers[f"/storage/v1/b/bucket/o/model{slash}{file.name}"] = json.dumps(described).encode()
        server.answers["/storage/v1/b/bucket/o"] = server.answers["/storage/v1/b/bucket/o/"] = (
            b'{"prefixes": ["model/"]}'
        )
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        monkeypatch.setitem(remote.OPTIONS, "gs", {**remote.OPTIONS["gs"], "token": "anon"})
        monkeypatch.setattr(transfer, "FIRST_WAIT_S", 0.001)
        fsspec.get_filesystem_class("gs").clear_instance_cache()
        yield server
        fsspec.get_filesystem_class("gs").clear_instance_cache()


def test_a_checkpoint_in_a_bucket_is_read_by_ranges(bucket, indexed):
    files, wanted = open_checkpoint("gs://bucket/model"), open_checkpoint(indexed)
    bucket.sent.num_bytes = 0
    name = max(files.tensors, key=lambda each: files.tensors[each].end - files.tensors[each].begin)
    np.testing.assert_array_equal(files.read(name), wanted.read(name))
    assert bucket.sent.num_bytes == files.tensors[name].end - files.tensors[name].begin
    files.check_unchanged()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://bucket/other", "no such checkpoint directory: config.json does not exist"),
        ("gs://missing/model", "bucket missing does not exist"),
    ],
)
def test_what_is_not_there_is_said(bucket, url, message):
    with pytest.raises(CheckpointError, match=f"^{url}: {message}"):
        open_checkpoint(url)


def test_a_forbidden_bucket_is_said(bucket):
    bucket.faults.deny = 403
    with pytest.raises(CheckpointError, match=r"^gs://bucket/model/config.json: access is forbidden \(403\)"):
        open_checkpoint("gs://bucket/model")


def test_without_the_library_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "gs", raising=False)
    with pytest.raises(CheckpointError, match=r"^gs://bucket/model.*gs:// needs .*pip install 'rayserve_moe\[gcs\]'$"):
        open_checkpoint("gs://bucket/model")
