"""Digests of what a work tree answers: ids, log-probs, ranks, routing rows and all that is reported of tokens.

    python -m benchmarks.digests checkpoints DIRECTORY                            one tiny checkpoint of every family
    python -m benchmarks.digests run DIRECTORY FILE                               answers of the imported package
    PYTHONPATH=<another work tree>/src:. python -m benchmarks.digests run DIRECTORY BEFORE
    python -m benchmarks.digests compare BEFORE FILE                              exit status 1 if a digest differs

A change that keeps behaviour keeps every digest, on the same processor. Counters of drafts (`spec_*`) are no digests of
behaviour: they depend on measured times.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from rayserve_moe import Engine

SERVED: dict[str, Any] = {
    "enable_return_routed_experts": True,
    "enable_return_hidden_states": True,
    "max_running_requests": 8,
    "max_step_tokens": 64,
    "precompile_bs_paddings": [8],
    "max_model_len": 512,
    "num_pages": 128,
}
DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3}
EPLB = {
    "devices_per_host": 4,
    "enable_eplb": True,
    "num_redundant_experts": 4,
    "eplb_interval": 4,
    "eplb_slots_per_step": 4,
}
ENGINES: dict[str, dict[str, Any]] = {
    "native eplb": EPLB,
    "xla eplb": {"cpu_kernels": "off", **EPLB},
    "native": {},
    "native drafts": DRAFTS,
    "xla": {"cpu_kernels": "off"},
    "xla drafts": {"cpu_kernels": "off", **DRAFTS},
}
"""Settings of each engine. All families run in the engines of one word, one family in the others.

The first engine starts jax, with as many emulated devices as any of them needs. While experts move, log-probs may
differ in the last bit from run to run.
"""
LEFT_OUT = ("id", "e2e_latency", "finish_reason", "weight_version")
"""Fields of `meta_info` that differ from run to run, or say nothing."""


def main() -> None:
    """Run the command of the arguments."""
    command, *paths = sys.argv[1:]
    commands = {"checkpoints": write_checkpoints, "run": run, "compare": compare}
    commands[command](*map(Path, paths))


def write_checkpoints(directory: Path) -> None:
    """Write the first tiny model of every family of the tests, with a tokenizer."""
    from tests.support.models.families import FAMILY_CASES, write_family  # noqa: PLC0415 (imports the current tree)

    for case in FAMILY_CASES:
        if case.variant == 0:
            write_family(case, directory / case.family, seed=1)


def run(directory: Path, file: Path) -> None:
    """Save the digests of all engines, by engine, checkpoint and request."""
    digests: dict[str, str] = {}
    for name, settings in ENGINES.items():
        models = (
            sorted(each.name for each in directory.iterdir() if each.is_dir()) if " " not in name else ["qwen3_moe"]
        )
        for model in models:
            with Engine(str(directory / model), **SERVED, **settings) as engine:
                for request, answer in answers(engine).items():
                    digests |= {f"{name} / {model} / {request} / {part}": d for part, d in digests_of(answer).items()}
            print(name, model, len(digests), flush=True)
    file.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


def compare(before: Path, after: Path) -> None:
    """Print every digest that differs or is only in one file."""
    old, new = (json.loads(each.read_text(encoding="utf-8")) for each in (before, after))
    differing = [name for name in old.keys() | new.keys() if old.get(name) != new.get(name)]
    print(
        *sorted(differing), f"{len(old.keys() | new.keys()) - len(differing)} equal, {len(differing)} differ", sep="\n"
    )
    sys.exit(bool(differing))


def answers(engine: Engine) -> dict[str, dict[str, Any]]:
    """Return the answers to all requests, by name; the later ones find prefixes of the first ones cached."""
    prompt = [3 + (7 * i * i + 5 * i) % 250 for i in range(150)]
    sampled = {"temperature": 0.8, "seed": 5, "top_p": 0.9, "max_new_tokens": 24, "ignore_eos": True}
    greedy = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    scored = {"return_logprob": True, "logprob_start_len": 10, "top_logprobs_num": 3}
    evidence = {"return_entropy": True, "return_sampling_mask": True, "token_ids_logprob": [4, 9], **scored}
    requests: dict[str, dict[str, Any]] = {
        "greedy": {"input_ids": prompt, "return_logprob": True, **greedy},
        "repeated": {"input_ids": [*range(5, 25)] * 4, "return_logprob": True, **greedy},
        "sampled": {"input_ids": prompt[:70], "return_logprob": True, "top_logprobs_num": 4, **sampled},
        "several": {"input_ids": prompt[:45], "return_logprob": True, "n": 3, **sampled},
        "penalties": {"input_ids": prompt[:33], "return_logprob": True, "frequency_penalty": 0.7, **sampled},
        "scored": {"input_ids": prompt[:100], **scored, **greedy},
        "evidence": {"input_ids": prompt[:64], **evidence, **sampled, "top_k": 8},
        "hidden": {"input_ids": prompt[:20], "return_hidden_states": True, **greedy},
        "grammar": {"input_ids": prompt[:40], "return_logprob": True, "regex": "[a-c]{3}x[0-9]{4}", **sampled},
    }
    return {name: engine.generate(**{"return_routed_experts": True, **request}) for name, request in requests.items()}


def digests_of(answer: Any) -> dict[str, str]:
    """Return a digest of every part of an answer, or of the list of its choices."""
    choices = answer if isinstance(answer, list) else [answer]
    parts: dict[str, Any] = {"ids": [each["output_ids"] for each in choices]}
    for name in choices[0]["meta_info"]:
        if name not in LEFT_OUT:
            parts[name] = [each["meta_info"][name] for each in choices]
    return {name: hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16] for name, value in parts.items()}


if __name__ == "__main__":
    main()
