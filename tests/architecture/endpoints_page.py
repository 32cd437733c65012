"""The page of HTTP routes, written from the application by `python -m tests.architecture.endpoints_page`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayserve_moe.serving.api.routes.unsupported import REASONS
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from rayserve_moe.serving.openapi import MEANINGS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "endpoints.md"
INTRODUCTION = """# Endpoints

Written from the application's own description (`GET /openapi.json`) by `python -m tests.architecture.endpoints_page`.
What every field of a body does: [http_fields.md](http_fields.md). Numbers behind `/metrics`: [metrics.md](metrics.md).
"""
GROUPS = {
    "Generation": {
        "/v1/completions": "OpenAI's completions, for text and for token ids",
        "/v1/chat/completions": "OpenAI's chat completions, over the model's chat template",
        "/generate": "SGLang's native route",
        "/inference/v1/generate": "vLLM's route of token ids in, token ids out",
        "/skyrl/v1/generate": "SkyRL's name of it; ids of more than 256 experts are int16",
        "/resume_request": "the rest of an answer that was cut off, by any replica (docs/operate.md)",
        "/v1/responses": "OpenAI's responses, over the same template; they can be continued while they are stored",
        "/v1/responses/{response_id}": "a response that is stored",
        "/v1/messages": "Anthropic's messages, over the same template",
        "/v1/messages/count_tokens": "how many tokens the prompt of such a message has",
        "/v1/score": "SGLang's probabilities of labels after texts; vLLM's cosines of pairs of texts",
        "/v1/embeddings": "hidden states at the last tokens of texts, as unit vectors",
        "/tokenize": "ids of a text, or of messages in the chat template",
        "/detokenize": "the text of ids: vLLM's `prompt` and SGLang's `text`",
    },
    "Health and numbers": {
        "/health": "200 while the engine runs and takes requests",
        "/health_generate": "200 when the engine has just generated a token",
        "/ready": "200 while it takes requests and no pause holds them; 503 names lost weights that must be pushed",
        "/ping": "200 while the engine runs, paused or not",
        "/liveness": "the same, under prime-rl's name",
        "/load": "vLLM's count of requests that run or wait",
        "/metrics": "counters and histograms for Prometheus",
        "/v1/loads": "running and waiting requests, tokens and pages in use",
        "/experts": "page with loads of experts and ranks",
        "/experts/state": "numbers that this page draws",
    },
    "Model": {
        "/v1/models": "the model being served",
        "/v1/models/{name}": "the same by name",
        "/model_info": "path, version of the weights and sizes of the model",
        "/get_model_info": "SGLang's older name of `/model_info`",
        "/server_info": "the same with the package's version, the chosen kernels and the engine's statistics",
        "/get_server_info": "SGLang's older name of `/server_info`",
        "/get_weight_version": "version of the weights",
        "/weight_info": "vLLM's name of `/get_weight_version`",
        "/version": "version of this package",
        "/v1/fields": "every request field of every route: computed, accepted or refused",
        "/get_world_size": "devices that the model lies on",
        "/is_paused": "whether a pause holds all requests",
        "/is_sleeping": "false: device memory stays with the server",
    },
    "Control": {
        "/abort_request": "end one request, or all of them",
        "/pause_generation": "run no steps: `abort`, `retract` or `in_place`",
        "/continue_generation": "end a pause",
        "/update_weights_from_disk": "serve the weights of another checkpoint of the same model",
        "/update_weights_from_tensor": "serve weights that are sent as safetensors, in buckets; DELETE drops them",
        "/flush_cache": "forget cached prefixes, while nothing runs",
        "/reset_prefix_cache": "vLLM's name of `/flush_cache`; `reset_running_requests` has requests computed anew",
        "/pause": "vLLM's name of `/pause_generation`: `keep`, `wait` or `abort`",
        "/resume": "vLLM's name of `/continue_generation`",
        "/abort_requests": "vLLM's name of `/abort_request`, for several",
        "/inference/v1/abort_requests": "the same",
        "/update_weights": "prime-rl's name of `/update_weights_from_disk`, by `weight_dir`",
        "/update_weight_version": "call the weights that serve by another version",
        "/begin_weight_update": "nothing: weights change at once",
        "/end_weight_update": "nothing: weights change at once",
        "/areal_update_weights": "AReaL's name of `/update_weights_from_disk`",
        "/areal_pause_generation": "AReaL's name of `/pause_generation`, which ends all requests",
        "/areal_continue_generation": "AReaL's name of `/continue_generation`",
        "/finish_session": "nothing: sessions hold nothing",
    },
    "Not here": {path: reason.partition(":")[0] for path, reason in REASONS.items()},
}
"""What every route is for. Each route of the application stands in one group."""


def page() -> str:
    """Return the page's text."""
    paths = create_api(ApiState(loop=None, tokenizer=None)).openapi()["paths"]
    unlisted = set(paths) ^ {path for group in GROUPS.values() for path in group}
    assert not unlisted, f"tell in GROUPS what these routes are for, or take them out: {sorted(unlisted)}"
    parts = [INTRODUCTION]
    for title, group in GROUPS.items():
        rows = [_row(path, paths[path], purpose) for path, purpose in group.items()]
        parts += [f"## {title}", "", "| route | for | body | answers | refusals |", "|---|---|---|---|---|", *rows, ""]
    parts += ["## Refusals", "", "| status | |", "|---|---|"]
    parts += [f"| {status} | {meaning} |" for status, meaning in sorted(MEANINGS.items())]
    return "\n".join([*parts, ""])


def _row(path: str, methods: dict[str, Any], purpose: str) -> str:
    operation = next(iter(methods.values()))
    answers = operation["responses"]
    kinds = ", ".join(f"`{kind}`" for kind in answers.get("200", {}).get("content", {}))
    refusals = ", ".join(sorted(status for status in answers if status != "200"))
    said = " ".join(method.upper() for method in sorted(methods))
    cells = (f"`{said} {path}`", purpose, _body(operation), "" if "501" in answers else kinds, refusals)
    return "| " + " | ".join(cells) + " |"


def _body(operation: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    return ", ".join(f"`{kind['schema']['$ref'].rpartition('/')[2]}`" for kind in content.values())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
