"""Command line of benchmarks that compile each case in a separate process and keep results by case."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Case = Any
Found = dict[str, Any]


def run_cases(
    module: str,
    purpose: str,
    *,
    cases: Mapping[str, Case],
    compile_here: Callable[[Case, Path], Found],
    table: Callable[[Mapping[str, Found]], str],
) -> None:
    """Compile the cases that the command line selects, write the result file after each, and print its table.

    `module` is the calling module. Results are kept in the order of `cases`. `compile_here` writes schedules to its
    folder.

    Raises: RuntimeError with the end of the errors of a failing case.
    """
    key = module.rpartition(".")[2]
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--only", choices=list(cases), action="append", help="may be given more than once")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / f"{key}.json")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.only or list(cases)
    if arguments.into:
        sys.stdout.write(json.dumps(compile_here(cases[names[0]], arguments.into)))
        return
    known = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {key: {}}
    for name in names:
        known[key][name] = _compiled_apart(module, name)
        known[key] = {case: known[key][case] for case in cases if case in known[key]}
        arguments.out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(table(known[key]))


def _compiled_apart(module: str, name: str) -> Found:
    """Compile a case in a separate process with an empty folder for schedules."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", module, "--only", name, "--into", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
