"""How far the trainer is from the server on a fixed set of long, uncertain samples, with replay and without."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from examples.grpo.batch import Batch, batch_of
from examples.grpo.model import Params
from examples.grpo.sampler import Sampler
from examples.grpo.tasks import probe_prompts
from examples.grpo.trainer import Programs, scores_of
from rayserve_moe.rollouts import Rollout
from rayserve_moe.rollouts.answers import SampleRequest
from rayserve_moe.rollouts.guard import distance_of

NUM_PROMPTS, NUM_TOKENS, WIDTH = 200, 24, 34


def probe_rollouts(sampler: Sampler) -> list[Rollout]:
    """Sample every prompt of the probe set once, past the end of its answer."""
    sampling = {"max_new_tokens": NUM_TOKENS, "temperature": 1.0, "ignore_eos": True}
    requests = [
        SampleRequest(f"probe/{number}", list(prompt.encode()), sampling, seed=number)
        for number, prompt in enumerate(probe_prompts(NUM_PROMPTS))
    ]
    return [rollout for group in sampler.sample(requests) for rollout in group]


def probe(sampler: Sampler, programs: Programs, params: Params) -> dict[str, float]:
    """Distances of `params`, which the server serves, on the probe set; names as in `distances`."""
    return distances(programs, params, batch_of(probe_rollouts(sampler), width=WIDTH))


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
