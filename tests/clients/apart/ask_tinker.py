"""Sample and score with Tinker's client; write what it returns as JSON."""

import json
import math
import sys

import tinker
from tinker import types

URL, MODEL = sys.argv[1:]
service = tinker.ServiceClient(base_url=URL)
(served,) = service.get_server_capabilities().supported_models
sampler = service.create_sampling_client(base_model=MODEL)
PROMPT = [10, 11, 12, 13]
prompt = types.ModelInput.from_ints(PROMPT)
params = types.SamplingParams(max_tokens=5, seed=3, temperature=1.0)
sampled = sampler.sample(
    prompt=prompt, sampling_params=params, num_samples=2, include_prompt_logprobs=True, topk_prompt_logprobs=2
).result()
# Many orders at once, as a trainer makes them.
many = [sampler.sample(prompt=prompt, sampling_params=params, num_samples=1) for _ in range(32)]
scored = sampler.compute_logprobs(prompt).result()
sys.stdout.write(
    json.dumps(
        {
            "prompt_ids": PROMPT,
            "model": served.model_name,
            "tokens": [list(each.tokens) for each in sampled.sequences],
            "logprobs": [list(each.logprobs) for each in sampled.sequences],
            "reasons": [each.stop_reason for each in sampled.sequences],
            "prompt": [None if each is None or math.isnan(each) else each for each in sampled.prompt_logprobs],
            "top": [None if not each else [list(pair) for pair in each] for each in sampled.topk_prompt_logprobs],
            "scored": scored,
            "many": [list(each.result().sequences[0].tokens) for each in many],
        }
    )
)
