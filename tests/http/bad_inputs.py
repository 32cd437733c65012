"""Requests that must be refused: (name, path, body, status, param). A body is JSON-ready, or raw bytes."""

from __future__ import annotations

from tests.support.serving.http_client import CHAT, COMPLETIONS, GENERATE, MARKER, TOKENS

_MESSAGES = [{"role": "user", "content": "hi"}]


def _completion(name, status=400, param=None, **fields):
    return name, COMPLETIONS, {"model": "tiny", "prompt": "x", "max_tokens": 2, **fields}, status, param


def _chat(name, status=400, param=None, **fields):
    return name, CHAT, {"model": "tiny", "messages": _MESSAGES, "max_tokens": 2, **fields}, status, param


def _native(name, param=None, sampling_params=None, **fields):
    body = {"sampling_params": {"max_new_tokens": 2} if sampling_params is None else sampling_params, **fields}
    return name, GENERATE, body, 400, param


def _tokens(name, param=None, sampling_params=None, **fields):
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 2, **(sampling_params or {})}, **fields}
    return name, TOKENS, body, 400, param


def _raw(name, body, path=COMPLETIONS):
    return name, path, body, 400, None


def _sampling(name, field, value, param=None):
    """A wrong sampling field, refused by every dialect under its own name."""
    return [
        _completion(f"completion: {name}", param=param or field, **{field: value}),
        _native(f"native: {name}", f"sampling_params.0.{param or field}", {field: value}, input_ids=[5]),
        _tokens(f"tokens: {name}", f"sampling_params.{param or field}", {field: value}),
    ]


def _routing(name, field, value):
    """A wrong routing field, refused by every route under its own name."""
    return [
        _completion(f"completion: {name}", param=field, **{field: value}),
        _chat(f"chat: {name}", param=field, **{field: value}),
        _native(f"native: {name}", field, input_ids=[5], **{field: value}),
        _tokens(f"tokens: {name}", field, **{field: value}),
    ]


BAD_JSON = [
    _raw("empty body", b""),
    _raw("not JSON", b"prompt=zq7-marker"),
    _raw("half an object", b'{"model": "tiny", "prompt": "zq7-marker'),
    _raw("two objects", b'{"model": "tiny"} {"zq7-marker": 1}'),
    _raw("null body", b"null"),
    _raw("array body", b'["zq7-marker"]'),
    _raw("string body", b'"zq7-marker"'),
    _raw("NaN literal", b'{"prompt": "x", "temperature": NaN}'),
    _raw("Infinity in an unknown field", b'{"prompt": "x", "zq7-marker": Infinity}'),
    _raw("a number that overflows", b'{"model": "tiny", "prompt": "x", "temperature": 1e999}'),
    _raw("an integer of 5000 digits", b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}"),
    _raw("deep nesting of arrays", b'{"prompt": ' + b"[" * 100_000),
    _raw("deep nesting of objects", b'{"a":' * 100_000),
    _raw("invalid UTF-8", b'{"prompt": "zq7-marker\xff"}'),
    _raw("UTF-16", '{"prompt": "zq7-marker"}'.encode("utf-16")),
    _raw("a lone surrogate", b'{"prompt": "zq7-marker\\ud800"}'),
    _raw("a lone surrogate in a key", b'{"prompt": "x", "zq7-marker\\udfff": 1}'),
    _raw("a key given twice", b'{"prompt": "zq7-marker", "prompt": "x"}'),
    _raw("not JSON, natively", b"{zq7-marker}", GENERATE),
    _raw("not JSON, in chat", b"{zq7-marker}", CHAT),
]

