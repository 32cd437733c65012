"""What replaying routed experts does for a trainer: the distance between server and trainer, with and without it.

    python -m examples.replay_effect [--sharpness 1 2 3 4 6] [--seeds 3] [--out examples/replay_effect.json]

Our engine samples in bfloat16 from a random Qwen3-MoE checkpoint; the trainer is transformers in float32 on the same
weights. It runs over the samples four times: choosing experts itself (free), by the rows that the server returned
(replayed), and by wrong rows: those of the position before (shifted), those of random positions (shuffled). In float32
the engine must choose what the trainer chooses, row by row. Needs torch; writes a result file, which
`examples.replay_effect_plot` draws.

Distances are means over the sampled positions. `kl` is the exact divergence of the trainer's distribution from the
served one, over the whole vocabulary; the served one comes from the engine's own functions and weights, run over the
whole sequence under the rows that were served. `k3` is what trainers estimate from the log-probs that the server
returned: the mean of exp(d) - 1 - d over sampled tokens, where d is the trainer's log-prob minus the server's. The same
estimate between the two forms of the served distribution, `whole_run`, says how far `kl` can be trusted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.chart import Chart, Series
from benchmarks.figures import Spread, spread
from benchmarks.markdown import markdown_table
from examples.rollouts import Rollouts, Size, sample, serve, served_distributions, write_model
from examples.trainer import TIE_GAP, Trainer

VARIANTS: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray | None]] = {
    "free": lambda rows, generator: None,
    "replayed": lambda rows, generator: rows,
    "shifted": lambda rows, generator: np.concatenate([rows[:, :1], rows[:, :-1]], axis=1),
    "shuffled": lambda rows, generator: rows[:, generator.permutation(rows.shape[1])],
}
"""By name: the rows that the trainer is given for the rows [B, T, MoE layers, k] that were served."""

Distributions = Callable[[np.ndarray, np.ndarray], np.ndarray]
Distances = dict[str, dict[str, float]]


def measure(directory: Path, *, sharpness: float, seed: int, size: Size) -> dict[str, Any]:
    """All distances on one random checkpoint, and how the rows of a float32 engine compare."""
    checkpoint = write_model(directory, sharpness=sharpness, seed=seed)
    trainer = Trainer(checkpoint)
    with serve(checkpoint, dtype="bfloat16", size=size) as llm:
        rollouts = sample(llm, size, seed=seed)
        served = served_distributions(llm.engine.runner, longest=size.prompt_len + size.num_new_tokens)
        distances = distances_of(rollouts, trainer, served=served, seed=seed)
        changed = (trainer.selection(rollouts.fed_ids)[0] != rollouts.rows).any(axis=-1)
    with serve(checkpoint, dtype="float32", size=size) as llm:
        float32 = compare_rows(sample(llm, size, seed=seed), trainer)
    return {
        "sharpness": sharpness,
        "seed": seed,
        "distances": distances,
        "bfloat16_rows_that_differ": float(changed.mean()),
        "float32": float32,
    }


def distances_of(rollouts: Rollouts, trainer: Trainer, *, served: Distributions, seed: int) -> Distances:
    """Mean distances by variant, and under `whole_run` that of what `served` says from what was served."""
    generator = np.random.default_rng(seed)
    sampled = slice(rollouts.prompt_len - 1, None)
    pairs = zip(rollouts.fed_ids, rollouts.rows, strict=True)
    ours = np.stack([served(ids, rows)[sampled] for ids, rows in pairs]).astype(np.float64)
    found = {"whole_run": _estimates(ours, rollouts)}
    for name, rows_for in VARIANTS.items():
        given = rows_for(rollouts.rows, generator)
        theirs = trainer.logprobs(rollouts.fed_ids, given)[:, sampled].astype(np.float64)
        kl = (np.exp(ours) * (ours - theirs)).sum(axis=-1).mean()
        found[name] = {"kl": float(kl), **_estimates(theirs, rollouts)}
    return found


def _estimates(logprobs: np.ndarray, rollouts: Rollouts) -> dict[str, float]:
    """Distance of log-probs [B, samples, V] from the served ones, by the sampled tokens."""
    of_samples = np.take_along_axis(logprobs, rollouts.sampled_ids[..., None], axis=-1)[..., 0]
    ratios = of_samples - rollouts.logprobs
    return {"k1": float(-ratios.mean()), "k3": float((np.expm1(ratios) - ratios).mean())}


def compare_rows(rollouts: Rollouts, trainer: Trainer) -> dict[str, int]:
    """Rows (of one token in one layer) that a float32 engine and the trainer's routers choose otherwise.

    A row whose ranks tie within TIE_GAP decides nothing, and is counted apart.
    """
    rows, gaps = trainer.selection(rollouts.fed_ids)
    differs, ties = (rows != rollouts.rows).any(axis=-1), gaps < TIE_GAP
    return {
        "rows": differs.size,
        "differing": int((differs & ~ties).sum()),
        "differing_ties": int((differs & ties).sum()),
    }


def table(points: list[dict[str, Any]]) -> str:
    """Every measured checkpoint in a line."""
    rows = []
    for point in points:
        kl = {name: point["distances"][name]["kl"] for name in VARIANTS}
        k3 = {name: point["distances"][name]["k3"] for name in VARIANTS}
        float32 = point["float32"]
        rows.append(
            [
                f"{point['sharpness']:g}",
                point["seed"],
                f"{point['bfloat16_rows_that_differ']:.1%}",
                *(f"{value:.2e}" for value in kl.values()),
                f"{kl['free'] / kl['replayed']:.1f}",
                f"{kl['shifted'] / kl['replayed']:.0f}",
                f"{kl['shuffled'] / kl['replayed']:.0f}",
                f"{k3['free'] / k3['replayed']:.1f}",
                f"{float32['differing']} of {float32['rows']:,} ({float32['differing_ties']} ties)",
            ]
        )
    ratios = ["free / replayed", "shifted / replayed", "shuffled / replayed", "by k3: free / replayed"]
    heading = ["sharpness", "seed", "bf16 rows changed", *(f"KL {name}" for name in VARIANTS), *ratios]
    return markdown_table([*heading, "f32 rows that differ"], rows)


def chart(points: list[dict[str, Any]]) -> Chart:
    """Return the exact distance by sharpness, a line per variant, medians over the seeds."""
    sharpness = sorted({point["sharpness"] for point in points})

    def at(x: float, name: str) -> Spread:
        return spread(point["distances"][name]["kl"] for point in points if point["sharpness"] == x)

    series = [Series(name, [(x, at(x, name)) for x in sharpness]) for name in VARIANTS]
    title = "How far a float32 trainer is from a bfloat16 server"
    return Chart(title, "sharpness of the weights", "mean KL, nats per token", series, log_y=True)


def main() -> None:
    """Measure, write the result file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sharpness", type=float, nargs="+", default=[1.0, 2.0, 3.0, 4.0, 6.0])
    parser.add_argument("--seeds", type=int, default=3, help="random checkpoints per sharpness")
    parser.add_argument("--prompts", type=int, default=Size.num_prompts)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    size = Size(num_prompts=arguments.prompts)
    points = []
    with tempfile.TemporaryDirectory() as directory:
        for sharpness in arguments.sharpness:
            for seed in range(arguments.seeds):
                points.append(measure(Path(directory), sharpness=sharpness, seed=seed, size=size))
                free, replayed = (points[-1]["distances"][name]["kl"] for name in ("free", "replayed"))
                print(f"sharpness {sharpness:g}, seed {seed}: KL {free:.2e} -> {replayed:.2e}", file=sys.stderr)
    result = {"size": asdict(size), "points": points}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(points))
    ratios = [p["distances"]["free"]["kl"] / p["distances"]["replayed"]["kl"] for p in points]
    print(f"\nReplay brings the trainer {statistics.median(ratios):.1f} times as close, in the median checkpoint.")


if __name__ == "__main__":
    main()
