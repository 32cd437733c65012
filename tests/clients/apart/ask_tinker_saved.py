"""Sample by saved weights with Tinker's client; write the tokens and the error of an absent path as JSON."""

import json
import sys

import tinker
from tinker import types

URL, MODEL_PATH = sys.argv[1:]
service = tinker.ServiceClient(base_url=URL)
sampler = service.create_sampling_client(model_path=MODEL_PATH)
prompt = types.ModelInput.from_ints([10, 11, 12, 13])
params = types.SamplingParams(max_tokens=5, temperature=0.0)
sampled = sampler.sample(prompt=prompt, sampling_params=params, num_samples=1).result()
try:  # newer clients ask the server when the sampler is first used
    absent = service.create_sampling_client(model_path=f"{MODEL_PATH}/absent")
    absent.sample(prompt=prompt, sampling_params=params, num_samples=1).result()
    refused = ""
except tinker.NotFoundError as error:
    refused = str(error)
sys.stdout.write(json.dumps({"tokens": list(sampled.sequences[0].tokens), "refused": refused}))
