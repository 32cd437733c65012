"""Bodies and values from which `recorded_bodies` draws."""

from __future__ import annotations

from typing import Any

USER = [{"role": "user", "content": "hi"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    {"role": "assistant", "content": "well"},
    {"role": "user", "content": "go on"},
]
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": _SCHEMA}} for name in "fg"]
_FLAT = [{"type": "function", "name": name, "parameters": _SCHEMA} for name in "fg"]
_THEIRS = [{"name": name, "input_schema": _SCHEMA, "description": "it"} for name in "fg"]
_CALLED = [
    *TALK[1:2],
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
]  # fmt: skip
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "so"}]},
    {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c1"},
    {"type": "function_call", "name": "g", "arguments": "{}", "call_id": "c2"},
    {"type": "function_call_output", "call_id": "c1", "output": "7"},
    {"type": "message", "role": "assistant", "content": "yes"},
    {"type": "message", "role": "user", "content": "more"},
]
_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "so", "signature": "x"}, {"type": "text", "text": "yes"},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"n": 1}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c1", "content": "7"}, {"type": "text", "text": "more"}]},
]  # fmt: skip
_TEXTS = {"text_1": "one", "text_2": ["two", "three"]}

_GREEDY = {"temperature": 0}
GOOD: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": [5, 6, 7], "max_tokens": 3, **_GREEDY},
        {"prompt": ["a b", "c"], "max_tokens": 2, "seed": 3, "n": 2, "logprobs": 2},
        {"prompt": "once more", "max_tokens": 4, "seed": 3, "top_p": 0.9, "echo": True, "logprobs": 1},
    ],
    "/v1/chat/completions": [
        {"messages": USER, "max_tokens": 3, **_GREEDY},
        {"messages": TALK, "max_tokens": 3, "seed": 5, "logprobs": True, "top_logprobs": 2},
    ],
    "/generate": [
        {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3, **_GREEDY}},
        {"text": ["a", "bc"], "sampling_params": {"max_new_tokens": 2, "sampling_seed": 4, "n": 2}},
        {
            "text": "so",
            "sampling_params": {"max_new_tokens": 3, "sampling_seed": 4},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
        },
    ],
    "/inference/v1/generate": [
        {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3, **_GREEDY, "logprobs": 1}},
        {"token_ids": [9] * 9, "sampling_params": {"max_tokens": 2, "seed": 4, "n": 2, "prompt_logprobs": 2}},
    ],
    "/skyrl/v1/generate": [{"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3, **_GREEDY}}],
    "/v1/messages": [
        {"messages": USER, "max_tokens": 3, "top_k": 1},
        {"messages": USER, "max_tokens": 3, "top_k": 1, "system": [{"type": "text", "text": "Be brief."}]},
    ],
    "/v1/messages/count_tokens": [{"messages": USER}, {"messages": USER, "system": "Be brief."}],
    "/v1/responses": [
        {"input": "hi", "max_output_tokens": 3, **_GREEDY},
        {"input": _ITEMS[:1], "max_output_tokens": 3, "seed": 2, "instructions": "Be brief.", "top_logprobs": 2},
    ],
    "/v1/score": [
        {"query": "one", "items": ["two", "three"], "label_token_ids": [5, 6]},
        {"query": [5], "items": [[6], [7, 8]], "label_token_ids": [5, 6], "apply_softmax": True},
        _TEXTS,
    ],
    "/v1/embeddings": [{"input": "one"}, {"input": [[5, 6], [7]]}],
    "/tokenize": [{"prompt": "one"}, {"prompt": ["one", ""]}, {"messages": TALK}],
    "/detokenize": [{"tokens": [40, 41]}, {"tokens": [[40], [41, 42]]}],
    "/abort_request": [{"rid": "x"}, {"abort_all": True}],
    "/abort_requests": [{"request_ids": ["x"]}, {}],
    "/inference/v1/abort_requests": [{"request_ids": ["x", "y"]}],
    "/pause_generation": [{"mode": "abort"}, {"mode": "in_place"}, {}],
    "/pause": [{"mode": "keep"}, {}],
    "/flush_cache": [{}, {"reset_running_requests": True}],
    "/reset_prefix_cache": [{}],
    "/resume_request": [{"rid": "x"}],
    "/update_weights_from_disk": [{"model_path": "/nowhere"}, {"model_path": "{checkpoint}", "weight_version": "0"}],
    "/update_weights": [{"weight_dir": "/nowhere"}, {}],
    "/update_weight_version": [{"new_version": "1"}],
}
"""Bodies that are answered, by route."""
GOOD_CHATS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": USER, "max_tokens": 60, **_GREEDY, "tools": TOOLS},
        {"messages": _CALLED, "max_tokens": 60, **_GREEDY, "tools": TOOLS, "logprobs": True},
        {"messages": USER, "max_tokens": 60, **_GREEDY},
    ],
    "/v1/messages": [
        {"messages": USER, "max_tokens": 60, "top_k": 1, "tools": _THEIRS},
        {"messages": _BLOCKS, "max_tokens": 60, "top_k": 1, "tools": _THEIRS, "thinking": {"type": "adaptive"}},
        {"messages": USER, "max_tokens": 60, "top_k": 1},
    ],
    "/v1/messages/count_tokens": [{"messages": _BLOCKS, "tools": _THEIRS}],
    "/v1/responses": [
        {"input": "hi", "max_output_tokens": 60, **_GREEDY, "tools": _FLAT},
        {"input": _ITEMS, "max_output_tokens": 60, **_GREEDY, "tools": _FLAT, "top_logprobs": 1},
        {"input": "hi", "max_output_tokens": 60, **_GREEDY},
    ],
}
"""Bodies of chats that reason and call tools."""
_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}
_FLAT_FORMAT = {"type": "json_schema", "name": "a", "schema": _SCHEMA}
NAMED: dict[str, list[Any]] = {
    "abort_all": [True, False],
    "add_generation_prompt": [True, False],
    "add_special_tokens": [True, False],
    "allowed_token_ids": [[5, 6, 7], [600], []],
    "apply_softmax": [True, False],
    "bad_words": [["a", "b c"], ["x"]],
    "best_of": [1, 2, 3],
    "cache_salt": ["s", ""],
    "chat_template_kwargs": [{"script": "b"}, {"script": "c"}, {"script": "d"}, {"enable_thinking": False}, {}],
    "choice": [["yes", "no"]],
    "continue_final_message": [True, False],
    "dimensions": [64, 32],
    "documents": [[{"title": "t", "text": "x"}], ["one"]],
    "echo": [True, False],
    "encoding_format": ["float", "base64"],
    "forced_routed_experts": [None, [[[0, 1]]], 7],
    "frequency_penalty": [0.5, -0.5],
    "guided_choice": [["yes", "no"]],
    "guided_json": [_SCHEMA],
    "guided_regex": ["[ab]{2}"],
    "ignore_eos": [True, False],
    "include": [["message.output_text.logprobs"], ["reasoning.encrypted_content"], ["else"]],
    "include_reasoning": [True, False],
    "include_stop_str_in_output": [True],
    "include_usage": [True, False],
    "continuous_usage_stats": [True, False],
    "input_ids": [[5, 6], [[5], [6]], [600]],
    "instructions": ["Be brief.", ""],
    "item_first": [True],
    "json_schema": [_SCHEMA, "{}"],
    "logit_bias": [{"5": 2, "7": -1.5}, {"600": 1}],
    "logprob_start_len": [0, 1, -1, 9],
    "logprob_token_ids": [[5, 6], []],
    "logprobs": [0, 1, 3, True, False],
    "logprobs_mode": ["raw_logprobs", "processed_logprobs"],
    "max_completion_tokens": [2, 5],
    "max_new_tokens": [0, 1, 5],
    "max_output_tokens": [1, 5, 60],
    "max_tokens": [0, 1, 5, 60],
    "max_thinking_tokens": [0, 2, -1],
    "messages": [USER, TALK, [], [{"role": "nobody", "content": "x"}]],
    "metadata": [{"a": "b"}],
    "min_new_tokens": [1, 3],
    "min_p": [0.1],
    "min_tokens": [1, 3],
    "model": ["tiny", "scripted", "other"],
    "n": [1, 2, 3],
    "no_stop_trim": [True],
    "output_config": [{"effort": "high"}, {"format": {"type": "json_schema", "schema": _SCHEMA}}, {"efort": "low"}],
    "parallel_tool_calls": [True, False],
    "presence_penalty": [0.5, 3],
    "previous_response_id": ["resp_x"],
    "priority": [0, 1, -1],
    "prompt_logprob_start": [0, 1],
    "prompt_logprob_token_ids": [[[5, 6], [7, -1]], [[5]]],
    "prompt_logprobs": [0, 1, 3],
    "reasoning": [{"effort": "high"}, {"effort": "none"}, {"summary": "auto"}, {"efort": "low"}],
    "reasoning_effort": ["low", "none", "high", "so"],
    "regex": ["[ab]{2}", "("],
    "repetition_detection": [{"max_pattern_size": 2, "min_count": 2}],
    "repetition_penalty": [1.2],
    "request_id": ["mine"],
    "response_format": [{"type": "json_object"}, _FORMAT, {"type": "text"}, {"type": "odd"}],
    "rid": ["mine", ["a", "b"]],
    "routed_experts_dtype": ["int16"],
    "routed_experts_format": ["sglang", "nested", "npy", "packed"],
    "routed_experts_prompt_start": [0, 1, 2],
    "routed_experts_start_len": [0, 1, 2],
    "seed": [1, 2],
    "sampling_seed": [1, 2],
    "separate_reasoning": [True, False],
    "skip_special_tokens": [True, False],
    "speculative": [False, True],
    "stop": ["a", ["b", "c"]],
    "stop_regex": ["[a-z]"],
    "stop_sequences": [["a", "b"], []],
    "stop_token_ids": [[5], [9, 10]],
    "store": [True, False],
    "stream": [True, False],
    "stream_reasoning": [True, False],
    "stream_routed_experts": [True, False],
    "structural_tag": ["{}"],
    "structured_outputs": [{"regex": "[ab]{2}"}, {"choice": ["yes", "no"]}, {"json": _SCHEMA}, {"odd": 1}],
    "system": ["Be brief.", [{"type": "text", "text": "Be brief."}], [{"type": "image"}]],
    "temperature": [0, 0.7, 1.0, 3],
    "text": [{"format": _FLAT_FORMAT}, {"format": {"type": "text"}}, {"verbosity": "medium"}, {"verbosity": "high"}],
    "thinking": [{"type": "enabled", "budget_tokens": 2}, {"type": "disabled"}, {"type": "adaptive"}, {"type": "odd"}],
    "thinking_token_budget": [0, 2, -1],
    "token_ids_logprob": [[5, 6]],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}},
                    {"type": "function", "name": "g"}, {"type": "any"}, {"type": "tool", "name": "f"},
                    {"type": "auto", "disable_parallel_tool_use": True}],
    "tools": [TOOLS, _FLAT, _THEIRS, []],
    "top_k": [1, 5, -1],
    "top_logprobs": [0, 1, 3],
    "top_logprobs_num": [0, 2],
    "top_p": [0.5, 1],
    "truncate_prompt_tokens": [1, 2, -1],
    "truncation_side": ["left", "right"],
    "use_activation": [True, False],
    "user": ["me"],
    "vllm_xargs": [{}, {"x": 1}],
    "weight_version": ["0"],
    **{
        name: [True, True, True, False]
        for name in (
            *("return_cached_tokens_details", "return_entropy", "return_input_ids_in_sglext", "return_meta_info"),
            *("return_output_ids_in_sglext", "return_prompt_text", "return_prompt_token_ids", "return_routed_experts"),
            *("return_sampling_mask", "return_spec_tokens_details", "return_text_in_logprobs", "return_token_ids"),
            *("return_tokens_as_token_ids", "return_weight_versions", "return_token_strs", "return_logprob"),
        )
    },
    "return_hidden_states": [True, "last", False],
}  # fmt: skip
"""Values that are good on most routes, by name."""
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 0.5, 1.5, -0.0, 1e308, 2**31, 2**63, -(2**63), 10**30),
    *("", "x", "none", "auto", "\x00", "é€\U0001f600", "a" * 300, "(a+)+$", "[", "../../etc/passwd", "{{ 7*7 }}"),
    *([], [1], [-1], [5, 6], ["x"], [None], [[5], [6]], [{}], [[]] * 3, ["a"] * 40, list(range(300))),
    *({}, {"x": 1}, {"5": 1}, {"type": "x"}, {"type": "text", "text": "x"}, {"type": "json_object"}),
    *({"max_pattern_size": 2, "min_count": 2}, {"include_usage": True}, {"type": "function", "name": "f"}),
]
"""Values of every kind, good on few routes."""
RAW = [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 2000, b'{"a":' * 2000, b'{"n": NaN}', b'{"n": 1e999}']
_GETS = (
    *("/openapi.json", "/v1/fields", "/v1/models", "/v1/models/tiny", "/v1/models/other", "/version", "/weight_info"),
    *("/get_weight_version", "/model_info", "/get_model_info", "/is_paused", "/is_sleeping", "/get_world_size"),
    *("/health", "/ready", "/ping", "/liveness", "/load", "/nowhere", "/generate", "/v1/responses/resp_x"),
)
_POSTS = (
    *("/continue_generation", "/resume", "/begin_weight_update", "/end_weight_update", "/finish_session", "/ping"),
    *("/areal_pause_generation", "/areal_continue_generation", "/sleep", "/wake_up", "/load_lora_adapter", "/classify"),
    *("/init_weights_update_group", "/update_weights_from_distributed", "/collective_rpc", "/weights_checker"),
    *("/start_profile", "/v1/chat/completions/render", "/release_memory_occupation", "/nowhere"),
)
_STORED = {"max_output_tokens": 60, "temperature": 0}
FIXED: list[tuple[str, str, Any]] = [
    *(("GET", path, None) for path in _GETS),
    *(("POST", path, {}) for path in _POSTS),
    *(("POST", path, body) for path, bodies in GOOD.items() for body in bodies),
]
"""Requests that are always sent: method, path, body."""
FIXED_CHATS: list[tuple[str, str, Any]] = [
    *(("POST", path, body) for path, bodies in GOOD_CHATS.items() for body in bodies),
    *(("POST", path, body | {"stream": True}) for path, bodies in GOOD_CHATS.items() for body in bodies),
    ("POST", "/v1/responses", {"input": "hi", "request_id": "one", **_STORED}),
    ("GET", "/v1/responses/one", None),
    ("POST", "/v1/responses", {"input": "more", "previous_response_id": "one", **_STORED}),
    ("POST", "/v1/responses", {"input": "hi", "request_id": "unkept", "store": False, **_STORED}),
    ("GET", "/v1/responses/unkept", None),
]
