"""HAProxy refuses for a full application: what a replica refuses costs 2.6 ms of CPU on its way there and back.

It does so where both hold: there are as many requests as the replicas take, and one of them has refused one of late. A
few still reach a replica, so that its metrics show the refusals and the first free place is found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from rayserve_moe.serving.kept_paths import KEPT_PATHS

OF_LATE_MS = 100
"""For so long a refusal by a replica stands for others."""
RETRY_AFTER_S = 1
MESSAGE = "the server is busy: its queue of waiting requests is full"
BUSY = {"error": {"message": MESSAGE, "type": "overloaded_error", "param": None, "code": "queue_full"}}
"""What replicas answer with."""
_APP = re.compile(r"^    use_backend (http-(\S+)) if is_\1$", re.MULTILINE)
_ROUTING = re.compile(r"^    # (?:Set txn\.ingress_request_router_app to|Static routing based on path)", re.MULTILINE)
_ROUTED = "-via-ingress-request-router"
_ID = "txn.named"


def refusing(text: str, capacity: Mapping[str, int]) -> str:
    """Return an edited configuration that refuses for the applications named, whose replicas take so many requests."""
    capacity = {safe_name(name): number for name, number in capacity.items()}
    backends = _APP.findall(text)  # those of longer paths first
    rules, longer = [], ""
    for number, (backend, name) in enumerate(backends):
        if name in capacity:
            routed = backend + _ROUTED
            counted = routed if f"backend {routed}\n" in text else backend
            rules += _rules(
                number, counted, is_asked=f"METH_POST for_generation is_{backend}{longer}", capacity=capacity[name]
            )
        longer += f" !is_{backend}"
    if not rules:
        return text
    paths = " ".join(sorted(KEPT_PATHS))
    begin = [
        f"    acl for_generation path -m end {paths}",
        "    acl goes_on req.hdr(last-event-id) -m found",
        f"    http-request set-var({_ID}) req.hdr(x-request-id) if METH_POST for_generation",
        f"    http-after-response set-header x-request-id %[var({_ID})] if {{ status 429 }} {{ var({_ID}) -m found }}",
    ]
    return _ROUTING.sub(lambda found: "\n".join([*begin, *rules, found[0]]), text, count=1)


def safe_name(application: str) -> str:
    """What Ray calls an application in HAProxy's configuration."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", application.replace("#", "-").replace("/", "."))


def _rules(number: int, backend: str, *, is_asked: str, capacity: int) -> list[str]:
    refused_at = f"proc.refused_at_{number}"
    is_full = f"{{ be_conn({backend}),sub(txn.capacity) ge 0 }}"
    has_refused = f"{{ date(0,ms),sub({refused_at}) 0:{OF_LATE_MS} }}"  # not where the clock was put back
    refuse = f"http-request return status 429 content-type application/json hdr Retry-After {RETRY_AFTER_S}"
    condition = f"{is_asked} {is_full} {has_refused} !goes_on"
    is_refused = f"{{ status 429 }} {{ be_name -m str {backend} }} {{ var(txn.capacity) -m found }}"
    return [
        f"    http-request set-var(txn.capacity) nbsrv({backend}),mul({capacity}) if {is_asked}",
        f"    {refuse} string '{json.dumps({'type': 'error'} | BUSY)}' if {condition} {{ path -m end /v1/messages }}",
        f"    {refuse} string '{json.dumps(BUSY)}' if {condition}",
        f"    http-response set-var({refused_at}) date(0,ms) if {is_refused}",
    ]
