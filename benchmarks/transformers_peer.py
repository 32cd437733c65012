"""transformers' `generate` as a peer (see `peers/process.py`); all prompts of a run are equally long. Needs torch."""

from __future__ import annotations

import json
import sys
import time
from contextlib import redirect_stdout
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

NUM_THREADS = 2
EXPERTS = "grouped_mm"
"""The fastest of its implementations on a CPU."""


def main() -> None:
    """Load the model from the directory, in the dtype, named on the command line; serve runs until the input ends."""
    torch.set_num_threads(NUM_THREADS)
    disable_progress_bar()
    answers = sys.stdout
    with redirect_stdout(sys.stderr):
        model = AutoModelForCausalLM.from_pretrained(
            sys.argv[1], dtype=sys.argv[2], experts_implementation=EXPERTS, local_files_only=True
        ).eval()
        model.generation_config = GenerationConfig()  # no end of sequence: every run goes to its full length
        facts = {"dtype": str(model.dtype).removeprefix("torch."), "experts": EXPERTS, "threads": NUM_THREADS}
        print(json.dumps(facts), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(generate(model, json.loads(line))), file=answers, flush=True)


def generate(model: PreTrainedModel, request: dict[str, Any]) -> dict[str, Any]:
    """Run one request; the clock covers `generate` alone."""
    prompts = torch.tensor(request["prompts"])
    config = GenerationConfig(
        max_new_tokens=request["num_new_tokens"],
        num_return_sequences=request["n"],
        pad_token_id=0,
        do_sample=request["n"] > 1,
        **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if request["n"] > 1 else {}),
    )
    torch.manual_seed(request["seed"])
    started = time.perf_counter()
    answer = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "output_ids": answer[:, prompts.shape[1] :].tolist()}


if __name__ == "__main__":
    main()
