"""Sending the tensors of a checkpoint to an engine, as a trainer does, in place of having it read them."""

from __future__ import annotations

import time
from pathlib import Path

from rayserve_moe import Engine
from rayserve_moe.checkpoints.bucket import SentBucket, SentShares, SentTensor, pieces_for
from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.engine.control import WeightOrder
from rayserve_moe.engine.updates.orders import WeightOutcome
from rayserve_moe.engine.updates.tensors import BucketOrder
from tests.support.engine.step_gate import WITHIN_S


def send_weights(engine: Engine, path: Path, *, weight_version: str | None = None) -> WeightOutcome:
    """Send them in two buckets, the second one cut into the shares of hosts; returns the outcome of the last."""
    files, update_id = open_checkpoint(path), str(time.monotonic_ns())
    tensors = [SentTensor(name, files.read(name)) for name in files.tensors]
    for number in range(2):
        order = BucketOrder(update_id, WeightOrder("", weight_version), number, is_last=number == 1)
        bucket, updates = tensors[number::2], engine.loop.control.tensors
        sent: SentBucket | SentShares = SentBucket(tuple(bucket))
        if order.is_last:
            heads = [(tensor.name, tensor.shape) for tensor in bucket]
            pieces = [
                pieces_for(bucket, host) for host in updates.wanted(heads, order, base_version=None).result(WITHIN_S)
            ]
            sent = SentShares(tuple(pieces), tuple(sum(piece.num_bytes for piece in share) for share in pieces))
        outcome = updates.stage(sent, order).result(WITHIN_S)
        assert outcome.success, outcome.message
    return outcome
