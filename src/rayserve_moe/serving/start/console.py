"""Console output of a start: stages with their progress, warnings, and examples once it serves."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rayserve_moe.config.load import variable
from rayserve_moe.observability.progress import Progress, ProgressReader, Warned
from rayserve_moe.serving.start.state import APPLICATION, PROGRESS, Plan, log_folder

BETWEEN_S = 10.0
"""Seconds between two lines of a stage."""
_UNITS = {"reading weights": (1e6, "MB")}
"""Divisor and unit of stages with large numbers."""


class Console:
    """Console of a process of the start; after `redirect`, all other output goes to a file."""

    def __init__(self) -> None:
        self._file = sys.stdout

    def redirect(self, log: Path) -> None:
        """Redirect all other output of this process, including its libraries', to a file."""
        self._file.flush()
        kept = os.dup(1)
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        self._file = os.fdopen(kept, "w", encoding="utf-8", errors="replace")

    def say(self, line: str) -> None:
        """Write a line with the command's name."""
        self.write(f"rayserve-moe serve: {line}")

    def write(self, line: str) -> None:
        """Write a line unchanged; ignores a closed terminal."""
        with suppress(OSError):
            self._file.write(f"{line}\n")
            self._file.flush()


class ProgressLines:
    """Converter of all processes' progress reports to lines: the first and last of a stage, and one per `BETWEEN_S`."""

    def __init__(self, folder: Path, console: Console) -> None:
        self._reader, self._console = ProgressReader(folder / PROGRESS), console
        self._said: dict[str, tuple[Progress, float]] = {}
        self._latest: dict[str, Progress] = {}

    def look(self, *, is_serving: bool = False) -> None:
        """Write new reports. While serving, only warnings are written."""
        now = time.monotonic()
        for found in self._reader.read():
            if isinstance(found, Warned):
                self._console.say(f"{found.level.lower()}: {found.message}")
            elif not is_serving:
                self._latest[found.stage] = found
        for stage, latest in self._latest.items():
            said, at = self._said.get(stage, (None, -BETWEEN_S))
            is_last = bool(latest.total) and latest.done >= latest.total
            if latest != said and (is_last or now - at >= BETWEEN_S):
                self._said[stage] = latest, now
                self._console.say(line_of(latest))


def line_of(progress: Progress) -> str:
    """Return a report as a line such as `compiling 12/39 (0 found on disk)`."""
    scale, unit = _UNITS.get(progress.stage, (1, ""))
    if unit:
        numbers = f" {progress.done / scale:.1f}/{progress.total / scale:.1f} {unit}"
    else:
        numbers = f" {progress.done}/{progress.total}" if progress.total else f" {progress.done}" * bool(progress.done)
    return f"{progress.stage}{numbers}" + (f" ({progress.detail})" if progress.detail else "")


def what_to_try(plan: Plan, folder: Path) -> Sequence[str]:
    """Return the last lines of a start: models, example requests, and how to stop."""
    ours = [one for one in plan.config["applications"] if one["import_path"] == APPLICATION]
    programs = _folder_of_programs()
    first = ours[0]
    url = f"{plan.url}{(first.get('route_prefix') or '/').rstrip('/')}"
    submission = f"RAY_AUTH_MODE=token {programs}ray job submit --address http://127.0.0.1:{plan.ports.dashboard}"
    submission += " --working-dir ."
    curl = "curl" if plan.url.startswith("http:") else "curl -k"  # certificates have other names than 127.0.0.1
    job = f'rayserve-moe rollout --url {url} --prompts prompts.jsonl --out "$HOME/rollouts" --n 8'
    lines = [f"  model    {model_of(one)}" for one in ours]
    body = f'{{"model": "{name_of(first)}", "prompt": "37+45=", "max_tokens": 8}}'
    return [
        *lines,
        f"  try      {curl} {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'",
        f"  experts  {url}/experts",
        f"  chat     {programs}rayserve-moe chat --url {url}",
        f"  jobs     {submission} -- {job}",
        f"  logs     {log_folder(folder)}",
        "  stop     Ctrl-C, or SIGTERM to this process",
    ]


def _folder_of_programs() -> str:
    """Return the folder that a user writes before a program's name; empty if their own PATH finds the program.

    The start command puts its own folder first in the PATH of its processes.
    """
    own, path = str(Path(sys.executable).parent), variable("PATH")
    first, _, rest = path.partition(os.pathsep)
    return "" if shutil.which("rayserve-moe", path=rest if first == own else path) else f"{own}/"


def name_of(application: dict) -> str:
    """Return the model name of an application on the API."""
    arguments = application.get("args") or {}
    given = arguments.get("served_model_name")
    return str(given or str(arguments.get("model_path", "")).rstrip("/").rpartition("/")[2].rpartition(":")[2])


def model_of(application: dict) -> str:
    """Return the name and path of an application's model."""
    return f"{name_of(application)} ({(application.get('args') or {}).get('model_path', '')})"