BAD_PROMPTS = [
    ("no prompt", COMPLETIONS, {"model": "tiny"}, 400, "prompt"),
    _completion("null prompt", param="prompt", prompt=None),
    _completion("empty string", param="prompt", prompt=""),
    _completion("empty list", param="prompt", prompt=[]),
    _completion("empty list of ids", param="prompt", prompt=[[]]),
    _completion("an empty string among prompts", param="prompt", prompt=["x", ""]),
    _completion("a number as prompt", param="prompt", prompt=7),
    _completion("an object as prompt", param="prompt", prompt={MARKER: MARKER}),
    _completion("strings and ids mixed", param="prompt", prompt=[MARKER, [1]]),
    _completion("ids and strings mixed", param="prompt", prompt=[1, MARKER]),
    _completion("fractional ids", param="prompt", prompt=[1.5, 2.0]),
    _completion("boolean ids", param="prompt", prompt=[True, False]),
    _completion("negative id", param="prompt", prompt=[-1]),
    _completion("id beyond the vocabulary", param="prompt", prompt=[512]),
    _completion("id beyond 32 bits", param="prompt", prompt=[2**40]),
    _completion("one bad id in the second prompt", param="prompt", prompt=[[5], [10**30]]),
    _completion("too many prompts", param="prompt", prompt=["x"] * 1025),
    _completion("too many choices", param="n", prompt=["x"] * 1000, n=128),
    _completion("prompt longer than the context", param="prompt", prompt=[5] * 513),
    _completion("second prompt longer than the context", param="prompt", prompt=[[5], [5] * 600]),
    _completion("prompt and output longer than the context", param="max_tokens", prompt=[5] * 500, max_tokens=13),
]

