"""Ids and routed rows of an accelerator next to float32 by XLA on the CPU, in a process of its own beside it.

python -m benchmarks.accelerator_correct FILE.npz      # what the CPU computes, without an accelerator
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from rayserve_moe import LLM, SamplingParams

BASE = {
    "enable_return_routed_experts": True,
    "cpu_kernels": "off",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "precompile_bs_paddings": [8],
    "max_step_tokens": 64,
    "structured_output": False,
    "compile_cache": "off",
    "num_pages": 240,
}
SUMS = [tuple(pair) for pair in np.random.default_rng(7).integers(0, 100, (24, 2)).tolist()] + [(37, 45)]
PROMPT_LENGTHS = (5, 17, 33, 64, 100, 31, 8, 50)


def calculator(dtype: str, **more: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the answers to 25 sums, and how many are right."""
    with LLM("trained:calculator", dtype=dtype, **{**BASE, **more}) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=0)
        answers = llm.generate([f"{a}+{b}=" for a, b in SUMS], greedy, use_tqdm=False)
        right = sum(one.outputs[0].text.strip() == str(a + b) for one, (a, b) in zip(answers, SUMS, strict=True))
        compiled = llm.engine.runner.num_compilations_since_start
        return answers, {"right_sums": right, "of_sums": len(SUMS), "compiled_since_start": compiled}


def tiny(dtype: str, *, num_new: int = 64, **more: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the answers to random prompts of the tiny model, and totals of drafts, if any."""
    generator = np.random.default_rng(3)
    prompts = [{"prompt_token_ids": generator.integers(3, 512, n).tolist()} for n in PROMPT_LENGTHS]
    with LLM("synthetic:tiny", dtype=dtype, **{**BASE, **more}) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, logprobs=0)
        answers = llm.generate(prompts, greedy, use_tqdm=False)
        return answers, {"compiled_since_start": llm.engine.runner.num_compilations_since_start}


def arrays_of(name: str, answers: list[Any]) -> dict[str, np.ndarray]:
    """Return ids, rows and log-probs of answers by name."""
    found: dict[str, np.ndarray] = {}
    for i, one in enumerate(answers):
        choice = one.outputs[0]
        found[f"{name}/ids/{i}"] = np.asarray(choice.token_ids)
        found[f"{name}/rows/{i}"] = np.concatenate([one.prompt_routed_experts, choice.routed_experts])
        logprobs = [choice.logprobs[at][token].logprob for at, token in enumerate(choice.token_ids)]
        found[f"{name}/logprobs/{i}"] = np.asarray(logprobs)
    return found


def compare(name: str, answers: list[Any], expected: Any) -> dict[str, Any]:
    """Return how many ids and rows differ, up to the first other id of each sequence."""
    found = arrays_of(name, answers)
    total = {
        "ids": 0,
        "ids_before_first_difference": 0,
        "sequences": 0,
        "sequences_alike": 0,
        "rows": 0,
        "rows_differ": 0,
    }
    worst = 0.0
    for i in range(len(answers)):
        (ids, rows, logprobs), (own, own_rows, own_logprobs) = (
            [source[f"{name}/{kind}/{i}"] for kind in ("ids", "rows", "logprobs")] for source in (expected, found)
        )
        shortest = min(len(ids), len(own))
        same = next((at for at in range(shortest) if ids[at] != own[at]), shortest)
        end = min(len(rows), len(own_rows), len(own_rows) - len(own) + 1 + same)
        total["sequences"] += 1
        total["sequences_alike"] += same == len(ids) == len(own)
        total["ids"] += len(ids)
        total["ids_before_first_difference"] += same
        total["rows"] += end * rows.shape[1]
        total["rows_differ"] += int((rows[:end] != own_rows[:end]).any(-1).sum())
        worst = max(worst, float(np.abs(own_logprobs[:same] - logprobs[:same]).max(initial=0.0)))
    return {**total, "worst_logprob_difference": worst}


def main() -> None:
    """Write the answers of this process's platform, in float32."""
    found = arrays_of("calculator", calculator("float32")[0]) | arrays_of("tiny", tiny("float32")[0])
    out = Path(sys.argv[1])
    np.savez_compressed(out.with_suffix(".part.npz"), **found)
    out.with_suffix(".part.npz").rename(out)


if __name__ == "__main__":
    main()
