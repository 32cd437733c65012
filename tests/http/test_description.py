"""The published description: every route is in it, with the statuses and bodies that it has."""

from __future__ import annotations

import httpx
import jsonschema_rs
import pytest

from rayserve_moe.serving.api.routes.unsupported import REASONS
from rayserve_moe.serving.http import BODIES
from tests.http.bad_inputs import BAD_INPUTS
from tests.support.serving.http_client import CHAT, COMPLETIONS, GENERATE, TOKENS

TINKER = "/api/v1"
ROUTES = {
    "get": {
        *(f"{TINKER}/{name}" for name in ("healthz", "get_server_capabilities", "samplers/{sampler_id}")),
        f"{TINKER}/rollout_evidence/{{sequence_id}}",
        "/health", "/health_generate", "/metrics", "/v1/loads", "/v1/models", "/v1/models/{name}", "/model_info",
        "/get_model_info", "/server_info", "/get_server_info", "/get_weight_version", "/flush_cache",
        "/", "/docs", "/experts", "/experts/state", "/ping", "/ready", "/liveness", "/load", "/version", "/weight_info",
        "/get_world_size", "/is_paused", "/is_sleeping", "/v1/fields", "/v1/responses/{response_id}",
        "/experts/placement",
    },
    "post": {
        *(f"{TINKER}/client/{name}" for name in ("config", "dynamic_config")),
        *(f"{TINKER}/{name}" for name in ("create_session", "session_heartbeat", "sessions/{session_id}/finish")),
        *(f"{TINKER}/{name}" for name in ("create_sampling_session", "telemetry")),
        *(f"{TINKER}/{name}" for name in ("asample", "retrieve_future", "cancel_future")),
        "/resume_request",
        COMPLETIONS, CHAT, GENERATE, TOKENS, "/abort_request", "/flush_cache", "/reset_prefix_cache",
        "/pause_generation", "/continue_generation", "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/skyrl/v1/generate", "/tokenize", "/detokenize", "/finish_session", "/close_session", "/pause", "/resume",
        "/abort_requests",
        "/inference/v1/abort_requests", "/update_weights", "/update_weight_version", "/begin_weight_update",
        "/end_weight_update", "/areal_update_weights", "/areal_pause_generation", "/areal_continue_generation",
        "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/score", "/v1/embeddings", "/audit",
        "/experts/placement", "/load_lora_adapter", "/unload_lora_adapter", "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter", "/skyrl/v1/load_lora_adapter", *REASONS,
    },
    "delete": {"/v1/responses/{response_id}", "/update_weights_from_tensor"},
}  # fmt: skip
GOOD = [
    (COMPLETIONS, {"prompt": "x", "max_tokens": 1, "logit_bias": {"5": 1.5}, "stop": ["a"], "echo": True}),
    (COMPLETIONS, {"prompt": [[5], [6]], "max_tokens": 1, "suffix": "", "seed": -3}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "tools": [], "tool_choice": "auto"}),
    (GENERATE, {"text": ["x", "y"], "sampling_params": {"max_new_tokens": 1}}),
    (GENERATE, {"input_ids": [5], "sampling_params": [{"max_new_tokens": 1, "stop": "a"}], "rid": "one"}),
    ("/tokenize", {"prompt": "x", "return_token_strs": True}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 1, "metadata": {"a": "b"}}),
    ("/detokenize", {"tokens": [5]}),
    ("/v1/score", {"query": "x", "items": ["y", "z"], "label_token_ids": [5], "apply_softmax": True}),
    ("/v1/score", {"text_1": "x", "text_2": ["y", "z"]}),
    ("/v1/embeddings", {"input": ["x", "y"], "encoding_format": "base64"}),
    (TOKENS, {"token_ids": [5], "sampling_params": {"max_tokens": 1}, "routed_experts_format": "npy"}),
]


@pytest.fixture(scope="module")
def description(url):
    return httpx.get(f"{url}/openapi.json").json()


def body_schema(description, path):
    schema = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return {**schema, "components": description["components"]}


def test_every_route_is_described(description):
    found = {method: set() for method in ROUTES}
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            found[method].add(path)
            assert {"200", "401"} <= set(operation["responses"]) or "501" in operation["responses"]
    assert {method: paths & ROUTES[method] for method, paths in found.items()} == ROUTES


@pytest.mark.parametrize(("path", "body"), GOOD)
def test_a_body_that_is_served_fits_its_schema(http, description, path, body):
    jsonschema_rs.validate(body_schema(description, path), body)
    assert http.post(path, json=body).status_code == 200


def test_a_body_of_the_wrong_type_does_not_fit(description):
    """What a type or a bound alone refuses, the schema refuses too."""
    described = [path for path in ROUTES["post"] if "requestBody" in description["paths"][path]["post"]]
    assert {body_schema(description, path)["$ref"].rpartition("/")[2] for path in described} == {
        body.__name__ for body in BODIES
    }
    wrong = [row for row in BAD_INPUTS if row[1] in described and isinstance(row[2], dict) and row[3] == 400]
    refused = [row[0] for row in wrong if not jsonschema_rs.is_valid(body_schema(description, row[1]), row[2])]
    assert len(refused) > len(wrong) * 0.7
