"""The first generation requests of trainers, by trainer: path and body with the fields and values that it sends.

`COMPUTED` ones are answered 200 here. Of `REFUSED` ones a field changes the answer and is not computed: it is named.
Read at these commits:

- slime: THUDM/slime 624b824a8, `slime/rollout/sglang_rollout.py`
- Miles: radixark/miles 31f1ca961, `miles/rollout/generate_utils/prefill_logprobs.py`, `miles/rollout/session/core.py`
- NeMo-RL: NVIDIA-NeMo/RL 7ea279abf, `nemo_rl/models/generation/sglang/sglang_generation.py`
- AReaL: inclusionAI/AReaL 4aef98d8d, `areal/engine/sglang_remote.py`, `areal/engine/vllm_remote.py`
- verl: verl-project/verl 1dda039b9, `verl/workers/rollout/sglang_rollout/http_server_engine.py`
- SkyRL: NovaSky-AI/SkyRL a9564572e, `skyrl/backends/skyrl_train/inference_servers/remote_inference_client.py`
- prime-rl: PrimeIntellect-ai/prime-rl 559b44772, `src/prime_rl/utils/client.py`, through renderers 0.1.12
"""

from __future__ import annotations

from tests.support.serving.http_client import CHAT, COMPLETIONS, GENERATE, MODEL, TOKENS

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
_AREAL_VLLM = {**_AREAL, "max_tokens": 2, "stop_token_ids": [], "return_tokens_as_token_ids": True,
               "use_beam_search": False, "stream": False}  # fmt: skip
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
    "AReaL by vLLM": (COMPLETIONS, {"prompt": _IDS, **_AREAL_VLLM, "logprobs": 0}),
    "AReaL chat by vLLM": (CHAT, {"messages": [{"role": "user", "content": "x"}], **_AREAL_VLLM, "logprobs": True}),
    "Miles sessions": (CHAT, {"messages": [{"role": "user", "content": "x"}], "model": MODEL, "max_tokens": 2,
                              "input_ids": _IDS, "logprobs": True, "return_meta_info": True, "no_stop_trim": False,
                              "return_routed_experts": True, "routed_experts_start_len": 4,
                              "chat_template_kwargs": {"enable_thinking": False}}),
    "OpenAI": (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "tools": None, "user": "me",
                      "metadata": {"run": "1"}, "store": False, "service_tier": "auto", "model": MODEL}),
}  # fmt: skip

REFUSED = {
    "slime with top_p": (*COMPUTED["slime"], {"custom_params": {"return_top_p_token_ids": True}}, "sampling_params"),
}
"""Path, body, the field added, and where it stands."""
