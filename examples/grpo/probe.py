"""How far the trainer is from the server on a fixed set of long, uncertain samples, with replay and without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import numpy as np

from examples.grpo.batch import Batch, batch_of
from examples.grpo.model import Params
from examples.grpo.sampler import RunSampler
from examples.grpo.tasks import probe_prompts
from examples.grpo.trainer import Programs, scores_of
from rayserve_moe.replay.encoding.description import described_layout
from rayserve_moe.rollouts import Rollout
from rayserve_moe.rollouts.alignment import decode_answer
from rayserve_moe.rollouts.answers import SampleRequest, rollout_of
from rayserve_moe.rollouts.client import BlockingRolloutClient
from rayserve_moe.rollouts.guard import distance_of

NUM_PROMPTS, NUM_TOKENS, WIDTH = 200, 24, 34
LISTED = 128
"""Ids whose log-probs a server gives with one answer, at most."""


def probe_rollouts(sampler: RunSampler) -> list[Rollout]:
    """Sample the probe set."""
    return [rollout for group in sampler.sample(probe_requests()) for rollout in group]


def probe_requests() -> list[SampleRequest]:
    """Every prompt of the probe set once, past the end of its answer."""
    sampling = {"max_new_tokens": NUM_TOKENS, "temperature": 1.0, "ignore_eos": True}
    return [
        SampleRequest(f"probe/{number}", list(prompt.encode()), sampling, seed=number)
        for number, prompt in enumerate(probe_prompts(NUM_PROMPTS))
    ]


class ProbeAnswers(NamedTuple):
    """Rollouts of the probe set, and the server's log-probs [tokens, V] of all ids at each of their tokens."""

    rollouts: list[Rollout]
    logprobs: list[np.ndarray]


def probe_answers(sampler: RunSampler) -> ProbeAnswers:
    """Sample the probe set as `probe_rollouts` does, with how likely the server found every other token.

    It says so of LISTED ids at once, so that the set is sampled several times. What was not computed alike each time is
    left out: at lower precision a sample depends on which others shared its steps.
    """
    with BlockingRolloutClient(sampler.url) as client:
        num_ids = client.model_info()["vocab_size"]
    passes = [_asked(sampler.url, range(first, min(first + LISTED, num_ids))) for first in range(0, num_ids, LISTED)]
    pairs = zip(probe_requests(), zip(*passes, strict=True), strict=True)
    alike = [(request, answers) for request, answers in pairs if len(set(map(_said, answers))) == 1]
    rollouts = [
        rollout_of(
            answers[0],
            request,
            index=0,
            routing=decode_answer(answers[0]),
            layout=described_layout(answers[0]["meta_info"]["routed_experts_info"]),
            started_at=0.0,
        )
        for request, answers in alike
    ]
    return ProbeAnswers(rollouts, [np.concatenate([*map(_listed, answers)], axis=1) for _, answers in alike])


def _asked(url: str, ids: range) -> list[dict[str, Any]]:
    """Answers to the probe set with the log-probs of these ids."""
    requests = probe_requests()
    body = {
        "input_ids": [list(request.prompt_ids) for request in requests],
        "sampling_params": [request.all_sampling for request in requests],
        "return_logprob": True,
        "token_ids_logprob": list(ids),
        "return_routed_experts": True,
        "routed_experts_format": "packed",
    }
    posted = Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(posted) as response:
        return json.load(response)


def _said(answer: dict[str, Any]) -> str:
    """Tokens, their log-probs and rows: what a run of a prompt is known by."""
    meta = answer["meta_info"]
    return json.dumps([meta["output_token_logprobs"], meta["routed_experts_info"]["crc32"]])


def _listed(answer: dict[str, Any]) -> np.ndarray:
    return np.array([[entry[0] for entry in of_token] for of_token in answer["meta_info"]["output_token_ids_logprobs"]])


def probe(sampler: RunSampler, programs: Programs, params: Params) -> dict[str, float]:
    """Distances of `params`, which the server serves, on the probe set; names as in `distances`."""
    return distances(programs, params, batch_of([[each] for each in probe_rollouts(sampler)], width=WIDTH))


def distances(programs: Programs, params: Params, batch: Batch) -> dict[str, float]:
    """`kl` (k3, nats per token), `far` (share of ratios beyond 2) and `worst` (of one sample), replayed and free."""
    found = {}
    for name, replays in (("replayed", True), ("free", False)):
        differences = split_by_sample(scores_of(programs, params, batch, replays=replays).logprobs_BS, batch)
        served = split_by_sample(batch.sampled_BS, batch)
        distance = distance_of(served, differences)
        found |= {f"kl_{name}": distance.kl, f"far_{name}": distance.share_far, f"worst_{name}": distance.worst_sample}
    return found


def split_by_sample(values_BS: np.ndarray, batch: Batch) -> Sequence[np.ndarray]:
    """The values of every sample's sampled tokens."""
    return [values[mask] for values, mask in zip(values_BS, batch.mask_BS, strict=True)]


def agreement(batch: Batch, own_BTLK: np.ndarray) -> float:
    """Share of rows, of one token in one layer, for which the trainer's routers choose the experts that served."""
    same_BTL = (np.sort(own_BTLK, axis=-1) == np.sort(batch.rows_BTLK, axis=-1)).all(axis=-1)
    return float(same_BTL[batch.replay_BT].mean())
