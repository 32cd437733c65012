"""vLLM's offline engine as a peer (see `process.py`): run by the Python of the folder that `install.py` made."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind

SIZES = {"max_model_len": 1024, "max_num_seqs": 32, "max_num_batched_tokens": 2048}


def main() -> None:
    """Load the model from the directory named on the command line in bfloat16; serve runs until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    llm = LLM(model=sys.argv[1], dtype="bfloat16", seed=0, skip_tokenizer_init=True, **SIZES)
    features, cores = torch.backends.cpu.get_cpu_capability(), sorted(os.sched_getaffinity(0))
    found = {"version": vllm.__version__, "dtype": "bfloat16", "torch": torch.__version__, "features": [features]}
    print(json.dumps(found | {"cores": cores, "options": SIZES, "compiler": torch.__config__.show()}), file=answers)
    for number, line in enumerate(sys.stdin):
        print(json.dumps(generate(llm, json.loads(line), number=number)), file=answers)


def generate(llm: LLM, request: dict[str, Any], *, number: int) -> dict[str, float]:
    """Run one request: greedy, or sampled at temperature 1 where there are several choices."""
    is_sampled, engine = request["n"] > 1, llm.llm_engine
    sampling = SamplingParams(
        n=request["n"],
        temperature=float(is_sampled),
        seed=request["seed"] if is_sampled else None,
        max_tokens=request["num_new_tokens"],
        min_tokens=request["num_new_tokens"],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if len(request["prompts"]) == 1 else RequestOutputKind.FINAL_ONLY,
    )
    first_token_s, num_new_tokens, started = 0.0, 0, time.perf_counter()
    for i, prompt in enumerate(request["prompts"]):
        engine.add_request(f"{number}-{i}", TokensPrompt(prompt_token_ids=prompt), sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            num_new_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        first_token_s = first_token_s or (time.perf_counter() - started if num_new_tokens else 0.0)
    return {"seconds": time.perf_counter() - started, "num_new_tokens": num_new_tokens, "first_token_s": first_token_s}


if __name__ == "__main__":
    main()
