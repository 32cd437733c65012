"""The first generation requests of trainers, by trainer: path and body with the fields and values that it sends.

`COMPUTED` ones are answered 200 here. Of `REFUSED` ones a field changes the answer and is not computed: it is named.
"""

from __future__ import annotations

from tests.http.asking import CHAT, COMPLETIONS, GENERATE, MODEL, TOKENS

_IDS = [*range(20, 40)]
_SLIME = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 2,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": True,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}
_SKYRL = {
    "min_tokens": 1,
    "include_stop_str_in_output": True,
    "skip_special_tokens": True,
    "max_tokens": 2,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": None,
}
_AREAL = {"top_p": 1.0, "top_k": 100000000, "temperature": 1.0, "ignore_eos": False, "skip_special_tokens": False}
_MILES_ANSWER = {"return_routed_experts": True, "return_indexer_topk": False, "lora_path": None}

COMPUTED = {
    "slime": (GENERATE, {"sampling_params": {**_SLIME, "sampling_seed": 7}, "return_logprob": True, "input_ids": _IDS,
                         "return_routed_experts": True}),
    "Miles": (GENERATE, {"sampling_params": _SLIME, "return_logprob": True, "input_ids": _IDS, **_MILES_ANSWER}),
    "Miles scoring": (GENERATE, {"sampling_params": {"max_new_tokens": 0, "temperature": 0,
                                                     "skip_special_tokens": False},
                                 "return_logprob": True, "logprob_start_len": 10, "input_ids": _IDS}),
    "NeMo-RL": (GENERATE, {"sampling_params": {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 2,
                                               "no_stop_trim": True, "spaces_between_special_tokens": False},
                           "return_logprob": True, "input_ids": _IDS}),
    "AReaL by SGLang": (GENERATE, {"input_ids": _IDS, "image_data": None,
                                   "sampling_params": {**_AREAL, "max_new_tokens": 2, "stop_token_ids": [],
                                                       "frequency_penalty": 0.0},
                                   "return_logprob": True, "stream": False}),
    "verl": (GENERATE, {"input_ids": _IDS, "sampling_params": {"max_new_tokens": 2, "n": 1}, "return_logprob": True,
                        "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": None, "lora_path": None,
                        "custom_logit_processor": None, "image_data": None}),
    "SkyRL": (TOKENS, {"sampling_params": _SKYRL, "model": MODEL, "token_ids": _IDS, "cache_salt": "v1"}),
    "SkyRL sample": (TOKENS, {"sampling_params": {**_SKYRL, "n": 2, "logprobs": 0, "output_kind": 2,
                                                  "prompt_logprobs": 1, "seed": 3, "stop_token_ids": [7]},
                              "model": MODEL, "token_ids": _IDS}),
    "prime-rl": (TOKENS, {"model": MODEL, "token_ids": _IDS,
                          "sampling_params": {"max_tokens": 2, "temperature": 1.0, "stop_token_ids": [7],
                                              "logprobs": 1, "skip_special_tokens": False},
                          "cache_salt": "3", "priority": 0}),
    "prime-rl scoring": (TOKENS, {"model": MODEL, "token_ids": _IDS,
                                  "sampling_params": {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0,
                                                      "prompt_logprobs": 1}}),
    "AReaL by vLLM": (COMPLETIONS, {"prompt": _IDS, **_AREAL, "max_tokens": 2, "stop_token_ids": [], "logprobs": 0,
                                    "use_beam_search": False, "stream": False}),
    "OpenAI": (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "tools": None, "user": "me",
                      "metadata": {"run": "1"}, "store": False, "service_tier": "auto", "model": MODEL}),
}  # fmt: skip

REFUSED = {
    "slime with top_p": (*COMPUTED["slime"], {"custom_params": {"return_top_p_token_ids": True}}, "sampling_params"),
    "AReaL by vLLM": (*COMPUTED["AReaL by vLLM"], {"return_tokens_as_token_ids": True}, None),
    "Miles sessions": (*COMPUTED["OpenAI"], {"input_ids": _IDS}, None),
}
"""Path, body, the field added, and where it stands."""
