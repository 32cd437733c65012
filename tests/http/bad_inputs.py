"""Requests that must be refused: (name, path, body, status, param). A body is JSON-ready, or raw bytes."""

from __future__ import annotations

MARKER = "zq7-marker"
"""Put into inputs; no answer may repeat it."""

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
_MESSAGES = [{"role": "user", "content": "hi"}]


def _completion(name, status=400, param=None, **fields):
    return name, COMPLETIONS, {"model": "tiny", "prompt": "x", "max_tokens": 2, **fields}, status, param


def _chat(name, status=400, param=None, **fields):
    return name, CHAT, {"model": "tiny", "messages": _MESSAGES, "max_tokens": 2, **fields}, status, param


def _native(name, param=None, sampling_params=None, **fields):
    body = {"sampling_params": {"max_new_tokens": 2} if sampling_params is None else sampling_params, **fields}
    return name, GENERATE, body, 400, param


def _raw(name, body, path=COMPLETIONS):
    return name, path, body, 400, None


def _sampling(name, field, value, param=None):
    """A wrong sampling field, refused by both dialects under its own name."""
    return [
        _completion(f"completion: {name}", param=param or field, **{field: value}),
        _native(f"native: {name}", f"sampling_params.0.{param or field}", {field: value}, input_ids=[5]),
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
    *_sampling("seventeen stop strings", "stop", [MARKER] * 17),
    *_sampling("an endless stop string", "stop", MARKER * 1000),
    *_sampling("stop ids as words", "stop_token_ids", [MARKER]),
    *_sampling("ignore_eos as a number", "ignore_eos", 1),
    *_sampling("presence penalty", "presence_penalty", 0.5),
    *_sampling("frequency penalty", "frequency_penalty", -1),
    *_sampling("repetition penalty", "repetition_penalty", 1.1),
    *_sampling("logit bias", "logit_bias", {MARKER: 1}),
    _completion("temperature above two", param="temperature", temperature=2.5),
    _completion("negative max_tokens", param="max_tokens", max_tokens=-1),
    _completion("max_tokens as a float", param="max_tokens", max_tokens=2.0),
    _completion("max_tokens beyond 32 bits", param="max_tokens", max_tokens=2**31),
    _completion("seed of 65 bits", param="seed", seed=2**64),
    _completion("seed as a word", param="seed", seed=MARKER),
    _completion("logprobs as a boolean", param="logprobs", logprobs=True),
    _completion("logprobs of 21", param="logprobs", logprobs=21),
    _completion("best_of above n", best_of=2),
    _completion("echo", param="echo", echo=True),
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
    _chat("alternatives", param="top_logprobs", logprobs=True, top_logprobs=2),
    _chat("tools", param="tools", tools=[{"type": "function", "function": {"name": MARKER}}]),
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
    _native("a regular expression", "sampling_params.0.regex", {"regex": MARKER}, input_ids=[5]),
    _native("rid as a number", "rid", input_ids=[5], rid=5),
    _native("an empty rid", "rid", input_ids=[5], rid=""),
    _native("the same rid twice", "rid", input_ids=[[5], [6]], rid=[MARKER, MARKER]),
    _native("too few rids", None, input_ids=[[5], [6]], rid=[MARKER]),
    _native("a start after the prompt", "routed_experts_start_len", input_ids=[5], routed_experts_start_len=2),
    _native("a negative start", "routed_experts_start_len", input_ids=[5], routed_experts_start_len=-1),
    _native("native alternatives", "top_logprobs_num", input_ids=[5], top_logprobs_num=3),
    _native("return_logprob as a number", "return_logprob", input_ids=[5], return_logprob=1),
]  # fmt: skip

BAD_INPUTS = [*BAD_JSON, *BAD_PROMPTS, *BAD_SAMPLING, *BAD_MODEL_OR_ROUTE, *BAD_CHAT, *BAD_NATIVE]
