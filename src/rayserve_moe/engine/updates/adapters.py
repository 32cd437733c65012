"""Orders that merge a LoRA adapter into the configured checkpoint, or restore that checkpoint."""

from __future__ import annotations

import uuid

from rayserve_moe.engine.updates.orders import WeightOrder
from rayserve_moe.engine.updates.tensors import BucketOrder


def load_fault(merged: str | None) -> str:
    """Return why no adapter can be loaded, or empty. `merged` is the merged adapter, None for other weights."""
    if merged is not None:
        return ""
    return (
        "the serving weights came by an update, and adapters are merged into the configured checkpoint: "
        "load that by /update_weights_from_disk first"
    )


def unload_fault(merged: str | None, name: str) -> str:
    """Return why the adapter `name` cannot be unloaded, or empty."""
    if merged and merged == name:
        return ""
    return "no adapter of that name is loaded" + (f": `{merged}` is" if merged else "")


def adapter_order(name: str, *, weight_version: str | None = None, aborts_requests: bool = False) -> BucketOrder:
    """Return the order of an update by an adapter's body; an empty `name` restores the configured checkpoint."""
    order = WeightOrder("", weight_version, aborts_requests=aborts_requests, adapter=name)
    return BucketOrder(f"adapter-{uuid.uuid4().hex}", order, 0, is_last=True)
