"""Transfer of a trainer's weights to servers in its own Ray cluster: one object per bucket and share, no other copy."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from rayserve_moe.checkpoints.bucket import SentShares, SentTensor, WantedTensor, pieces_for
from rayserve_moe.engine.updates.orders import WeightOrder
from rayserve_moe.rollouts.answers import Faulty, Refused, Unavailable
from rayserve_moe.rollouts.weights import BUCKET_BYTES, HeldDtypes, bucketed, rounded, sent_tensors

APPLICATION, DEPLOYMENT = "default", "moe-server"
UNAVAILABLE = 503


def update_weights_over_ray(
    params: Mapping[str, Any],
    *,
    weight_version: str,
    base: Mapping[str, Any] | None = None,
    app: str = APPLICATION,
    bucket_bytes: int = BUCKET_BYTES,
    abort_all_requests: bool = False,
) -> dict[str, Any]:
    """Send `params` and switch to them, like `RolloutClient.update_weights_from`, from a process of the same cluster.

    `app` is the name of the Serve application. Each host fetches only its share; hosts of several replicas that need
    the same share use the same object. Returns `success`, `message`, `weight_version`, and `sent_bytes`: by replica, a
    list over its hosts. Raises ValueError for an unknown application, Refused if the server keeps its old weights, and
    Unavailable if it does not answer.
    """
    server = Server(app)
    info = server.call("held")
    held = HeldDtypes(info["dtype"], tuple(info["float32_tensors"]))
    tensors = sent_tensors(rounded(params, held), None if base is None else rounded(base, held))
    base_version = info["weight_version"] if base is not None else None
    update_id, buckets = uuid.uuid4().hex, bucketed(tensors, bucket_bytes)
    order = WeightOrder("", weight_version, aborts_requests=abort_all_requests)
    sent_bytes: dict[str, list[int]] = {}
    outcome, is_whole = None, False
    try:
        for number, bucket in enumerate(buckets):
            heads = [(tensor.name, tensor.shape) for tensor in bucket]
            wanted = server.call("wanted", update_id, number, heads, base_version)
            shares = shares_for(bucket, wanted, base_version=base_version)
            is_last = number == len(buckets) - 1
            outcome = server.call("stage", update_id, number, shares, order if is_last else None)
            if not outcome.success:
                raise Refused(outcome.message)
            for name, share in shares.items():
                before = sent_bytes.get(name, [0] * len(share.num_bytes))
                sent_bytes[name] = [sum(pair) for pair in zip(before, share.num_bytes, strict=True)]
        is_whole = True
    finally:
        if not is_whole:
            with suppress(Faulty, Refused, Unavailable):
                server.call("drop", update_id)
    assert outcome is not None, "at least one bucket was sent"
    return {
        "success": True,
        "message": outcome.message,
        "weight_version": outcome.weight_version,
        "sent_bytes": sent_bytes,
    }


def shares_for(
    bucket: Sequence[SentTensor],
    wanted: Mapping[str, Sequence[Sequence[WantedTensor]]],
    *,
    base_version: str | None = None,
) -> dict[str, SentShares]:
    """Return, by replica, its hosts' parts of a bucket as objects; hosts that need the same part share an object."""
    objects: dict[tuple[WantedTensor, ...], tuple[ray.ObjectRef, int]] = {}
    shares = {}
    for name, hosts in wanted.items():
        for host in map(tuple, hosts):
            if host not in objects:
                pieces = pieces_for(bucket, host)
                objects[host] = ray.put(pieces), sum(piece.num_bytes for piece in pieces)
        refs, sizes = zip(*(objects[tuple(host)] for host in hosts), strict=True)
        shares[name] = SentShares(refs, sizes, base_version)
    return shares


class Server:
    """The replicas of an application; any of them answers for all."""

    def __init__(self, app: str) -> None:
        if app not in (running := serve.status().applications):
            names = ", ".join(sorted(running)) or "none"
            raise ValueError(f"no application {app!r} in this Ray cluster, whose applications are: {names}")
        handle = serve.get_deployment_handle(DEPLOYMENT, app)
        # The caller has no event loop, whatever Serve's environment has by default; references are passed as such.
        if not handle.is_initialized:  # Serve caches the handles of a process
            handle._init(_run_router_in_separate_loop=True)
        self._handle = handle.options(_by_reference=True)

    def call(self, name: str, *arguments: Any) -> Any:
        try:
            answer = self._handle.sent_weights.remote(name, arguments).result()
        except (RayError, RayServeException) as error:
            raise Unavailable(f"the server does not answer: {type(error).__name__}") from error
        if (refusal := answer.refusal) is None:
            return answer.value
        if refusal.status == UNAVAILABLE:
            raise Unavailable(refusal.message)
        raise Refused(refusal.message, refusal.status) if refusal.status < 500 else Faulty(refusal.message)
