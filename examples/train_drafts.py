"""Train an EAGLE3 head for the calculator: a small model that drafts its answers for speculative decoding.

    python -m examples.train_drafts --out DIRECTORY [--steps 750] [--seed 0]
    python -m examples.train_drafts --measure DIRECTORY

Plain JAX on the processor, some minutes. The table at the end is of answers to held-out problems: tokens per
verification with drafts drawn by the noise that the target draws with (as served), with the likeliest drafts, and with
drafts of their own noise under rejection sampling.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from examples.calculator.acceptance import accepted_lengths, table
from examples.calculator.drafting import HeadRecipe, read_head, train_head, write_head
from examples.calculator.export import read_weights, rounded
from rayserve_moe.checkpoints.model_path import TRAINED


def main() -> None:
    """Read the command line, train or not, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, help="directory to write the head to")
    task.add_argument("--measure", type=Path, help="directory of a trained head")
    parser.add_argument("--steps", type=int, default=HeadRecipe.steps)
    parser.add_argument("--seed", type=int, default=HeadRecipe.seed)
    arguments = parser.parse_args()
    target, spec = read_weights(TRAINED["calculator"])
    if arguments.measure:
        head = read_head(arguments.measure, spec)
    else:
        head = rounded(train_head(target, spec, replace(HeadRecipe(), steps=arguments.steps, seed=arguments.seed)))
        write_head(arguments.out, head, spec)
    print(table({heat: accepted_lengths(head, target, spec, temperature=heat) for heat in (0.0, 0.7, 1.0)}))


if __name__ == "__main__":
    main()