BAD_SAMPLING = [
    *_sampling("temperature below zero", "temperature", -0.1),
    *_sampling("temperature as a word", "temperature", MARKER),
    *_sampling("temperature as a boolean", "temperature", True),
    *_sampling("temperature beyond all floats", "temperature", 10**400),
    *_sampling("top_p zero", "top_p", 0),
    *_sampling("top_p above one", "top_p", 1.01),
    *_sampling("top_k below -1", "top_k", -2),
    *_sampling("top_k as a fraction", "top_k", 1.5),
    *_sampling("min_p above one", "min_p", 2),
    *_sampling("n zero", "n", 0),
    *_sampling("n of 129", "n", 129),
    *_sampling("n as a boolean", "n", True),
    *_sampling("n as a string", "n", "1"),
    *_sampling("stop as a number", "stop", 3),
    *_sampling("an empty stop string", "stop", ["x", ""]),
    *_sampling("33 stop strings", "stop", [MARKER] * 33),
    _completion("a bad word of a number", param="bad_words", bad_words=[7]),
    _completion("an empty bad word", param="bad_words", bad_words=[""]),
    _completion("a bad word of spaces", param="bad_words", bad_words=["  "]),
    _tokens("129 bad words", "sampling_params.bad_words", {"bad_words": [MARKER] * 129}),
    *_sampling("33 bad patterns", "stop_regex", ["x"] * 33)[:2],
    *_sampling("a long pattern", "stop_regex", MARKER * 100)[:2],
    _completion("a pattern that looks back", param="stop_regex", stop_regex=f"(?<={MARKER})x"),
    _native("native: a pattern of nothing", "sampling_params.stop_regex", {"stop_regex": "a*"}, input_ids=[5]),
    _completion("a repetition of one", param="repetition_detection", repetition_detection={"max_pattern_size": 2}),
    _completion("a repetition with more", param="repetition_detection", repetition_detection={MARKER: 2}),
    _tokens("a repetition as a number", "sampling_params.repetition_detection", {"repetition_detection": 3}),
    _completion("a priority as a word", param="priority", priority=MARKER),
    _native("a priority beyond 32 bits", "priority", input_ids=[5], priority=2**31),
    _completion("more kept than the context has", param="truncate_prompt_tokens", truncate_prompt_tokens=513),
    _completion("nothing kept", param="truncate_prompt_tokens", truncate_prompt_tokens=0),
    _chat("kept in the middle", param="truncation_side", truncation_side=MARKER),
    _completion("listed ids without log-probs", param="logprob_token_ids", logprob_token_ids=[5]),
    _completion("a listed id of no word", param="logprob_token_ids", logprobs=0, logprob_token_ids=[512]),
    _tokens(
        "129 listed ids",
        "sampling_params.logprob_token_ids",
        {"logprobs": 0, "logprob_token_ids": [5] * 129},
    ),
    _native("lists of listed ids for another batch", None, input_ids=[[5]], token_ids_logprob=[[5], [6]]),
    _native("listed ids of words", "token_ids_logprob", input_ids=[5], token_ids_logprob=[MARKER]),
    *_routing("a mode of log-probs that is none", "logprobs_mode", MARKER)[:3],
    _native("entropy as a word", "return_entropy", input_ids=[5], return_entropy=MARKER),
    _native("log-probs of one of two", None, input_ids=[[5], [6]], return_logprob=[True]),
    _native("a start per prompt that is a word", "logprob_start_len", input_ids=[[5]], logprob_start_len=[MARKER]),
    *_sampling("an endless stop string", "stop", MARKER * 1000),
    *_sampling("stop ids as words", "stop_token_ids", [MARKER]),
    *_sampling("ignore_eos as a number", "ignore_eos", 1),
    *_sampling("presence penalty above two", "presence_penalty", 2.01),
    *_sampling("presence penalty as a word", "presence_penalty", MARKER),
    *_sampling("frequency penalty below minus two", "frequency_penalty", -2.01),
    *_sampling("repetition penalty of zero", "repetition_penalty", 0),
    *_sampling("repetition penalty close to zero", "repetition_penalty", 0.0009),
    *_sampling("repetition penalty without end", "repetition_penalty", 1e30),
    *_sampling("a bias of a word", "logit_bias", {MARKER: 1}),
    *_sampling("a bias of a word's value", "logit_bias", {"5": MARKER}),
    *_sampling("a bias above a hundred", "logit_bias", {"5": 101}),
    *_sampling("a bias of a boolean", "logit_bias", {"5": True}),
    *_sampling("a bias of a negative id", "logit_bias", {"-5": 1}),
    *_sampling("a bias of an id with zeros", "logit_bias", {"05": 1}),
    *_sampling("a bias of an id in other digits", "logit_bias", {"\u0665": 1}),
    *_sampling("a bias of an id beyond 32 bits", "logit_bias", {"9" * 10: 1}),
    *_sampling("biases as a list", "logit_bias", [[5, 1]]),
    *_sampling("257 biases", "logit_bias", {str(token_id): 1 for token_id in range(257)}),
    _completion("completion: a bias beyond the vocabulary", param="logit_bias", logit_bias={"512": 1}),
    _native("native: a bias beyond the vocabulary", "sampling_params.logit_bias", {"logit_bias": {"512": 1}},
            input_ids=[5]),
    _tokens("tokens: a bias beyond the vocabulary", "sampling_params.logit_bias", {"logit_bias": {"512": 1}}),
    _completion("no id allowed", param="allowed_token_ids", allowed_token_ids=[]),
    _completion("an id beyond the vocabulary allowed", param="allowed_token_ids", allowed_token_ids=[512]),
    _completion("a word allowed", param="allowed_token_ids", allowed_token_ids=[MARKER]),
    _completion("only ends allowed, and a token wanted", param="allowed_token_ids", allowed_token_ids=[7],
                stop_token_ids=[7], min_tokens=1),
    _tokens("257 ids allowed or biased", "sampling_params.allowed_token_ids",
            {"allowed_token_ids": [*range(256)], "logit_bias": {"5": 1}}),
    _native("ids allowed, natively", "sampling_params", {"allowed_token_ids": [5]}, input_ids=[5]),
    _completion("temperature above two", param="temperature", temperature=2.5),
    _completion("negative max_tokens", param="max_tokens", max_tokens=-1),
    _completion("max_tokens as a float", param="max_tokens", max_tokens=2.0),
    _completion("max_tokens beyond 32 bits", param="max_tokens", max_tokens=2**31),
    _completion("seed of 65 bits", param="seed", seed=2**64),
    _completion("seed as a word", param="seed", seed=MARKER),
    _completion("logprobs as a boolean", param="logprobs", logprobs=True),
    _completion("logprobs of 21", param="logprobs", logprobs=21),
    _completion("best_of below n", param="best_of", best_of=1, n=2),
    _completion("a streamed best_of", param="best_of", best_of=2, stream=True),
    _completion("best_of above 128", param="best_of", best_of=129),
    _completion("echo as a number", param="echo", echo=1),
    _completion("rid as a number", param="rid", rid=5),
    _completion("an empty rid", param="rid", rid=""),
    _completion("suffix", param="suffix", suffix=MARKER),
    _completion("stream as a word", param="stream", stream="true"),
    _completion("stream_options without stream", stream_options={"include_usage": True}),
    _completion("include_usage as a word", param="stream_options.include_usage", stream=True,
                stream_options={"include_usage": MARKER}),
    _completion("return_routed_experts as a word", param="return_routed_experts", return_routed_experts="yes"),
]  # fmt: skip

