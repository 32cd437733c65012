"""Readers of code blocks that nothing runs: commands, requests and settings go through the parsers that users meet."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import itertools
import json
import re
import shlex
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rayserve_moe.cli import COMMANDS
from rayserve_moe.config.load import settings_from
from rayserve_moe.serving.api.schemas.known_fields import FIELDS
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.http import BODIES, create_api
from rayserve_moe.serving.middleware.json_body import taken_fields, validate
from rayserve_moe.serving.start.options import config_of
from rayserve_moe.serving.start.validation import check_config
from rayserve_moe.tools.completion import SHELLS
from tests.deploy.kustomize import rendered
from tests.support.docs.guides import ROOT, Block

MODEL = {"model_path": "trained:calculator"}
PROBE_FIELDS = {"httpGet", "periodSeconds", "failureThreshold", "timeoutSeconds"}
FOLDERS = ("configs/", "deploy/", "examples/", "benchmarks/")
_COMMENT = re.compile(r"(?:^|\s)#\s.*$", re.MULTILINE)
_ASSIGNMENT = re.compile(r"\w+=.*", re.DOTALL)
_URL = re.compile(r"(?:http://)?(?:localhost:8000|127\.0\.0\.1:8000|\$URL)(/[^?]*)")
_SETTING = re.compile(r"\w+: ")


class UnreadError(ValueError):
    """A command or value that no parser of ours takes."""


def read_block(block: Block) -> None:
    """Read every command, setting and body of a block.

    Raises: ValueError or KeyError for the first one that is wrong, or that no reader knows.
    """
    if _is_yaml(block):
        _read_yaml(block.text)
    elif block.language == "python":
        _read_source(block.text)
    elif block.language == "json":
        _read_any_body(json.loads(block.text))
    else:
        for words in commands_of(block.text):
            _read_command(words)


def is_settings_or_requests(block: Block) -> bool:
    """Return True for a block of YAML, and for a block whose commands are all curl."""
    if block.language not in ("", "sh", "bash"):
        return _is_yaml(block)
    commands = [] if _is_yaml(block) or not block.text.lstrip().startswith("curl") else commands_of(block.text)
    return _is_yaml(block) or (bool(commands) and all(words[0] == "curl" for words in commands))


def _is_yaml(block: Block) -> bool:
    return block.language == "yaml" or (not block.language and bool(_SETTING.match(block.text)))


def commands_of(text: str) -> list[list[str]]:
    """Return the words of each command of a shell block, without comments and assignments of variables."""
    lexer = shlex.shlex(_COMMENT.sub("", text.replace("\\\n", " ")), posix=True, punctuation_chars=";&|\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    commands: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set(";&|\n"):
            commands.append([])
        elif commands[-1] or not _ASSIGNMENT.fullmatch(word):
            commands[-1].append(word)
    return [words for words in commands if words]


def _read_command(words: Sequence[str]) -> None:
    name, *arguments = words
    for path in (word for word in arguments if word.startswith(FOLDERS)):
        if not (ROOT / path).exists():
            raise UnreadError(f"{path} does not exist")
    program = Path(name).name
    if program not in READERS:
        raise UnreadError(f"no reader for {program}")
    READERS[program](arguments)


def _read_ours(arguments: Sequence[str]) -> None:
    command, *rest = arguments
    if command == "completion" and rest and rest[0] in SHELLS:
        return
    module = importlib.import_module(f"rayserve_moe.{COMMANDS[command][0]}")
    parser = argparse.ArgumentParser(prog=command, allow_abbrev=False, conflict_handler="resolve")
    module.add_arguments(parser)
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            options = parser.parse_args(rest)
        except SystemExit as error:
            raise UnreadError(errors.getvalue().splitlines()[-1]) from error
    if command == "serve" and isinstance(config := config_of(options), dict):
        settings_from(config["applications"][0]["args"])


def _read_python(arguments: Sequence[str]) -> None:
    if len(arguments) < 2 or arguments[0] != "-m":
        raise UnreadError("no module")
    found = importlib.util.find_spec(arguments[1])
    if found is None or found.origin is None:
        raise UnreadError(f"no module {arguments[1]}")
    path = Path(found.origin)
    sources = list(path.parent.glob("*.py")) if path.name == "__init__.py" else [path]
    text = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    for flag in (word.partition("=")[0] for word in arguments[2:] if word.startswith("--")):
        if f'"{flag}"' not in text:
            raise UnreadError(f"{arguments[1]} has no {flag}")


def _read_source(text: str) -> None:
    """Read Python: its syntax, and that the names exist which it imports from this package."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rayserve_moe":
            module = importlib.import_module(node.module or "")
            if missing := [name.name for name in node.names if not hasattr(module, name.name)]:
                raise UnreadError(f"{node.module} has no {missing[0]}")


