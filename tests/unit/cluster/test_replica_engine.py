"""What a replica refuses before it reserves a slice."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest

from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.checkpoints.model_path import TRAINED
from rayserve_moe.cluster import replica_engine
from rayserve_moe.config.load import settings_from
from tests.support.checkpoints.broken_checkpoints import WAYS, broken_copy


@pytest.mark.parametrize("way", ["tensor missing", "wrong shape"])
def test_tensors_that_do_not_fit_are_refused_before_a_slice_is_reserved(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reserve(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a slice is reserved")

    monkeypatch.setattr(replica_engine, "GroupExecutor", reserve)
    model = broken_copy(TRAINED["calculator"], way, tmp_path / "model")
    with pytest.raises(CheckpointError, match=WAYS[way][1]):
        replica_engine.start_replica_engine(settings_from({"model_path": str(model)}))
