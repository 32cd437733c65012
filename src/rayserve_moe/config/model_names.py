"""Forms of `model_path`, recognised without reading a checkpoint or asking the Hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rayserve_moe.config.given_files import TRAINED, TRAINED_NAMES, GivenFileError, is_url

SCHEME = "hf://"
SYNTHETIC = "synthetic"
SYNTHETIC_NAMES = tuple(
    name if family == "qwen3" else f"{family}-{name}"
    for family in (
        *("qwen3", "qwen3.5", "olmoe", "deepseek-v3", "gpt-oss", "gemma-4", "mimo-v2-flash", "nemotron-3", "granite-4"),
        *("kimi-linear", "ling-3"),
    )
    for name in ("tiny", "small", "mid")
)
"""Random checkpoints that are written at the first start, named as in `synthetic:tiny`."""
PRESETS = Path(__file__).parents[1] / "model" / "presets"
_PACKAGED = {TRAINED: TRAINED_NAMES, SYNTHETIC: SYNTHETIC_NAMES}
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class HubModel:
    """A model of the Hub at a revision."""

    repo_id: str
    revision: str | None = None
    """None: the newest revision."""

    @property
    def is_commit(self) -> bool:
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return f"{SCHEME}{self.repo_id}" + (f"@{self.revision}" if self.revision else "")


def hub_model(model_path: str) -> HubModel | None:
    """Return the model that a path names on the Hub, or None for any other path.

    Accepted are `hf://org/name`, and `org/name` if no such directory exists, both with an optional `@revision`. Raises
    GivenFileError if anything else follows `hf://`.
    """
    is_in_scheme = model_path.startswith(SCHEME)
    found = _ID.fullmatch(model_path.removeprefix(SCHEME).rstrip("/"))
    if found is None and is_in_scheme:
        raise GivenFileError("not a model of the Hub: hf://organisation/name, or hf://organisation/name@revision")
    if found is None or (not is_in_scheme and (model_path[0] in ".~" or Path(model_path).exists())):
        return None
    return HubModel(found["id"], found["revision"])


def preset_names() -> list[str]:
    """Return the names of the models whose configs come with the package, without weights."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def model_fault(model_path: str) -> str:
    """Return why a path cannot name a model on this machine; empty if it may."""
    prefix, is_packaged, name = model_path.partition(":")
    if is_packaged and prefix in _PACKAGED:
        known = _PACKAGED[prefix]
        return "" if name in known else f"no such model; {prefix}: takes {', '.join(known)}"
    if is_url(model_path):
        return ""
    directory = Path(model_path).expanduser()
    if directory.is_dir():
        return "" if (directory / "config.json").is_file() else "there is no config.json in this directory"
    if model_path[:1] in ("/", ".", "~"):
        return "no such checkpoint directory"
    return "" if hub_model(model_path) else _possible(model_path)


def _possible(model_path: str) -> str:
    lines = [
        "no such directory, and no name of a model; possible are",
        "  a directory with config.json, tokenizer and safetensors",
        "  organisation/name               a model of the Hugging Face Hub",
        "  gs://bucket/folder              such a directory behind a URL",
        *(f"  {prefix}:NAME".ljust(34) + ", ".join(names) for prefix, names in _PACKAGED.items()),
    ]
    if model_path in preset_names():
        lines.append(
            f"{model_path} is a config without weights: only compile-check and plan-slice take it by this name"
        )
    return "\n".join(lines)
