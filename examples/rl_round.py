"""One step of reinforcement learning against a running server: sample, replay, take a step, send weights, sample again.

    make serve                                                   # in another terminal
    python -m examples.rl_round [--url http://127.0.0.1:8000]

Of `3#4=` the calculator answers the sum or the difference; the reward wants the sum. The forward pass is that of
`examples/grpo`, plain JAX for the calculator; bring that of your own trainer. `python -m examples.grpo` is a whole
run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from examples.grpo.model import checkpoint_tensors, read_architecture, read_params, rounded
from examples.grpo.policy import next_logprobs, score
from rayserve_moe.rollouts.alignment import Sample, to_trainer_layout
from rayserve_moe.rollouts.answers import SampleRequest
from rayserve_moe.rollouts.client import BlockingRolloutClient
from rayserve_moe.rollouts.guard import check_replay

PROBLEMS = {f"{a}#{b}=": str(a + b) for a in range(3, 9) for b in (2, 3)}
SAMPLING, GROUP, STEP = {"max_new_tokens": 4, "temperature": 1.0}, 8, 0.05


def main() -> None:
    """Run the round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    with BlockingRolloutClient(parser.parse_args().url) as client:
        # Text to ids, by the tokenizer of the served model; its weights are what training begins with.
        info = client.model_info()
        tokenizer = Tokenizer.from_file(f"{info['tokenizer_path']}/tokenizer.json")
        architecture = read_architecture(Path(info["model_path"]))
        params = read_params(Path(info["model_path"]), architecture)

        # Samples with log-probs and rows: one list per prompt.
        requests = [
            SampleRequest(text, tokenizer.encode(text, add_special_tokens=False).ids, SAMPLING, seed=seed, count=GROUP)
            for seed, text in enumerate(PROBLEMS)
        ]
        groups = client.generate(requests)
        rewards = np.array([[one.text.strip() == PROBLEMS[one.prompt_id] for one in group] for group in groups], float)
        samples = [one for group in groups for one in group]
        advantages = (rewards - rewards.mean(axis=1, keepdims=True)).reshape(-1)

        # Arrays of a batch: ids [B, T], and experts of every token [B, T, layers, k] with the mask of those to replay.
        together = [Sample([*one.prompt_ids, *one.output_ids], len(one.prompt_ids), one.routing) for one in samples]
        batch = to_trainer_layout(together, samples[0].layout, convention="slime")
        ids = np.zeros(batch.attention_mask.shape, np.int32)
        for row, one in zip(ids, together, strict=True):
            row[: len(one.token_ids)] = one.token_ids
        is_output = batch.response_mask[:, 1:]

        def logprobs_of(weights: dict) -> jax.Array:
            rows, is_replayed = batch.routed_experts, batch.replay_mask
            logits, _ = score(rounded(weights), ids, rows, replay_BT=is_replayed, architecture=architecture)
            return next_logprobs(logits, ids)

        # The trainer's log-probs under replay are the server's, or something is wrong.
        ours = np.asarray(logprobs_of(params))
        replayed = [row[mask] for row, mask in zip(ours, is_output, strict=True)]
        distance = check_replay(samples, replayed, versions=info["weight_version"])

        # One step of REINFORCE, of a fixed length.
        def loss(weights: dict) -> jax.Array:
            return -jnp.sum(advantages[:, None] * is_output * logprobs_of(weights)) / is_output.sum()

        gradient = jax.grad(loss)(params)
        norm = jnp.sqrt(sum(jnp.vdot(leaf, leaf) for leaf in gradient.values()))
        params = {name: values - STEP * gradient[name] / norm for name, values in params.items()}

        # The new weights serve, and the same prompts are sampled again under the same seeds.
        client.update_weights_from(checkpoint_tensors(params, architecture), weight_version="round-1")
        again = client.generate(requests)
        after = np.mean([[one.text.strip() == PROBLEMS[one.prompt_id] for one in group] for group in again])
        print(f"{len(samples)} samples of weights {samples[0].weight_version}: reward {rewards.mean():.2f}")
        print(f"replay is {distance.kl:.1e} nats per token from what was sampled")
        print(f"{len(samples)} samples of weights {again[0][0].weight_version}: reward {after:.2f}")


if __name__ == "__main__":
    main()
