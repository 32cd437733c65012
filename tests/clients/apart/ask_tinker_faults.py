"""Sample from a server that is full and then replaced, cancel a second sample, and write the tokens as JSON.

The last arguments are two files. The sample is cancelled when the first exists; the process ends when the second does.
"""

import json
import sys
import time
from pathlib import Path

import tinker
from tinker import types

URL, MODEL = sys.argv[1:3]
CANCEL, END = map(Path, sys.argv[3:])
sampler = tinker.ServiceClient(base_url=URL).create_sampling_client(base_model=MODEL)
prompt = types.ModelInput.from_ints([10, 11, 12, 13])
params = types.SamplingParams(max_tokens=40, seed=3, temperature=1.0)
sampled = sampler.sample(prompt=prompt, sampling_params=params, num_samples=2).result()
endless = types.SamplingParams(max_tokens=400, seed=3, stop=[])
abandoned = sampler.sample(prompt=prompt, sampling_params=endless, num_samples=1)
while not CANCEL.exists():
    time.sleep(0.02)
abandoned.cancel()
sys.stdout.write(json.dumps([list(each.tokens) for each in sampled.sequences]))
while not END.exists():
    time.sleep(0.02)