BAD_MODEL_OR_ROUTE = [
    _completion("unknown model", 404, "model", model=MARKER),
    _chat("unknown model in chat", 404, "model", model=MARKER),
    _completion("model as a number", param="model", model=3),
    ("unknown route", f"/v1/{MARKER}", {}, 404, None),
    ("a route with a slash too many", f"{COMPLETIONS}/", {}, 404, None),
    ("a method the route has not", "/v1/models", {}, 405, None),
]

BAD_CHAT = [
    ("no messages", CHAT, {"model": "tiny"}, 400, "messages"),
    _chat("empty messages", param="messages", messages=[]),
    _chat("messages as a string", param="messages", messages=MARKER),
    _chat("a message that is a string", param="messages.0", messages=[MARKER]),
    _chat("a message without a role", param="messages.0.role", messages=[{"content": MARKER}]),
    _chat("unknown role", param="messages.0.role", messages=[{"role": MARKER, "content": "x"}]),
    _chat("a list as role", param="messages.0.role", messages=[{"role": [MARKER], "content": "x"}]),
    _chat("a number as content", param="messages.1.content", messages=[*_MESSAGES, {"role": "user", "content": 5}]),
    _chat("an image as content", param="messages.0.content",
          messages=[{"role": "user", "content": [{"type": "image_url", "image_url": MARKER}]}]),
    _chat("a conversation longer than the context", param="messages",
          messages=[{"role": "user", "content": "x" * 600}]),
    _chat("logprobs as a number", param="logprobs", logprobs=1),
    _chat("alternatives of 21", param="top_logprobs", logprobs=True, top_logprobs=21),
    _chat("alternatives without log-probs", top_logprobs=2),
    _chat("tools", param="tools", tools=[{"type": "function", "function": {"name": MARKER}}]),
    _chat("tools of another kind", param="tools", tools=[{"type": MARKER}]),
    _chat("a tool that must be called", param="tool_choice", tool_choice={"type": MARKER}),
    _chat("tools as an object", param="tools", tools={MARKER: {}}),
    _chat("parallel calls as a number", param="parallel_tool_calls", parallel_tool_calls=1),
    _chat("an unknown effort", param="reasoning_effort", reasoning_effort=MARKER),
    _chat("an effort that the template does not know", param="reasoning_effort", reasoning_effort="high"),
    _chat("a JSON answer", param="response_format", response_format={"type": MARKER}),
    _chat("negative max_completion_tokens", param="max_completion_tokens", max_completion_tokens=-5),
]  # fmt: skip

