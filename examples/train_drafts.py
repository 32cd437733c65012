"""Train a draft model for the calculator: an EAGLE3 head, or a layer for multi-token prediction.

    python -m examples.train_drafts --out DIRECTORY [--algorithm EAGLE3|NEXTN] [--steps 750] [--seed 0]
    python -m examples.train_drafts --measure DIRECTORY [--algorithm EAGLE3|NEXTN]

Plain JAX on the processor, some minutes. The table at the end is of answers to held-out problems: tokens per
verification with drafts drawn by the noise that the target draws with (as served), with the likeliest drafts, and with
drafts of their own noise under rejection sampling.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from examples.calculator.acceptance import accepted_lengths, table
from examples.calculator.drafting import DraftRecipe, read, train, write
from examples.calculator.eagle3 import Eagle3
from examples.calculator.export import read_weights, rounded
from examples.calculator.prediction import Prediction
from rayserve_moe.checkpoints.model_path import TRAINED

FORMS = {"EAGLE3": Eagle3, "NEXTN": Prediction}


def main() -> None:
    """Read the command line, train or not, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, help="directory to write the draft model to")
    task.add_argument("--measure", type=Path, help="directory of a trained one")
    parser.add_argument("--algorithm", choices=FORMS, default="EAGLE3")
    parser.add_argument("--steps", type=int, default=DraftRecipe.steps)
    parser.add_argument("--seed", type=int, default=DraftRecipe.seed)
    arguments = parser.parse_args()
    target, spec = read_weights(TRAINED["calculator"])
    form = FORMS[arguments.algorithm](spec)
    if arguments.measure:
        head = read(arguments.measure, form)
    else:
        recipe = replace(DraftRecipe(), steps=arguments.steps, seed=arguments.seed)
        head = rounded(train(target, form, recipe))
        write(arguments.out, head, form)
    print(table({heat: accepted_lengths(head, target, form, temperature=heat) for heat in (0.0, 0.7, 1.0)}))


if __name__ == "__main__":
    main()
