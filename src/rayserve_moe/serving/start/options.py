"""Command line of `rayserve-moe serve`: every setting is an option, and `--help` groups them by section."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from rayserve_moe.config.load import EXPLAINED, FIXED, RENAMED_KEYS
from rayserve_moe.config.setting_texts import SectionText, SettingText, sections, setting_names
from rayserve_moe.config.settings import Settings
from rayserve_moe.serving.start.ports import StartError
from rayserve_moe.serving.start.state import APPLICATION

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
LISTENING = {"host": "127.0.0.1", "port": 8000}
TLS = ("ssl_certfile", "ssl_keyfile")
MODEL = "model_path"
_ALL = "all"
_USAGE = "rayserve-moe serve [-h [GROUP]] [--dry-run] (CONFIG | MODEL [--SETTING VALUE ...])"
_GENERAL = f"""\
  CONFIG                a Serve config, such as those in configs/
  MODEL, --model MODEL, --model-path MODEL
                        a directory with a checkpoint, organisation/name of the Hugging Face Hub, gs://bucket/folder,
                        trained:calculator or synthetic:tiny
  --host HOST           address to listen at (default: {LISTENING["host"]}); 0.0.0.0 is every interface
  --port PORT           port of HTTP (default: {LISTENING["port"]})
  --ssl-certfile FILE, --ssl-keyfile FILE
                        certificate chain and key, in PEM: the port speaks TLS
  --dry-run             print the resolved settings and the memory they take, and start nothing
  -h, --help [GROUP]    this help, or that of a group or a setting; `--help=all` explains every setting"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line; texts of settings are read when help is printed."""
    parser.usage = _USAGE.removeprefix("usage: ")
    parser.add_argument("config", nargs="?", default="", metavar="CONFIG | MODEL")
    parser.add_argument("--dry-run", action="store_true", help="print settings and memory, and start nothing")
    parser.add_argument("-h", "--help", action=_Help, nargs="?", const="", default=argparse.SUPPRESS, help="show help")
    parser.add_argument("--model", f"--{_flag(MODEL)}", dest=MODEL, action=_Once, default=argparse.SUPPRESS)
    for name in LISTENING:
        parser.add_argument(f"--{name}", type=_yaml, action=_Once, default=argparse.SUPPRESS)
    for name in TLS:
        parser.add_argument(f"--{_flag(name)}", dest=name, action=_Once, default=argparse.SUPPRESS)
    for names, kind in _settings():
        if names[0] != MODEL:
            _add_setting(parser, names, kind)
    for name in (*EXPLAINED, *FIXED, *RENAMED_KEYS):
        flag, hidden = f"--{_flag(name)}", argparse.SUPPRESS
        parser.add_argument(
            flag, dest=name, type=_yaml, action=_Once, nargs="?", const=True, default=hidden, help=hidden
        )


def _settings() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield key, aliases and type of all settings."""
    kinds = (kind for section in get_type_hints(Settings).values() for kind in get_type_hints(section).values())
    return zip(setting_names(), kinds, strict=True)


def _add_setting(parser: argparse.ArgumentParser, names: tuple[str, ...], kind: Any) -> None:
    flags, nothing = [f"--{_flag(name)}" for name in names], argparse.SUPPRESS
    if kind is bool:
        parser.add_argument(*flags, dest=names[0], type=_yaml, action=_Once, nargs="?", const=True, default=nothing)
        off = f"--no-{_flag(names[0])}"
        parser.add_argument(off, dest=names[0], action=_Once, nargs=0, const=False, default=nothing, help=nothing)
    else:
        parser.add_argument(*flags, dest=names[0], type=_word if kind is str else _yaml, action=_Once, default=nothing)


class _Once(argparse.Action):
    """Stores a value; an option that is repeated, also under another name, is an error."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if hasattr(namespace, self.dest):
            parser.error(f"{option_string} is given twice")
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)