BAD_NATIVE = [
    _native("neither text nor ids"),
    _native("text and ids", text=MARKER, input_ids=[5]),
    _native("empty text", "text", text=""),
    _native("empty batch of texts", "text", text=[]),
    _native("a number among texts", "text", text=[MARKER, 1]),
    _native("empty ids", "input_ids", input_ids=[]),
    _native("an empty list in a batch", "input_ids", input_ids=[[5], []]),
    _native("ids as a string", "input_ids", input_ids=MARKER),
    _native("an id beyond the vocabulary", "input_ids", input_ids=[[5], [600]]),
    _native("a prompt longer than the context", "input_ids", input_ids=[5] * 513),
    _native("an output longer than the context", "sampling_params.max_new_tokens", {"max_new_tokens": 512},
            input_ids=[5]),
    _native("sampling_params as a string", "sampling_params", MARKER, input_ids=[5]),
    _native("sampling_params for other prompts", None, [{}, {}], input_ids=[[5], [6], [7]]),
    _native("half an expression", None, {"regex": f"({MARKER}"}, input_ids=[5]),
    _native("rid as a number", "rid", input_ids=[5], rid=5),
    _native("an empty rid", "rid", input_ids=[5], rid=""),
    _native("the same rid twice", "rid", input_ids=[[5], [6]], rid=[MARKER, MARKER]),
    _native("too few rids", None, input_ids=[[5], [6]], rid=[MARKER]),
    _native("a start after the prompt", "routed_experts_start_len", input_ids=[5], routed_experts_start_len=2),
    _native("a negative start", "routed_experts_start_len", input_ids=[5], routed_experts_start_len=-1),
    _native("native alternatives of 21", "top_logprobs_num", input_ids=[5], top_logprobs_num=21),
    _native("native alternatives as a boolean", "top_logprobs_num", input_ids=[5], top_logprobs_num=True),
    _native("log-probs from before the prompt", "logprob_start_len", input_ids=[5], logprob_start_len=-2),
    _native("log-probs from behind the prompt", "logprob_start_len", input_ids=[5], return_logprob=True,
            logprob_start_len=2),
    _native("log-probs from behind the shorter prompt", "logprob_start_len", input_ids=[[5], [5, 6]],
            return_logprob=True, logprob_start_len=2),
    _native("return_logprob as a number", "return_logprob", input_ids=[5], return_logprob=1),
]  # fmt: skip

BAD_TOKENS = [
    ("no token ids", TOKENS, {}, 400, "token_ids"),
    ("the model of another server, in tokens", TOKENS, {"token_ids": [5], "model": MARKER}, 404, "model"),
    _tokens("text as token ids", "token_ids", token_ids=MARKER),
    _tokens("a batch of token ids", "token_ids", token_ids=[[5]]),
    _tokens("empty token ids", "token_ids", token_ids=[]),
    _tokens("a token id beyond the vocabulary", "token_ids", token_ids=[512]),
    _tokens("more token ids than the context holds", "token_ids", token_ids=[5] * 513),
    _tokens("more new tokens than the context holds", "sampling_params.max_tokens", {"max_tokens": 512}),
    ("sampling_params as a list", TOKENS, {"token_ids": [5], "sampling_params": [MARKER]}, 400, "sampling_params"),
    _tokens("log-probs of 21 tokens", "sampling_params.logprobs", {"logprobs": 21}),
    _tokens("all log-probs", "sampling_params.logprobs", {"logprobs": -1}),
    _tokens("prompt log-probs as a boolean", "sampling_params.prompt_logprobs", {"prompt_logprobs": True}),
    _tokens("a seed of 65 bits", "sampling_params.seed", {"seed": 2**64}),
    _tokens("more least than new tokens", "sampling_params.min_tokens", {"min_tokens": 3, "max_tokens": 2}),
    _tokens("less than no token", "sampling_params.min_tokens", {"min_tokens": -1}),
    _tokens("a start after the token ids", "sampling_params.routed_experts_prompt_start",
            {"routed_experts_prompt_start": 2}),
    _tokens("a start before the token ids", "sampling_params.routed_experts_prompt_start",
            {"routed_experts_prompt_start": -1}),
    _tokens("a dtype of words", "routed_experts_dtype", routed_experts_dtype=MARKER),
    _tokens("an empty request_id", "request_id", request_id=""),
    _tokens("stream_options without a stream", stream_options={}),
    _tokens("a salt as a number", "cache_salt", cache_salt=7),
    _raw("not JSON, in tokens", b"{zq7-marker}", TOKENS),
]  # fmt: skip

