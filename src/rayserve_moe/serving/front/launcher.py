"""Executable that Ray Serve starts as HAProxy: it writes our configuration over Ray's, then becomes HAProxy.

    python -m rayserve_moe.serving.front.launcher LIMITS [arguments of HAProxy]

`LIMITS` is FrontLimits as JSON. Ray accepts a single executable (`RAY_SERVE_HAPROXY_BINARY_PATH`) and finds its
processes by id and arguments, so `limits.write_launcher` writes a script that keeps both. Ray is never imported here:
HAProxy restarts with every change of its servers. If a standby serves (see `standby`), HAProxy takes over from it once
it has replicas, and accepts no requests before.

Ray has no other interface for its list of servers: it writes `haproxy.cfg` and, with routers, a Lua script. Every
directive must be known, so that a changed Ray is refused instead of half understood.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Environment, StrictUndefined

from rayserve_moe.serving.front.limits import (
    HEALTH_CONNECTIONS,
    OWN_ANSWERS,
    ROUTER_CONNECTIONS,
    UNNAMED,
    FrontLimits,
    answer_files,
)
from rayserve_moe.serving.front.processes import BINARY, STANDBY_SOCKET, Handed, replace_text, running_pid
from rayserve_moe.serving.kept_paths import KEPT_PATHS

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
_TEMPLATE = Path(__file__).with_name("haproxy.cfg.j2")
MARK = "# configured by rayserve_moe\n"
"""First line of our configuration."""
MESSAGE = "the server is busy: its queue of waiting requests is full"
BUSY = {"error": {"message": MESSAGE, "type": "overloaded_error", "param": None, "code": "queue_full"}}
"""Error object of replicas that reject."""
_CONSTANTS: dict[str, Any] = {
    "HEALTH_CONNECTIONS": HEALTH_CONNECTIONS,
    "ROUTER_CONNECTIONS": ROUTER_CONNECTIONS,
    "OWN_ANSWERS": OWN_ANSWERS,
    "UNNAMED": UNNAMED,
    "KEPT_PATHS": KEPT_PATHS,
    "OF_LATE_MS": 100,  # for which a replica's rejection makes HAProxy reject further requests
    "RETRY_WHEN_BUSY_S": 1,
    "BUSY": json.dumps(BUSY),
    "BUSY_IN_MESSAGES": json.dumps({"type": "error"} | BUSY),
    "ROUTER_BACKLOG": 4096,  # connections that may wait: a full socket refuses further ones at once
    "ROUTER_ANSWER_S": 2,  # after which the replica with the fewest connections is selected
}


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


@dataclass(frozen=True)
class Files:
    """Paths of a HAProxy's files."""

    folder: str
    """Folder of the answers by HAProxy itself."""
    admin: str
    """Admin socket. Names of sockets are short, because the length of their paths is limited."""
    routers: str
    """Socket of the listener for routers."""
    script: str
    """Script that asks routers."""


def main(arguments: Sequence[str]) -> NoReturn:
    """Configure by the file named by `-f` and exec HAProxy, or exit with the reason on standard error."""
    limits, *rest = arguments
    config = Path(rest[rest.index("-f") + 1])
    try:
        standby = _standby(config)
        handed = configure(config, FrontLimits(**json.loads(limits)), num_files=_max_open_files(), stands_in=standby)
        if standby is not None and handed.takes_requests:
            rest = taking_over(rest, standby, socket=config.with_name(STANDBY_SOCKET))
    except (OSError, UnknownTemplateError) as error:
        sys.exit(f"rayserve-moe: {error}")
    os.execv(BINARY, [str(BINARY), *rest])


