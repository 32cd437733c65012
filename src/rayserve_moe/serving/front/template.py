"""HAProxy's configuration and Lua script, by the template `haproxy.cfg.j2`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from rayserve_moe.serving.front.limits import HEALTH_CONNECTIONS, OWN_ANSWERS, ROUTER_CONNECTIONS, UNNAMED, FrontLimits
from rayserve_moe.serving.front.ray_config import App, RayConfig, read_script
from rayserve_moe.serving.kept_paths import KEPT_PATHS

_TEMPLATE = Path(__file__).with_name("haproxy.cfg.j2")
MARK = "# configured by rayserve_moe\n"
"""First line of our configuration."""
MESSAGE = "the server is busy: its queue of waiting requests is full"
BUSY = {"error": {"message": MESSAGE, "type": "overloaded_error", "param": None, "code": "queue_full"}}
"""Error object of replicas that reject."""
_CONSTANTS = {
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


def front_texts(config: str, script: str, *, limits: FrontLimits, files: Files) -> tuple[str, str]:
    """Return the configuration and the script over Ray's; without routers there is no script.

    Raises: UnknownTemplateError if Ray writes otherwise than the known version does.
    """
    before, routers, after = read_script(script) if script else ("", {}, "")
    files = Files(files.folder, files.admin, f"unix@{files.routers}", files.script)
    ray = RayConfig(config)
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    text = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        **_CONSTANTS,
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
