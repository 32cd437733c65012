"""Scripts that complete a command line in bash, zsh and fish, generated from an argument parser."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_FILES = ("config", "prompts", "out", "limits", "tokenizer", "dataset_path", "model_path", "result_dir", "plot")
"""Destinations of arguments that name files."""


@dataclass(frozen=True)
class _Option:
    names: tuple[str, ...]
    text: str
    takes_value: bool
    values: tuple[str, ...]
    is_file: bool


@dataclass(frozen=True)
class _Command:
    name: str
    text: str
    options: tuple[_Option, ...]
    values: tuple[str, ...]
    """Values of its arguments without names."""


def completion_script(shell: str, parser: argparse.ArgumentParser, *, program: str) -> str:
    """Return the script of a shell for a parser with commands; `program` is the name on the command line."""
    return SCRIPTS[shell](list(_commands(parser)), program)


def _commands(parser: argparse.ArgumentParser) -> Iterator[_Command]:
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    texts = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    for name, command in commands.choices.items():
        unnamed = (action for action in command._actions if not action.option_strings)
        values = tuple(str(value) for action in unnamed for value in action.choices or ())
        yield _Command(name, texts[name], tuple(_options(command)), values)


def _options(parser: argparse.ArgumentParser) -> Iterator[_Option]:
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            yield _Option(
                tuple(action.option_strings),
                _plain((action.help or "").replace("%(default)s", str(action.default))),
                takes_value=action.nargs is None,
                values=tuple(map(str, action.choices or ())),
                is_file=action.dest in _FILES,
            )


def _plain(text: str) -> str:
    """Return a help text without what quoting in a shell would have to escape."""
    return " ".join(re.sub(r"['\"`\\$:\[\]]", " ", text).split())


def _bash(commands: list[_Command], program: str) -> str:
    name = program.replace("-", "_")
    cases, names = [], shlex.quote(" ".join(one.name for one in commands))
    for command in commands:
        words = [word for option in command.options for word in option.names] + list(command.values)
        cases.append(f"    {command.name}) words={shlex.quote(' '.join(words))} ;;")
    values = [
        f"    {command.name}:{flag}) words={shlex.quote(' '.join(option.values))} ;;"
        for command in commands
        for option in command.options
        if option.values
        for flag in option.names
    ]
    return "\n".join(
        [
            f"# Completion of {program} in bash: . <({program} completion bash)",
            f"_{name}() {{",
            '  local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=',
            '  local command="${COMP_WORDS[1]}"',
            '  if [ "$COMP_CWORD" -eq 1 ]; then',
            f'    COMPREPLY=($(compgen -W {names} -- "$current")); return',
            "  fi",
            '  case "$command" in',
            *cases,
            "  esac",
            '  case "$command:$before" in',
            *values,
            "  esac",
            '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
            "}",
            f"complete -o default -F _{name} {program}",
            "",
        ]
    )


def _zsh(commands: list[_Command], program: str) -> str:
    name = program.replace("-", "_")
    lines = [
        f"#compdef {program}",
        f"# Completion of {program} in zsh: . <({program} completion zsh)",
        f"_{name}() {{",
        "  local -a commands",
        "  commands=(" + " ".join(f"'{one.name}:{_plain(one.text)}'" for one in commands) + ")",
        "  if (( CURRENT == 2 )); then _describe command commands; return; fi",
        "  local command=$words[2]",
        "  shift words; (( CURRENT-- ))",
        "  case $command in",
    ]
    for command in commands:
        specs = [_zsh_option(option, flag) for option in command.options for flag in option.names]
        rest = f"'*:value:({' '.join(command.values)})'" if command.values else "'*:file:_files'"
        lines.append(f"    {command.name}) _arguments {' '.join([*specs, rest])} ;;")
    return "\n".join([*lines, "  esac", "}", f"compdef _{name} {program}", ""])


def _zsh_option(option: _Option, flag: str) -> str:
    values = f"({' '.join(option.values)})" if option.values else "_files" if option.is_file else ""
    return f"'{flag}[{option.text}]" + (f":value:{values}'" if option.takes_value else "'")


def _fish(commands: list[_Command], program: str) -> str:
    names = " ".join(one.name for one in commands)
    lines = [
        f"# Completion of {program} in fish: {program} completion fish | source",
        f"complete -c {program} -n 'not __fish_seen_subcommand_from {names}' -f",
    ]
    for command in commands:
        first = f"complete -c {program} -n 'not __fish_seen_subcommand_from {names}'"
        lines.append(f"{first} -a {command.name} -d '{_plain(command.text)}'")
        inside = f"complete -c {program} -n '__fish_seen_subcommand_from {command.name}'"
        if command.values:
            lines.append(f"{inside} -f -a '{' '.join(command.values)}'")
        lines += [f"{inside} {_fish_option(option)}" for option in command.options]
    return "\n".join([*lines, ""])


def _fish_option(option: _Option) -> str:
    flags = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
    value = " -r" if option.takes_value else ""
    value += f" -f -a '{' '.join(option.values)}'" if option.values else ""
    return f"{flags} -d '{option.text}'{value}"


SCRIPTS: dict[str, Callable[[list[_Command], str], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
SHELLS = tuple(SCRIPTS)
