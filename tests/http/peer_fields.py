"""Names of request fields in published vLLM, read from its source as text: `python -m tests.http.peer_fields DIR`.

DIR is a directory with the package `vllm` of a wheel, unpacked. The names are kept in `peer_fields.json`, with those of
SGLang, which were written down from its 0.5.23 wheel by hand.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

RECORDED = Path(__file__).with_name("peer_fields.json")
CLASSES = {
    "c": "CompletionRequest",
    "h": "ChatCompletionRequest",
    "i": "GenerateRequest",
    "is": "SamplingParams",
    "so": "StreamOptions",
    "m": "AnthropicMessagesRequest",
    "mc": "AnthropicCountTokensRequest",
    "r": "ResponsesRequest",
    "tokenize": "TokenizeCompletionRequest TokenizeChatRequest",
    "detokenize": "DetokenizeRequest",
}
"""Our object, and the class of vLLM's that has the same place."""


def vllm_fields(directory: Path) -> dict[str, list[str]]:
    """Return the fields of vLLM's request classes, those of their bases included, by our objects."""
    classes: dict[str, ast.ClassDef] = {}
    files = [*(directory / "vllm" / "entrypoints").rglob("protocol.py"), directory / "vllm" / "sampling_params.py"]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, node)
    return {
        key: sorted({field for name in names.split() for field in _fields_of(name, classes)})
        for key, names in CLASSES.items()
    }


def _fields_of(name: str, classes: dict[str, ast.ClassDef]) -> set[str]:
    if name not in classes:
        return set()
    node, found = classes[name], set()
    for base in node.bases:
        found |= _fields_of(ast.unparse(base).rpartition(".")[2], classes)
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            is_field = "ClassVar" not in ast.unparse(statement.annotation)
            if is_field and statement.target.id != "model_config" and not statement.target.id.startswith("_"):
                found.add(statement.target.id)
    return found


if __name__ == "__main__":
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    recorded["vLLM 0.32.0"] = vllm_fields(Path(sys.argv[1]))
    RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n", encoding="utf-8")
