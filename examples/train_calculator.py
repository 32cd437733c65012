"""Train the calculator: a small Qwen3-MoE that answers `37+45=` with `82`. It is the checkpoint of `make serve`.

    python -m examples.train_calculator --out DIRECTORY [--steps 2600] [--seed 0]
    python -m examples.train_calculator --measure DIRECTORY

Plain JAX on the processor, some ten minutes on two idle cores. A tenth of all problems is held out by a fixed hash;
the table at the end counts right answers among those. `--measure` makes the table for a directory that exists.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from examples.calculator.accuracy import accuracy_by_task, table
from examples.calculator.export import model_spec, read_weights, rounded, write_directory
from examples.calculator.training import Recipe, train


def main() -> None:
    """Read the command line, train or not, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, help="directory to write the checkpoint to")
    task.add_argument("--measure", type=Path, help="directory of a trained checkpoint")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    arguments = parser.parse_args()
    if arguments.measure:
        weights, spec = read_weights(arguments.measure)
    else:
        spec = model_spec()
        weights = rounded(train(spec, replace(Recipe(), steps=arguments.steps, seed=arguments.seed)))
        write_directory(arguments.out, weights)
    print(table(accuracy_by_task(weights, spec)))


if __name__ == "__main__":
    main()
