"""What experts in int8 change of what the calculator says: KL of its tokens, other sets of experts, right answers.

    python -m benchmarks.int8_experts [--problems 100]

Held-out problems with their answers, every token after those before it, computed by XLA on one CPU device. All is held
to float32 with float32 experts: the model in bfloat16, and experts in int8 beneath either.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from benchmarks.markdown import markdown_table
from examples.calculator.accuracy import TASKS
from examples.calculator.problems import Problem, held_out_problems
from rayserve_moe.checkpoints.model_path import TRAINED
from rayserve_moe.text.tokenizer import Tokenizer
from tests.support.logits import prompt_outputs_of
from tests.support.runners import new_runner

CALCULATOR = TRAINED["calculator"]
WAYS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "float32, experts int8": {"dtype": "float32", "expert_dtype": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, experts int8": {"dtype": "bfloat16", "expert_dtype": "int8"},
}
LONGEST = 32


def outputs_of(problems: list[Problem], way: Mapping[str, str]) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
    """Of each problem: log-probs [T, V], sets of experts [M, T, K], and whether its answer is what is likeliest."""
    runner, tokenizer = new_runner(CALCULATOR, cpu_kernels="off", num_pages=16, **way), Tokenizer(CALCULATOR)
    runner.load()
    compute = prompt_outputs_of(runner, longest=LONGEST)
    for problem in problems:
        ids = tokenizer.encode(problem.prompt + problem.answers[0])
        logits_TV, experts_MTK = compute(ids)
        num_answer = len(ids) - len(tokenizer.encode(problem.prompt))
        is_right = (logits_TV[:-1].argmax(-1) == ids[1:])[-num_answer:].all()
        yield np.asarray(jax.nn.log_softmax(logits_TV, axis=-1)), np.sort(experts_MTK, axis=-1), bool(is_right)


def measure(num_problems: int) -> dict[str, dict[str, float]]:
    """By way: mean and largest KL to float32 in nats, shares of other likeliest tokens and sets, and of right answers.

    `num_problems` of each task, at most.
    """
    problems = [problem for task in TASKS for problem in held_out_problems(task, limit=num_problems)]
    exact, found = list(outputs_of(problems, WAYS["float32"])), {}
    for name, way in WAYS.items():
        pairs = list(zip(exact, outputs_of(problems, way), strict=True))
        kl = np.concatenate([(np.exp(one[0]) * (one[0] - other[0])).sum(-1) for one, other in pairs])
        tokens = np.concatenate([one[0].argmax(-1) != other[0].argmax(-1) for one, other in pairs])
        sets = np.concatenate([(one[1] != other[1]).any(-1).reshape(-1) for one, other in pairs])
        found[name] = {
            "mean_kl": float(kl.mean()),
            "largest_kl": float(kl.max()),
            "other_tokens": float(tokens.mean()),
            "other_sets": float(sets.mean()),
            "right": float(np.mean([other[2] for _, other in pairs])),
            "tokens": len(kl),
            "token_layers": len(sets),
        }
    return found


def as_table(found: Mapping[str, Mapping[str, float]]) -> str:
    """A row for each way."""
    titles = [
        "computed in",
        "mean KL",
        "largest KL",
        "other likeliest tokens",
        "other sets of experts",
        "right answers",
    ]
    rows = [
        [name, f"{of['mean_kl']:.1e}", f"{of['largest_kl']:.1e}", *(f"{of[key]:.2%}" for key in SHARES)]
        for name, of in found.items()
    ]
    return markdown_table(titles, rows)


SHARES = ("other_tokens", "other_sets", "right")


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=100, help="of each task (default: 100)")
    print(as_table(measure(parser.parse_args().problems)))


if __name__ == "__main__":
    main()