BAD_ROUTING = [
    *_routing("an unknown dialect", "routed_experts_format", MARKER),
    *_routing("a dialect as a list", "routed_experts_format", [MARKER]),
    *_routing("streamed rows as a word", "stream_routed_experts", MARKER),
    *_routing("forced rows that are a number", "forced_routed_experts", 7),
    *_routing("forced rows that are no base64", "forced_routed_experts", f"{MARKER}!"),
    *_routing("forced rows of half an id", "forced_routed_experts", "AAA="),
    *_routing("forced rows without a shape", "forced_routed_experts", {"data": MARKER}),
    *_routing("forced rows that are words", "forced_routed_experts", [[[MARKER]]]),
    _completion("streamed rows without a stream", return_routed_experts=True, stream_routed_experts=True),
    _completion("a first row after the prompt", param="routed_experts_start_len", routed_experts_start_len=2),
    _completion("a first row before the prompt", param="routed_experts_start_len", routed_experts_start_len=-1),
    _completion("forced rows for one of two prompts", param="forced_routed_experts", prompt=["x", "y"],
                forced_routed_experts=[None]),
    *_routing("index rows of a model without an index", "return_indexer_topk", True),
    *_routing("gates of a server without them", "return_router_gates", True),
    *_routing("gates as a word", "return_router_gates", MARKER),
    *_routing("forced gates without experts", "forced_router_gates", MARKER),
    *_routing("index rows as a word", "return_indexer_topk", MARKER),
    *_routing("index rows in an unknown form", "indexer_topk_format", MARKER),
    *_routing("a forced choice of a model without an index", "forced_indexer_topk", MARKER),
    _native("forced rows for one of two ids", "forced_routed_experts", input_ids=[[5], [6]],
            forced_routed_experts=MARKER),
]  # fmt: skip

BAD_COMMANDS = [
    ("an abort of nothing", "/abort_request", {}, 400, None),
    ("an abort of no one", "/abort_request", {"rid": ""}, 400, None),
    ("an abort of a number", "/abort_request", {"rid": 7}, 400, "rid"),
    ("an abort of all as a word", "/abort_request", {"abort_all": MARKER}, 400, "abort_all"),
    _raw("an abort that is no JSON", b"zq7-marker", "/abort_request"),
    ("a pause in no mode there is", "/pause_generation", {"mode": MARKER}, 400, "mode"),
    ("a pause in a number", "/pause_generation", {"mode": 1}, 400, "mode"),
    ("weights from nowhere", "/update_weights_from_disk", {}, 400, "model_path"),
    ("weights from a number", "/update_weights_from_disk", {"model_path": 7}, 400, "model_path"),
    ("weights from beside the server", "/update_weights_from_disk", {"model_path": MARKER}, 400, "model_path"),
    ("weights from an impossible path", "/update_weights_from_disk", {"model_path": f"/{MARKER}\0"}, 400, "model_path"),
    ("weights made up", "/update_weights_from_disk", {"model_path": "/x", "load_format": "dummy"}, 400, "load_format"),
    ("a version of no name", "/update_weights_from_disk", {"model_path": "/x", "weight_version": ""}, 400,
     "weight_version"),
    ("a request without a name", "/resume_request", {"from_token": 1}, 400, "rid"),
    ("a cursor below zero", "/resume_request", {"rid": "x", "from_token": -1}, 400, "from_token"),
    ("a cursor in words", "/resume_request", {"rid": "x", "from_token": MARKER}, 400, "from_token"),
    ("experts in words", "/experts/placement",
     {"num_experts": 4, "ep_size": 1, "expert_of_slot": [[MARKER]]}, 400, "expert_of_slot.0.0"),
    ("experts of no layer", "/experts/placement", {"num_experts": 4, "ep_size": 1, "expert_of_slot": []}, 400,
     "expert_of_slot"),
    ("a flush in words", "/update_weights_from_disk", {"model_path": "/x", "flush_cache": MARKER}, 400, "flush_cache"),
]  # fmt: skip

BAD_INPUTS = [
    *BAD_JSON,
    *BAD_PROMPTS,
    *BAD_SAMPLING,
    *BAD_MODEL_OR_ROUTE,
    *BAD_CHAT,
    *BAD_NATIVE,
    *BAD_TOKENS,
    *BAD_ROUTING,
    *BAD_COMMANDS,
]
