"""The KL law: with replay the trainer is near what the server samples, without it is not, for the policies of runs.

Saved policies are served one after the other; each samples the probe set, and a trainer's float32 forward pass of the
very weights that were sent scores the samples, with their rows and without.
"""

# B samples   T fed and sampled tokens   S = T - 1   N sampled tokens   V vocabulary

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from safetensors.numpy import load_file
from tqdm import tqdm

from benchmarks.markdown import markdown_table
from examples.grpo.batch import Batch, batch_of
from examples.grpo.loop import POLICIES
from examples.grpo.model import Architecture, Params, params_of
from examples.grpo.policy import score
from examples.grpo.probe import WIDTH, ProbeAnswers, probe_answers
from examples.grpo.sampler import Sampler
from rayserve_moe.rollouts.guard import FAR

RESULTS, TABLE = "kl_law.json", "kl_law.md"
LEAST_RATIO = 10.0
Distribution = Callable[[Params, np.ndarray, np.ndarray, np.ndarray], jax.Array]


@dataclass(frozen=True)
class Distance:
    """Of the trainer from the server on one probe: nats per token by k3 of the sampled tokens, and by exact KL.

    `far` is the share of tokens whose ratio is beyond 2.
    """

    k3: float
    exact: float
    far: float
    worst_sample: float


class Probe(NamedTuple):
    """One policy of one run on the probe set: the sampled tokens, and both distances."""

    run: str
    policy: str
    tokens: int
    replayed: Distance
    free: Distance


def distribution_of(architecture: Architecture) -> Distribution:
    """Return a program for log-probs [B, S, V] of all next tokens."""

    @jax.jit
    def logprobs(params: Params, ids_BT: jax.Array, rows_BTLK: jax.Array, replay_BT: jax.Array) -> jax.Array:
        logits_BTV, _ = score(params, ids_BT, rows_BTLK, replay_BT=replay_BT, architecture=architecture)
        return jax.nn.log_softmax(logits_BTV[:, :-1])

    return logprobs


def distance(answers: ProbeAnswers, batch: Batch, logprobs_BSV: np.ndarray) -> Distance:
    """Compare the log-probs of a trainer with those of the server, at the sampled tokens."""
    mask_BS = batch.mask_BS
    ours_N = np.take_along_axis(logprobs_BSV, batch.ids_BT[:, 1:, None], axis=-1)[..., 0][mask_BS].astype(np.float64)
    apart_N = ours_N - batch.sampled_BS[mask_BS]
    k3_N = np.expm1(apart_N) - apart_N
    samples_N = np.nonzero(mask_BS)[0]
    by_sample = np.bincount(samples_N, k3_N) / np.bincount(samples_N)
    theirs_NV, ours_NV = np.concatenate(answers.logprobs), logprobs_BSV[mask_BS].astype(np.float64)
    # As a sum of p log(p/q) - p + q: no term is below 0, and float32's error of the two masses is left out.
    exact_N = (np.exp(theirs_NV) * (theirs_NV - ours_NV) - np.exp(theirs_NV) + np.exp(ours_NV)).sum(axis=1)
    return Distance(
        k3=float(k3_N.mean()),
        exact=float(exact_N.mean()),
        far=float((np.abs(apart_N) > FAR).mean()),
        worst_sample=float(by_sample.max()),
    )


def measure(
    sampler: Sampler, policy: Path, *, run: str, architecture: Architecture, distribution: Distribution
) -> Probe:
    """Serve a saved policy, and probe it."""
    tensors = load_file(policy)
    sampler.serve(tensors, version=f"{run}-{policy.stem}")
    answers = probe_answers(sampler)
    batch = batch_of([[each] for each in answers.rollouts], width=WIDTH)
    params = params_of(tensors, architecture)

    def of(replays: bool) -> Distance:
        found = distribution(params, batch.ids_BT, batch.rows_BTLK, batch.replay_BT & replays)
        return distance(answers, batch, np.asarray(found))

    return Probe(run, policy.stem, batch.num_tokens, of(True), of(False))


