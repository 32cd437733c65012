"""Sending the tensors of a checkpoint to an engine, as a trainer does, in place of having it read them."""

from __future__ import annotations

import time
from pathlib import Path

from rayserve_moe import Engine
from rayserve_moe.checkpoints.bucket import SentBucket, SentTensor
from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.engine.control import WeightOrder
from rayserve_moe.engine.tensor_updates import BucketOrder
from rayserve_moe.engine.weight_orders import WeightOutcome
from tests.support.steps import WITHIN_S


def send_weights(engine: Engine, path: Path, *, weight_version: str | None = None) -> WeightOutcome:
    """Send them in two buckets; returns the outcome of the last."""
    files, update_id = open_checkpoint(path), str(time.monotonic_ns())
    tensors = [SentTensor(name, files.read(name)) for name in files.tensors]
    for number in range(2):
        order = BucketOrder(update_id, WeightOrder("", weight_version), number, is_last=number == 1)
        outcome = engine.loop.control.tensors.stage(SentBucket(tuple(tensors[number::2])), order).result(WITHIN_S)
        assert outcome.success, outcome.message
    return outcome