def configure(
    config: Path, limits: FrontLimits, *, num_files: int = sys.maxsize, stands_in: int | None = None
) -> Handed:
    """Write our configuration in the place of Ray's, for this process with `num_files` open files.

    A process takes no requests while another `stands_in` and there are no replicas.
    """
    folder, given = config.parent, config.read_text(encoding="utf-8")
    original = config.with_name("ray.cfg")
    if given.startswith(MARK):  # started again without another list of servers
        given = original.read_text(encoding="utf-8")
    ray = RayConfig(given)
    limits = limits.for_replicas(ray.num_replicas, num_applications=len(ray.apps), num_files=num_files)
    asking = Path(ray.script).read_text(encoding="utf-8") if ray.script else ""
    own = Files(f"{folder}", ray.admin, f"{folder}/r", f"{folder}/routers.lua")
    others = Files(f"{folder}", f"{folder}/{STANDBY_SOCKET}", f"{folder}/q", f"{folder}/standby.lua")
    text, script = front_texts(given, asking, limits=limits, files=own)
    standby_text, standby_script = front_texts(given, asking, limits=limits, files=others)
    takes_requests = stands_in is None or ray.num_replicas > 0
    for name, content in answer_files().items():
        (folder / name).write_text(content, encoding="utf-8", newline="")
    replace_text(original, given)
    if script:
        replace_text(Path(own.script), script)
    replace_text(config, text if takes_requests else without_listeners(text))
    handed = Handed(os.getpid(), takes_requests, ray.num_replicas > 0, standby_text, standby_script)
    handed.write(folder)
    return handed


def _standby(config: Path) -> int | None:
    """Return the process id of a serving standby, or None if none answers."""
    with suppress(OSError):
        return running_pid(config.with_name(STANDBY_SOCKET))
    return None


def taking_over(arguments: Sequence[str], pid: int, *, socket: Path) -> list[str]:
    """Return HAProxy's arguments to take over the listeners at an admin socket and to end that process."""
    rest, replaced = list(arguments), [str(pid)]
    if "-x" in rest:
        del rest[rest.index("-x") : rest.index("-x") + 2]
    if "-sf" in rest:  # process ids follow up to the next option
        first = rest.index("-sf") + 1
        last = next((place for place in range(first, len(rest)) if rest[place].startswith("-")), len(rest))
        replaced += rest[first:last]
        del rest[first - 1 : last]
    return [*rest, "-x", str(socket), "-sf", *replaced]


def _max_open_files() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def front_texts(config: str, script: str, *, limits: FrontLimits, files: Files) -> tuple[str, str]:
    """Return the configuration and the script over Ray's; without routers there is no script.

    Raises: UnknownTemplateError if Ray writes otherwise than the known version does.
    """
    before, routers, after = read_script(script) if script else ("", {}, "")
    files = Files(files.folder, files.admin, f"unix@{files.routers}", files.script)
    ray = RayConfig(config)
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"), globals=_CONSTANTS)
    text = template.render(
        ray=ray,
        limits=limits,
        files=files,
        routers=routers,
        refusing=list(_refusing(ray.apps, limits.capacity)),
        own_host="" if ray.host == "*" else ray.host,
    )
    ray.end()
    # The listener distinguishes applications by the host header.
    asked = ",\n".join(
        f'    ["{name}"] = {{ {{ host = "{files.routers}", port = 0, host_header = "{name}" }} }}' for name in routers
    )
    return f"{MARK}{text}\n", f"{before}local ROUTERS = {{\n{asked}\n}}\n{after}" if routers else ""


def without_listeners(text: str) -> str:
    """Return a configuration that accepts no requests, while another process does."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("    bind "))


def _refusing(apps: Iterable[App], capacity: Mapping[str, int]) -> Iterable[dict[str, Any]]:
    """Yield the applications whose capacity is known, with the condition of their requests for generation."""
    by_backend = {f"http-{safe_name(name)}": number for name, number in capacity.items()}
    longer = ""
    for number, app in enumerate(apps):  # longer prefixes first
        if app.backend in by_backend:
            is_generation = f"METH_POST for_generation is_{app.backend}{longer}"
            yield {**asdict(app), "number": number, "capacity": by_backend[app.backend], "is_generation": is_generation}
        longer += f" !is_{app.backend}"


def safe_name(application: str) -> str:
    """Return Ray's name of an application in HAProxy's configuration."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", application.replace("#", "-").replace("/", "."))


if __name__ == "__main__":
    main(sys.argv[1:])