def run_law(sampler: Sampler, runs: Sequence[Path], architecture: Architecture, *, out: Path) -> str:
    """Probe every saved policy of the runs, but for those that `out` has; returns the table, which stands there too."""
    kept = out / RESULTS
    probes = [read_probe(each) for each in json.loads(kept.read_text(encoding="utf-8"))] if kept.exists() else []
    done = {(probe.run, probe.policy) for probe in probes}
    policies = [(run, policy) for run in runs for policy in sorted((run / POLICIES).glob("*.safetensors"))]
    if not policies:
        raise ValueError(f"no saved policies in {', '.join(map(str, runs))}")
    distribution = distribution_of(architecture)
    for run, policy in tqdm(policies, unit="policy"):
        if (run.name, policy.stem) not in done:
            probe = measure(sampler, policy, run=run.name, architecture=architecture, distribution=distribution)
            probes.append(probe)
            kept.write_text(json.dumps([written(each) for each in probes], indent=1) + "\n", encoding="utf-8")
    text = law_table(probes)
    (out / TABLE).write_text(text + "\n", encoding="utf-8")
    return text


def law_table(probes: Sequence[Probe]) -> str:
    """Every probe, then all of them pooled by their tokens, and whether the law holds for these."""
    rows = [[probe.run, probe.policy, probe.tokens, *_cells(probe.replayed, probe.free)] for probe in probes]
    pooled = [_pooled([getattr(probe, name) for probe in probes], [p.tokens for p in probes]) for name in _SIDES]
    rows.append(["all", f"{len(probes)} policies", sum(probe.tokens for probe in probes), *_cells(*pooled)])
    heading = [
        "run",
        "policy",
        "tokens",
        "k3 replayed",
        "free",
        "ratio",
        "exact KL replayed",
        "free",
        "ratio",
        "far replayed",
    ]
    table = markdown_table([*heading, "free", "worst sample replayed", "free"], rows)
    ratios = pooled[1].k3 / pooled[0].k3, pooled[1].exact / pooled[0].exact
    worst = min(probes, key=lambda probe: probe.free.k3 / probe.replayed.k3)
    held = "holds" if min(ratios) >= LEAST_RATIO else "does not hold"
    return (
        f"{table}\n\nReplayed <= free / {LEAST_RATIO:g} {held}: {ratios[0]:.1f} by k3, {ratios[1]:.1f} by exact KL. "
        f"Worst probe: {worst.run} {worst.policy}, {worst.free.k3 / worst.replayed.k3:.1f} by k3."
    )


_SIDES = ("replayed", "free")


def _cells(replayed: Distance, free: Distance) -> list[str]:
    cells = []
    for name in ("k3", "exact"):
        ours, theirs = getattr(replayed, name), getattr(free, name)
        cells += [f"{ours:.1e}", f"{theirs:.1e}", f"{theirs / ours:.1f}"]
    worst = (f"{each.worst_sample:.1e}" for each in (replayed, free))
    return [*cells, f"{replayed.far:.2%}", f"{free.far:.2%}", *worst]


def _pooled(distances: Sequence[Distance], tokens: Sequence[int]) -> Distance:
    means = {
        name: float(np.average([getattr(d, name) for d in distances], weights=tokens))
        for name in ("k3", "exact", "far")
    }
    most = {name: max(getattr(d, name) for d in distances) for name in ("worst_sample",)}
    return Distance(**means, **most)


def written(probe: Probe) -> dict:
    """A probe as JSON."""
    return {**probe._asdict(), "replayed": asdict(probe.replayed), "free": asdict(probe.free)}


def read_probe(fields: dict) -> Probe:
    """A probe from JSON."""
    return Probe(**{**fields, "replayed": Distance(**fields["replayed"]), "free": Distance(**fields["free"])})
