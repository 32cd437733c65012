"""The command `rayserve-moe`. Each of its commands is a module with `add_arguments` and `run`, loaded when used.

These modules import nothing that takes long; `run` checks arguments and files before it loads what does.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from rayserve_moe.tools.completion import SHELLS, completion_script

WRONG_USE, INTERRUPTED = 2, 130
COMMANDS = {
    "serve": ("serving.start.command", "serve a config or a model on this machine, until stopped"),
    "chat": ("serving.chat_client", "talk to a server in a terminal"),
    "bench": ("bench.command", "measure a running server under load"),
    "doctor": ("serving.start.doctor", "report what this machine has for serving"),
    "rollout": ("rollouts.job_options", "sample the prompts of a file into Parquet shards"),
    "audit": (
        "rollouts.audit_options",
        "check samples of a rollout against a server",
    ),
    "scale": ("serving.start.scale", "change how many replicas an application has"),
    "compile-check": ("tools.check_options", "compile a server's programs for a TPU topology"),
    "plan-experts": ("rollouts.plan_options", "plan where experts lie from the rows of a rollout"),
    "plan-slice": ("tools.plan_slice.options", "estimate slices and settings for a model's traffic"),
}
COMPLETION = "completion"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 2 for wrong use, 130 after Ctrl-C, others as the command has them."""
    try:
        return _run([_with_hyphens(one) for one in (sys.argv[1:] if arguments is None else arguments)])
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(arguments: Sequence[str]) -> int:
    parser, commands = _parsers(arguments[0] if arguments else "")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        commands.choices[options.command].error(_unknown_option(unknown[0], commands.choices[options.command]))
    if options.command is None:
        parser.print_help()
        return WRONG_USE
    if options.command == COMPLETION:
        sys.stdout.write(completion_script(options.shell, _parser_of_all(), program=parser.prog))
        return 0
    try:
        return _module(options.command).run(options)
    except ValueError as error:
        sys.stderr.write(f"rayserve-moe {options.command}: {error}\n")
        return WRONG_USE


def _parsers(*used: str) -> tuple[argparse.ArgumentParser, argparse._SubParsersAction]:
    """Return the parser and its commands; only the commands `used` have their arguments."""
    parser = argparse.ArgumentParser(
        prog="rayserve-moe",
        description="Mixture-of-Experts models on TPU slices and CPUs.",
        epilog="`rayserve-moe COMMAND --help` explains a command.",
    )
    version = f"rayserve-moe {importlib.import_module('rayserve_moe').__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND [OPTIONS]", title="commands")
    for name, (_, meaning) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=meaning,
            description=f"{meaning[0].upper()}{meaning[1:]}.",
            allow_abbrev=False,
            conflict_handler="resolve",  # `serve` has a --help of its own
        )
        if name in used:
            _module(name).add_arguments(command)
    completion = commands.add_parser(COMPLETION, help="print a script that completes these commands in a shell")
    completion.add_argument("shell", choices=SHELLS, help="source its output: `. <(rayserve-moe completion bash)`")
    return parser, commands


def _parser_of_all() -> argparse.ArgumentParser:
    return _parsers(*COMMANDS)[0]


def _module(command: str) -> Any:
    return importlib.import_module(f"rayserve_moe.{COMMANDS[command][0]}")


def _with_hyphens(argument: str) -> str:
    """Return an argument with `--a_b` spelled as `--a-b`."""
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else argument


def _unknown_option(given: str, parser: argparse.ArgumentParser) -> str:
    name = given.partition("=")[0]
    known = [option for action in parser._actions for option in action.option_strings]
    nearest = difflib.get_close_matches(name, known, n=1) if name.startswith("-") else []
    hint = f"; did you mean {nearest[0]}?" if nearest else f"; {parser.prog} --help lists the options"
    return f"{'unknown option' if name.startswith('-') else 'unexpected argument'} {given}{hint}"


if __name__ == "__main__":
    sys.exit(main())
