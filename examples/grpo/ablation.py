"""All arms over several seeds with one server: what replay changes, beside controls that replay wrong rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from examples.grpo.ablation_tables import mean_rows, tables
from examples.grpo.arms import ARMS
from examples.grpo.loop import Parts, Row, Run, run_to_end
from examples.grpo.plots import draw
from examples.grpo.settings import GrpoSettings, agree

TABLE = "ablation.md"


def run_arms(parts: Parts, settings: GrpoSettings, *, num_seeds: int, out: Path) -> str:
    """Run every arm with seeds 0 .. `num_seeds` - 1, seed after seed; returns the tables, which stand in `out` too.

    Each run has a directory of its own in `out`: runs that are over are only read, and one that was cut off goes on.
    """
    runs: dict[str, list[list[Row]]] = {name: [] for name in ARMS}
    for seed in range(num_seeds):
        for name in ARMS:
            own, directory = replace(settings, arm=name, seed=seed), out / f"{name}-{seed}"
            agree(own, directory)
            runs[name].append(run_to_end(Run(parts, own, directory), report=lambda rows: None))
            text = tables(runs, max_kl=settings.max_kl)
            (out / TABLE).write_text(text + "\n", encoding="utf-8")
            shown = {name: mean_rows(of_arm) for name, of_arm in runs.items() if of_arm}
            draw(shown, title=f"GRPO on a#b=, means of up to {seed + 1} seeds", file=out / "ablation")
    return text