class _Help(argparse.Action):
    """Prints help and ends."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        try:
            parser._print_message("\n".join(help_lines(str(values))) + "\n", sys.stdout)
            parser.exit()
        except ValueError as error:
            parser.error(f"{option_string} {error}")


def _yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(" ".join(str(error).split())) from error


def _word(text: str) -> str | None:
    return None if text == "null" else text


def _flag(name: str) -> str:
    return name.replace("_", "-")


def help_lines(group: str) -> Iterator[str]:
    """Yield the help of the command, or of a section, a setting or `all`.

    Raises: ValueError with the groups if there is none of that name.
    """
    found, name = list(sections()), group.lstrip("-").replace("-", "_")
    if not name:
        yield from _overview(found)
        return
    chosen = [section for section in found if name in (section.name, _ALL)]
    for section in chosen:
        yield from _explained(f"{section.name}: {section.title}", section.settings)
    settings = [setting for section in found for setting in section.settings if name in setting.names]
    if settings and not chosen:
        yield from _explained("", settings)
    if not settings and not chosen:
        groups = ", ".join(section.name for section in found)
        raise ValueError(f"{group}: no such group or setting; groups: {groups}, {_ALL}")


def _overview(found: Sequence[SectionText]) -> Iterator[str]:
    yield from (f"usage: {_USAGE}", "", "Serve a config or a model on this machine, until stopped.", "", _GENERAL, "")
    yield "settings with their defaults, as options after a model or as keys under `args` of a config;"
    yield "--help=GROUP explains those of a group:"
    for section in found:
        yield f"\n  {section.name}: {section.title.splitlines()[0]}"
        shown = (f"--{_flag(setting.names[0])}{_default(setting)}" for setting in section.settings)
        yield from _wrapped("   ".join(shown).replace(" ", "\0").replace("\0\0\0", "   "), indent=4)


def _wrapped(text: str, *, indent: int) -> Iterator[str]:
    width, prefix = max(60, min(120, shutil.get_terminal_size().columns)), " " * indent
    lines = textwrap.wrap(
        text, width, initial_indent=prefix, subsequent_indent=prefix, break_on_hyphens=False, break_long_words=False
    )
    return (line.replace("\0", " ") for line in lines)


def _default(setting: SettingText) -> str:
    if setting.default in ("", ()):
        return ""
    return f" {str(setting.default).lower() if setting.type == 'bool' else setting.default}"


def _explained(title: str, settings: Sequence[SettingText]) -> Iterator[str]:
    if title:
        yield from (title, "")
    for setting in settings:
        values = "|".join(setting.choices)
        if setting.bounds:
            values = "{:g} to {:g}".format(*setting.bounds)
        details = "; ".join(filter(None, (values, f"default{_default(setting)}" if _default(setting) else "")))
        yield "  " + ", ".join(f"--{_flag(name)}" for name in setting.names) + (f"  ({details})" if details else "")
        yield from _wrapped(setting.text, indent=6)
    yield ""


def is_config(name: str) -> bool:
    """Return True if a command-line name is a config file, not a model."""
    return name.endswith(CONFIG_SUFFIXES) or Path(name).is_file()


def given_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a command line by key, without `model_path`."""
    known = {names[0] for names in setting_names()} | {*EXPLAINED, *FIXED, *RENAMED_KEYS}
    return {name: value for name, value in vars(options).items() if name in known and name != MODEL}


def config_of(options: argparse.Namespace) -> Path | dict[str, Any]:
    """Return the path of the config file to serve, or the config that serves the model of a command line.

    Raises: StartError if there is neither, or both, or a config with settings.
    """
    given = {
        **given_settings(options),
        **{name: getattr(options, name) for name in (*LISTENING, *TLS) if hasattr(options, name)},
    }
    model = getattr(options, MODEL, "")
    if not (options.config or model):
        raise StartError("name a config or a model, such as `rayserve-moe serve trained:calculator`")
    if options.config and model:
        raise StartError(f"{options.config} and --model {model}: give one of them")
    if options.config and is_config(options.config):
        if given:
            raise StartError(
                f"--{_flag(next(iter(given)))}: put settings into the config, under applications[].args; options are "
                "for `serve MODEL`"
            )
        return Path(options.config)
    return config_of_model(options.config or model, given)


def config_of_model(model: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the config that serves a model; `host`, `port` and TLS files of `given` are of HTTP.

    Settings are checked with the config, not here.
    """
    http = {name: given.get(name, default) for name, default in LISTENING.items()}
    http |= {name: given[name] for name in TLS if name in given}
    settings = {name: value for name, value in given.items() if name not in (*LISTENING, *TLS)}
    application = {
        "name": "model",
        "route_prefix": "/",
        "import_path": APPLICATION,
        "args": {MODEL: model, **settings},
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": http,
        "logging_config": {"enable_access_log": False},
        "applications": [application],
    }
