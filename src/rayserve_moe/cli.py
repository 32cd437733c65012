"""The command `rayserve-moe`. Each of its commands is a module with `add_arguments` and `run`, loaded when used."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

WRONG_USE, INTERRUPTED = 2, 130
COMMANDS = {
    "compile-check": ("tools.check_command", "compile a server's programs for a TPU topology"),
    "plan-slice": ("tools.plan_slice.command", "estimate slices and settings for a model's traffic"),
    "rollout": ("rollouts.batch_job", "sample the prompts of a file into Parquet shards"),
    "serve": ("serving.start.command", "serve a config or a model on this machine, until stopped"),
    "scale": ("serving.start.scale", "change how many replicas an application has"),
    "chat": ("serving.chat_client", "talk to a server in a terminal"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 2 for wrong use, 130 after Ctrl-C, others as the command has them."""
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="rayserve-moe", description="Mixture-of-Experts models on TPU slices.")
    version = f"rayserve-moe {importlib.import_module('rayserve_moe').__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run = None
    for name, (module, meaning) in COMMANDS.items():
        command = commands.add_parser(name, help=meaning)
        if name in arguments[:1]:
            loaded = importlib.import_module(f"rayserve_moe.{module}")
            loaded.add_arguments(command)
            run = loaded.run
    options = parser.parse_args(arguments)
    if run is None:
        parser.print_help()
        return WRONG_USE
    try:
        return run(options)
    except ValueError as error:
        sys.stderr.write(f"rayserve-moe {options.command}: {error}\n")
        return WRONG_USE


if __name__ == "__main__":
    sys.exit(main())