def _read_pip(arguments: Sequence[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = set(project["optional-dependencies"])
    for extras in re.findall(r"\[([\w,]+)\]", " ".join(arguments)):
        if unknown := set(extras.split(",")) - known:
            raise UnreadError(f"no extra {min(unknown)}")


def _read_make(arguments: Sequence[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    if unknown := {word for word in arguments if "=" not in word} - targets:
        raise UnreadError(f"no target {min(unknown)}")


def _read_kubectl(arguments: Sequence[str]) -> None:
    if list(arguments[:2]) != ["apply", "-k"]:
        raise UnreadError(f"no reader for kubectl {arguments[0]}")
    rendered(ROOT / arguments[2])


def _read_ray(arguments: Sequence[str]) -> None:
    if list(arguments[:2]) != ["job", "submit"] or "--" not in arguments:
        raise UnreadError("no reader for other commands of Ray than `job submit ... --`")
    _read_command(arguments[list(arguments).index("--") + 1 :])


def _read_curl(arguments: Sequence[str]) -> None:
    (path,) = (found[1] for word in arguments if (found := _URL.fullmatch(word)))
    pairs = list(itertools.pairwise(arguments))
    bodies = [body for option, body in pairs if option in ("-d", "--data")]
    methods = [name for option, name in pairs if option == "-X"]
    operations = _routes().get(path)
    method = (methods or ["POST" if bodies else "GET"])[0].lower()
    if operations is None or method not in operations:
        raise UnreadError(f"no route {method.upper()} {path}")
    for body in bodies:
        _read_body(json.loads(body), _body_of(operations[method]))


@cache
def _routes() -> dict[str, Any]:
    return create_api(ApiState(loop=None, tokenizer=None)).openapi()["paths"]


def _body_of(operation: dict[str, Any]) -> type:
    content = operation["requestBody"]["content"]["application/json"]
    name = content["schema"]["$ref"].rpartition("/")[2]
    return next(body for body in BODIES if body.__name__ == name)


def _read_body(fields: Any, schema: type) -> None:
    taken, unknown = taken_fields(fields, FIELDS[schema])
    if unknown:
        raise UnreadError(f"{schema.__name__} has no field {unknown[0]}")
    try:
        validate(schema, taken)
    except ApiError as error:
        raise UnreadError(f"{schema.__name__}: {error.message}") from error


def _read_any_body(fields: Any) -> None:
    """Read a body that names no route."""
    for schema in BODIES:
        with contextlib.suppress(UnreadError, ApiError):
            return _read_body(fields, schema)
    raise UnreadError("no route takes this body")


def _read_yaml(text: str) -> None:
    """Read settings, a Serve config, or probes of a pod."""
    document = yaml.safe_load(text)
    if "applications" in document:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "serve.yaml"
            path.write_text(text, encoding="utf-8")
            check_config(path)
    elif all(name.endswith("Probe") for name in document):
        for probe in document.values():
            if unknown := set(probe) - PROBE_FIELDS:
                raise UnreadError(f"no field {min(unknown)} of a probe")
            if "get" not in _routes().get(probe["httpGet"]["path"], {}):
                raise UnreadError(f"no route {probe['httpGet']['path']}")
    else:
        settings_from({**MODEL, **document})


READERS = {
    "rayserve-moe": _read_ours,
    "python": _read_python,
    "pip": _read_pip,
    "make": _read_make,
    "kubectl": _read_kubectl,
    "ray": _read_ray,
    "curl": _read_curl,
}


def faults_in(blocks: Sequence[Block]) -> Iterator[str]:
    """Yield the first line and the fault of each block that its readers do not take."""
    for block in blocks:
        try:
            read_block(block)
        except (ValueError, KeyError, ImportError, SyntaxError, ApiError, yaml.YAMLError) as error:
            yield f"{block.text.splitlines()[0]}: {error}"
