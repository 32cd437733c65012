"""Reader of the HAProxy files that Ray Serve writes: servers of every application, and values of Ray's variables.

Ray has no other interface: it writes `haproxy.cfg` and, with routers, a Lua script, and starts a program. Every
directive must be known, so that a changed Ray is refused instead of half understood.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GLOBAL, FRONTEND, VIA_ROUTER = "global", "frontend http_frontend", "-via-ingress-request-router"
_POOL = re.compile(r'^ +\["([^"]+)"\] = \{ (.*) \},?$')
_ROUTER = re.compile(r'host = "([^"]+)", port = (\d+),')
_REWRITTEN = {
    GLOBAL: ("stats timeout ", "maxconn ", "lua-load-per-thread "),
    "defaults": ("mode ", "log ", "option ", "errorfile "),
    "frontend prometheus": ("mode ", "http-request use-service prometheus-exporter if { path /metrics }", "no log"),
    FRONTEND: (
        "unique-id-format ",
        "http-request set-header x-request-id ",
        "log global",
        "http-request set-var(txn.ingress_request_router_",
        "acl has_ingress_request_router_app ",
        "http-request lua.route_via_ingress_request_router if ",
        "http-request return status 503 content-type text/plain lf-string ",
        "default_backend ",
    ),
    "backend default_backend": ("http-request return status 404 ",),
    "listen stats": ("stats ",),
}
"""Directives that the template has in words of its own."""


class UnknownTemplateError(ValueError):
    """Error for files that Ray writes otherwise than the known version does."""


@dataclass(frozen=True)
class App:
    """Servers of an application."""

    backend: str
    """Name of the backend, made of the application's."""
    prefix: str
    """Route prefix."""
    servers: tuple[tuple[str, str], ...]
    """Name and address of every replica."""
    fallback: tuple[str, str] | None
    """Name and address of the proxy that answers without replicas."""
    marks_down: bool
    """True if an error of a connection marks a replica as down."""
    is_routed: bool
    """True if a router selects the replica."""


class RayConfig:
    """Ray's `haproxy.cfg`: applications, longer prefixes first, and directives that are taken until none is left.

    Raises: UnknownTemplateError if a section or directive is missing.
    """

    def __init__(self, text: str) -> None:
        self._sections = _sections(text)
        for name in _REWRITTEN:
            if name not in self._sections:
                raise UnknownTemplateError(f"Ray's HAProxy file has no section {name!r}")
        script = [line.split()[1] for line in self._sections[GLOBAL] if line.startswith("lua-load-per-thread ")]
        self.script = script[0] if script else ""
        """Path of the Lua script that asks routers; empty without routers."""
        self.admin = self.one(GLOBAL, "stats socket ").split()[0]
        """Path of the admin socket."""
        self.host, _, self.port = self.one(FRONTEND, "bind ").rpartition(":")
        chosen = [line.split() for line in self.take(FRONTEND, "use_backend ")]
        backends = [words[1] for words in chosen if words[2:] == ["if", f"is_{words[1]}"]]
        self.apps = tuple(map(self._app, backends))
        self.num_replicas = sum(len(app.servers) for app in self.apps)

    def take(self, section: str, *starts: str) -> list[str]:
        """Remove and return the directives of a section that begin with any of `starts`, in their order."""
        lines = self._sections.get(section, [])
        found = [line for line in lines if line.startswith(starts)]
        self._sections[section] = [line for line in lines if not line.startswith(starts)]
        return found

    def one(self, section: str, start: str) -> str:
        """Remove the only directive of a section that begins with `start`; return the rest of it."""
        found = self.take(section, start)
        if len(found) != 1:
            raise UnknownTemplateError(f"{section} of Ray's HAProxy file has {start!r} {len(found)} times, not once")
        return found[0].removeprefix(start)

    def pages(self) -> list[str]:
        """Remove and return the directives that answer `/-/healthz` and `/-/routes`, which stand together."""
        lines = self._sections[FRONTEND]
        begin = next((place for place, line in enumerate(lines) if line.startswith("acl healthcheck ")), None)
        ends = [place for place, line in enumerate(lines) if line.endswith(" if routes")]
        if begin is None or not ends:
            raise UnknownTemplateError("Ray's HAProxy file has no health check or no page of routes")
        self._sections[FRONTEND] = lines[:begin] + lines[ends[-1] + 1 :]
        return lines[begin : ends[-1] + 1] + self.take(FRONTEND, "http-request set-header x-haproxy-reload-id ")

    def others(self) -> dict[str, list[str]]:
        """Return the sections of gRPC; the proxy behind their replicas is disabled there too."""
        names = [name for name in self._sections if name.split()[-1].startswith(("grpc", "default_grpc"))]
        sections = {name: self._sections.pop(name) for name in names}
        return {
            name: [f"{line} disabled" if line.endswith(" backup") else line for line in lines]
            for name, lines in sections.items()
        }

    def end(self) -> None:
        """Raise UnknownTemplateError if a directive is left that nothing has taken."""
        for name, starts in _REWRITTEN.items():
            self.take(name, *starts)
        left = [f"{name}: {lines[0]}" for name, lines in self._sections.items() if lines]
        if left:
            raise UnknownTemplateError(f"Ray's HAProxy file has an unknown line, in {left[0]}")

    def _app(self, backend: str) -> App:
        own, routed = f"backend {backend}", f"backend {backend}{VIA_ROUTER}"
        paths, servers = self.take(FRONTEND, f"acl is_{backend} path"), self.take(own, "server ")
        if not paths or not servers:
            raise UnknownTemplateError(f"Ray's HAProxy file has no path or no servers of {backend}")
        fallbacks = [line for line in servers if line.endswith(" backup")]
        replicas = [line for line in servers if line not in fallbacks]
        is_routed = bool(self.take(routed, "server ", "use-server ", "log global", "http-reuse always"))
        self.take(own, "log global", "http-reuse always")
        return App(
            backend=backend,
            prefix=paths[-1].split()[-1],
            servers=tuple(map(_server, replicas)),
            fallback=_server(fallbacks[0]) if fallbacks else None,
            marks_down=any(" on-error mark-down" in line for line in replicas),
            is_routed=is_routed,
        )


def _sections(text: str) -> dict[str, list[str]]:
    """Return the directives of every section by its first line, without comments."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        directive = line.strip()
        if not directive or directive.startswith("#"):
            continue
        if line[0].isspace():
            lines.append(directive)
        else:
            lines = found[directive] = []
    return found


def _server(line: str) -> tuple[str, str]:
    _, name, address, *_ = line.split()
    return name, address


def read_script(script: str) -> tuple[str, dict[str, list[str]], str]:
    """Split Ray's Lua script at its list of routers; return the text before, the addresses by backend, the text after.

    Raises: UnknownTemplateError if it has no such list.
    """
    before, _, rest = script.partition("local ROUTERS = {\n")
    listed, _, after = rest.partition("\n}\n")
    found = [pool for line in listed.splitlines() if (pool := _POOL.match(line)) is not None]
    routers = {pool[1]: [f"{host}:{port}" for host, port in _ROUTER.findall(pool[2])] for pool in found}
    if not routers or len(found) != len(listed.splitlines()) or not all(routers.values()):
        raise UnknownTemplateError("Ray's script that asks routers has no list of them")
    return before, routers, after
