"""Executable that Ray Serve starts as HAProxy: it writes our configuration over Ray's, then becomes HAProxy.

    python -m rayserve_moe.serving.front.launcher LIMITS [arguments of HAProxy]

`LIMITS` is FrontLimits as JSON. Ray accepts a single executable (`RAY_SERVE_HAPROXY_BINARY_PATH`) and finds its
processes by id and arguments, so `write_launcher` writes a script that keeps both. Ray is never imported here, because
HAProxy restarts with every change of its servers. If a standby serves (see `standby`), HAProxy takes over from it once
it has replicas, and accepts no requests before.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from rayserve_moe.serving.front.limits import FrontLimits, answer_files
from rayserve_moe.serving.front.processes import BINARY, STANDBY_SOCKET, Handed, replace_text, running_pid
from rayserve_moe.serving.front.ray_config import RayConfig, UnknownTemplateError
from rayserve_moe.serving.front.template import MARK, Files, front_texts, without_listeners


def write_launcher(path: Path, limits: FrontLimits) -> Path:
    """Write the script for `RAY_SERVE_HAPROXY_BINARY_PATH`, writable only by its owner; return its path."""
    command = [sys.executable, "-m", "rayserve_moe.serving.front.launcher", json.dumps(asdict(limits))]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
    path.chmod(0o700)
    return path


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


if __name__ == "__main__":
    main(sys.argv[1:])
