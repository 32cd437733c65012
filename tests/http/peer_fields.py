"""Names of request fields in published packages, read as text: `python -m tests.http.peer_fields WHEEL...`.

Each WHEEL of `pip download --no-deps vllm==0.32.0 sglang==0.5.23 openai==3.54.0 anthropic==2.12.0` is opened as the
archive that it is; nothing of it is imported. The names are kept in `peer_fields.json`, by package and version.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

RECORDED = Path(__file__).with_name("peer_fields.json")
VLLM = {
    "completions": "openai/completion/protocol.py:CompletionRequest",
    "chat": "openai/chat_completion/protocol.py:ChatCompletionRequest",
    "tokens": "token_in_token_out/protocol.py:GenerateRequest",
    "tokens-sampling": "vllm/sampling_params.py:SamplingParams",
    "stream-options": "generate/base/protocol.py:StreamOptions",
    "messages": "anthropic/protocol.py:AnthropicMessagesRequest",
    "count-tokens": "anthropic/protocol.py:AnthropicCountTokensRequest",
    "responses": "openai/responses/protocol.py:ResponsesRequest",
    "score": "scoring/protocol.py:ScoreDataRequest,ScoreQueriesDocumentsRequest,ScoreQueriesItemsRequest "
    "scoring/protocol.py:ScoreTextRequest generative_scoring/serving.py:GenerativeScoringRequest",
    "tokenize": "serve/tokenize/protocol.py:TokenizeCompletionRequest,TokenizeChatRequest",
    "detokenize": "serve/tokenize/protocol.py:DetokenizeRequest",
    "structured_outputs": "vllm/sampling_params.py:StructuredOutputsParams",
    "repetition_detection": "vllm/sampling_params.py:RepetitionDetectionParams",
}
SGLANG = {
    "completions": "openai/protocol.py:CompletionRequest",
    "chat": "openai/protocol.py:ChatCompletionRequest",
    "native": "managers/io_struct.py:GenerateReqInput api/v1/api_types.py:GenerateRequest",
    "native-sampling": "srt/sampling/sampling_params.py:SamplingParams api/v1/api_types.py:SamplingParams",
    "stream-options": "openai/protocol.py:StreamOptions",
    "messages": "anthropic/protocol.py:AnthropicMessagesRequest",
    "count-tokens": "anthropic/protocol.py:AnthropicCountTokensRequest",
    "responses": "openai/protocol.py:ResponsesRequest",
    "score": "openai/protocol.py:ScoringRequest",
    "tokenize": "openai/protocol.py:TokenizeRequest",
    "detokenize": "openai/protocol.py:DetokenizeRequest api/v1/api_types.py:DetokenizeRequest",
    "abort": "managers/io_struct.py:AbortReq api/v1/api_types.py:AbortRequest",
    "pause": "managers/io_struct.py:PauseGenerationReqInput",
    "reset": "managers/io_struct.py:FlushCacheReqInput",
    "update": "managers/io_struct.py:UpdateWeightFromDiskReqInput",
    "version": "managers/io_struct.py:UpdateWeightVersionReqInput",
}
OPENAI = {
    "completions": "types/completion_create_params.py:CompletionCreateParamsBase,CompletionCreateParamsStreaming",
    "chat": "types/chat/completion_create_params.py:CompletionCreateParamsBase,CompletionCreateParamsStreaming",
    "stream-options": "types/chat/chat_completion_stream_options_param.py:ChatCompletionStreamOptionsParam",
    "responses": "types/responses/response_create_params.py:ResponseCreateParamsBase,ResponseCreateParamsStreaming",
}
ANTHROPIC = {
    "messages": "types/message_create_params.py:MessageCreateParamsBase,MessageCreateParamsStreaming",
    "count-tokens": "types/message_count_tokens_params.py:MessageCountTokensParams",
}
PLACES = {"vllm": VLLM, "sglang": SGLANG, "openai": OPENAI, "anthropic": ANTHROPIC}
"""By package, and by our object: the classes that have the same place there, after the end of a file's path."""

Classes = Mapping[str, Mapping[str, ast.ClassDef]]


def fields_of_wheel(wheel: Path) -> tuple[str, dict[str, list[str]]]:
    """Return a package's name with its version, and the fields of its request classes with those of their bases."""
    name, version = wheel.name.split("-")[:2]
    classes = _classes_of(wheel, {place.split(":")[0] for each in PLACES[name].values() for place in each.split()})
    return f"{name} {version}", {
        key: sorted({field for file, class_name in _places(each) for field in _fields(class_name, file, classes)})
        for key, each in PLACES[name].items()
    }


def _places(places: str) -> Iterator[tuple[str, str]]:
    for place in places.split():
        file, _, names = place.partition(":")
        yield from ((file, name) for name in names.split(","))


def _classes_of(wheel: Path, ends: set[str]) -> Classes:
    """Classes by name, by the end of the path of the file that they stand in; "" has those of all such files."""
    found: dict[str, dict[str, ast.ClassDef]] = {"": {}}
    with zipfile.ZipFile(wheel) as archive:
        for path in archive.namelist():
            of_file = next((end for end in ends if path.endswith(f"/{end}") or path == end), None)
            if of_file is None and not path.endswith("/protocol.py"):
                continue
            for node in ast.walk(ast.parse(archive.read(path))):
                if isinstance(node, ast.ClassDef):
                    found[""].setdefault(node.name, node)
                    found.setdefault(of_file or path, {})[node.name] = node
    return found


def _fields(name: str, file: str, classes: Classes) -> set[str]:
    node = classes.get(file, {}).get(name) or classes[""].get(name)
    if node is None:
        return set()
    found: set[str] = set()
    for base in node.bases:
        found |= _fields(ast.unparse(base).partition("[")[0].rpartition(".")[2], file, classes)
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            is_field = "ClassVar" not in ast.unparse(statement.annotation)
            if is_field and statement.target.id != "model_config" and not statement.target.id.startswith("_"):
                found.add(statement.target.id)
    return found


if __name__ == "__main__":
    recorded = dict(fields_of_wheel(Path(wheel)) for wheel in sys.argv[1:])
    RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n", encoding="utf-8")
