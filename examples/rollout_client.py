"""A trainer's round against a server: sample, bring other weights, sample again.

    make serve                                                   # in another terminal
    python -m examples.rollout_client --checkpoint DIR [--url http://127.0.0.1:8000] [--version 1]

DIR is a checkpoint of the model that is served, in a place that every host of the server can read. Prompts are sampled
under the weights there are; then the server is paused, takes the weights of DIR, and goes on; the same prompts are
sampled again under the same seeds. Whatever runs meanwhile waits, and goes on under the new weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from rayserve_moe.rollouts import Rollout
from rayserve_moe.rollouts.answers import SampleRequest
from rayserve_moe.rollouts.client import BlockingRolloutClient

PROMPTS = ("12+30=", "7*8=", "95-37=")
SAMPLING = {"max_new_tokens": 16, "temperature": 1.0, "ignore_eos": True}
SAMPLES_PER_PROMPT = 4


def requests() -> list[SampleRequest]:
    """What is asked for: the prompts as bytes, which are the ids of the embedded default."""
    return [
        SampleRequest(text, list(text.encode()), SAMPLING, seed=seed, count=SAMPLES_PER_PROMPT)
        for seed, text in enumerate(PROMPTS)
    ]


def describe(samples: list[list[Rollout]]) -> str:
    """One line per prompt: versions of the weights, mean log-prob, rows of routing."""
    lines = []
    for same_prompt in samples:
        first = same_prompt[0]
        versions = sorted({rollout.weight_version for rollout in same_prompt})
        logprob = np.mean([rollout.logprobs.mean() for rollout in same_prompt])
        rows = None if first.routing is None else first.routing.rows.shape
        lines.append(f"{first.prompt_id:8} weights {', '.join(versions)}; log-prob {logprob:.3f}; routing {rows}")
    return "\n".join(lines)


def main() -> None:
    """Sample, update, sample."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--version", default="1")
    options = parser.parse_args()
    with BlockingRolloutClient(options.url) as client:
        print(f"weights {client.weight_version()}")
        print(describe(client.generate(requests())))
        client.pause("in_place")
        try:
            answer = client.update_weights(str(options.checkpoint.resolve()), weight_version=options.version)
        finally:
            client.resume()
        print(f"updated: {answer['message']}")
        print(describe(client.generate(requests())))


if __name__ == "__main__":
    main()
