"""vLLM's offline engine as a peer (see `process.py`): run by the Python of the folder that `install.py` made."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind

SIZES = {"max_model_len": 1024, "max_num_seqs": 32, "max_num_batched_tokens": 2048}


def main() -> None:
    """Load the model from the directory named on the command line in its own type; serve runs until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    dtype = json.loads((Path(sys.argv[1]) / "config.json").read_text())["dtype"]
    llm = LLM(model=sys.argv[1], dtype=dtype, seed=0, skip_tokenizer_init=True, **SIZES)
    features, cores = torch.backends.cpu.get_cpu_capability(), sorted(os.sched_getaffinity(0))
    found = {"version": vllm.__version__, "dtype": dtype, "torch": torch.__version__, "features": [features]}
    print(json.dumps(found | {"cores": cores, "options": SIZES, "compiler": torch.__config__.show()}), file=answers)
    for number, line in enumerate(sys.stdin):
        print(json.dumps(generate(llm, json.loads(line), number=number)), file=answers)


def generate(llm: LLM, request: dict[str, Any], *, number: int) -> dict[str, Any]:
    """Run one request: greedy, or sampled at temperature 1 where there are several choices.

    Sampled without the request's seed: vLLM rewinds a generator behind each part of a prompt, which torch's cannot do
    on a processor (RuntimeError, "CPU Generator does not use offset").
    """
    engine = llm.llm_engine
    sampling = SamplingParams(
        n=request["n"],
        temperature=float(request["n"] > 1),
        max_tokens=request["num_new_tokens"],
        min_tokens=request["num_new_tokens"],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if len(request["prompts"]) == 1 else RequestOutputKind.FINAL_ONLY,
    )
    first_token_s, output_ids, started = 0.0, defaultdict(list), time.perf_counter()
    for i, prompt in enumerate(request["prompts"]):
        engine.add_request(f"{number}-{i}", TokensPrompt(prompt_token_ids=prompt), sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            for choice in output.outputs:
                output_ids[int(output.request_id.partition("-")[2]), choice.index] += choice.token_ids
        first_token_s = first_token_s or (time.perf_counter() - started if any(output_ids.values()) else 0.0)
    seconds = time.perf_counter() - started
    ids = [output_ids[place] for place in sorted(output_ids)]
    return {"seconds": seconds, "output_ids": ids, "first_token_s": first_token_s}


if __name__ == "__main__":
    main()
