"""Routers of prefixes behind a listener of HAProxy's own, so that one that is lost costs a request nothing.

Ray's Lua script connects to a router itself. HAProxy tries such a connection four times, a second apart, before the
script may ask another router: a request that meets a killed one waits 3 s. A backend asks another at once.
"""

from __future__ import annotations

import re

from rayserve_moe.serving.start.haproxy_config import ROUTER_CONNECTIONS, UnknownTemplateError

SOCKET = "r"
"""Where routers are asked, beside the configuration: as short as Ray's names, for the longest path of a socket."""
SCRIPT = "routers.lua"
BACKLOG = 4096
"""Connections that wait for one of those: a socket that is full refuses the next one at once."""
ANSWER_S = 2
"""For a router to answer; without it the replica with the fewest connections is asked."""
_LOAD = re.compile(r"^( +lua-load-per-thread )(\S+)$", re.MULTILINE)
_POOLS = re.compile(r"^local ROUTERS = \{\n(.*?)\n\}$", re.MULTILINE | re.DOTALL)
_POOL = re.compile(r'^ +\["([^"]+)"\] = \{ (.*) \},?$', re.MULTILINE)
_ROUTER = re.compile(r'host = "([^"]+)", port = (\d+),')
_REFUSAL = re.compile(r"^ +http-request return status 503 .*Ingress request router failed: .*\n", re.MULTILINE)


def script_of(text: str) -> str:
    """The path of the script that a configuration loads; empty where no application has routers."""
    found = _LOAD.search(text)
    return found[2] if found else ""


def behind_listener(text: str, script: str, *, folder: str) -> tuple[str, str]:
    """Return a configuration and its script so that the script asks a listener, which asks the routers.

    Where no router answers, requests go to the replica with the fewest, instead of being refused. `folder` is that of
    the configuration. UnknownTemplateError where one of them is not as expected.
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
    """Return a configuration and its script with another socket of its listener, and the script by another name."""
    text = re.sub(rf"^( +bind unix@\S+/){SOCKET}( .*)$", rf"\1{socket}\2", text, flags=re.MULTILINE)
    text = re.sub(rf"^( +lua-load-per-thread \S+/){SCRIPT}$", rf"\1{name}", text, flags=re.MULTILINE)
    return text, re.sub(rf'(host = "unix@\S+/){SOCKET}"', rf'\1{socket}"', script)


def _asked(name: str, address: str) -> str:
    """An application's entry of the script: the listener tells applications apart by the name of the host."""
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
