"""Prefix routers behind a listener of HAProxy, so that a lost router does not delay requests.

Ray's Lua script connects to a router directly. HAProxy retries such a connection four times, a second apart, before the
script may select another router, so a killed router delays a request by 3 s. A backend selects another at once.
"""

from __future__ import annotations

import re

from rayserve_moe.serving.front.config import ROUTER_CONNECTIONS, UnknownTemplateError

SOCKET = "r"
"""Socket of the listener, beside the configuration: as short as Ray's names, because socket paths are limited."""
SCRIPT = "routers.lua"
BACKLOG = 4096
"""Connections that may wait: a full socket refuses further connections at once."""
ANSWER_S = 2
"""Timeout of a router's answer; on a timeout the replica with the fewest connections is selected."""
_LOAD = re.compile(r"^( +lua-load-per-thread )(\S+)$", re.MULTILINE)
_POOLS = re.compile(r"^local ROUTERS = \{\n(.*?)\n\}$", re.MULTILINE | re.DOTALL)
_POOL = re.compile(r'^ +\["([^"]+)"\] = \{ (.*) \},?$', re.MULTILINE)
_ROUTER = re.compile(r'host = "([^"]+)", port = (\d+),')
_REFUSAL = re.compile(r"^ +http-request return status 503 .*Ingress request router failed: .*\n", re.MULTILINE)


def script_of(text: str) -> str:
    """Return the path of the script that a configuration loads; empty if no application has routers."""
    found = _LOAD.search(text)
    return found[2] if found else ""


def behind_listener(text: str, script: str, *, folder: str) -> tuple[str, str]:
    """Return a configuration and its script that query routers through a listener.

    If no router answers, requests go to the replica with the fewest connections instead of being rejected. `folder`
    contains the configuration.

    Raises: UnknownTemplateError if either is not as expected.
    """
    found = _POOLS.search(script)
    pools = {name: _ROUTER.findall(pool) for name, pool in _POOL.findall(found[1])} if found else {}
    if found is None or not all(pools.values()) or len(pools) != found[1].count("\n") + 1:
        raise UnknownTemplateError("the script that asks routers has no list of them: Ray's template has changed")
    text, number = _REFUSAL.subn("", text)
    if number != 1:
        raise UnknownTemplateError(f"HAProxy refuses {number} times instead of once: Ray's template has changed")
    address = f"unix@{folder}/{SOCKET}"
    asked = ",\n".join(_asked(name, address) for name in pools)
    script = f"{script[: found.start()]}local ROUTERS = {{\n{asked}\n}}{script[found.end() :]}"
    text = _LOAD.sub(rf"\g<1>{folder}/{SCRIPT}", text).rstrip("\n")
    return f"{text}\n{_listener(address)}" + "".join(_backend(*pool) for pool in pools.items()), script


def asking_at(text: str, script: str, *, socket: str, name: str) -> tuple[str, str]:
    """Return a configuration and its script with another socket of the listener and another script name."""
    text = re.sub(rf"^( +bind unix@\S+/){SOCKET}( .*)$", rf"\1{socket}\2", text, flags=re.MULTILINE)
    text = re.sub(rf"^( +lua-load-per-thread \S+/){SCRIPT}$", rf"\1{name}", text, flags=re.MULTILINE)
    return text, re.sub(rf'(host = "unix@\S+/){SOCKET}"', rf'\1{socket}"', script)


def _asked(name: str, address: str) -> str:
    """Return an application's entry in the script; the listener distinguishes applications by the host header."""
    return f'    ["{name}"] = {{ {{ host = "{address}", port = 0, host_header = "{name}" }} }}'


def _listener(address: str) -> str:
    return f"""\
frontend routers
    bind {address} mode 600
    maxconn {ROUTER_CONNECTIONS}
    backlog {BACKLOG}
    no log
    use_backend %[req.hdr(host)]-routers
"""


def _backend(name: str, routers: list[tuple[str, str]]) -> str:
    servers = "".join(f"    server router-{place} {host}:{port}\n" for place, (host, port) in enumerate(routers))
    return f"""\
backend {name}-routers
    balance roundrobin
    timeout server {ANSWER_S}s
    retries {len(routers)}
{servers}"""
