"""What experts in 8 bits change of what a model says: KL of its tokens, other sets of experts, right answers.

    python -m benchmarks.int8_experts [--problems 100] [--sequences 8] [--only WAY] [--out FILE.json]

Of the calculator held-out problems with their answers, of a random model of 972 M parameters random tokens; every token
after those before it, computed by XLA on one CPU device. All is held to the same model in bfloat16. Scales are those of
columns, or of squares of 128, as a checkpoint holds them; a matrix of the calculator is less than one such square.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np

from benchmarks.conditions import RESULTS, checkpoint_of, note, save
from benchmarks.narrow_table import narrow_experts as as_table
from benchmarks.workloads import FIRST_PLAIN_ID
from examples.calculator.accuracy import TASKS
from examples.calculator.problems import held_out_problems
from rayserve_moe.checkpoints.model_path import TRAINED
from rayserve_moe.text.tokenizer import Tokenizer
from tests.support.engine.host_runners import new_runner
from tests.support.experts.quantized_experts import stored_in_blocks
from tests.support.models.full_logits import prompt_outputs_of

CALCULATOR, RANDOM = TRAINED["calculator"], "mid"
LONGEST = 64
KEY = "narrow_experts"
BFLOAT16 = {"dtype": "bfloat16"}
ROWS_TOO = {"expert_dtype": "fp8", "expert_products": "fp8"}
"""Settings for products of two operands of 8 bits."""
WAYS: dict[str, tuple[dict[str, str], str]] = {
    "float32": ({"dtype": "float32"}, ""),
    "int8, a scale per column": (BFLOAT16 | {"expert_dtype": "int8"}, ""),
    "int8, a scale per 128 x 128": (BFLOAT16 | {"expert_dtype": "int8"}, "int8"),
    "fp8, a scale per column": (BFLOAT16 | {"expert_dtype": "fp8"}, ""),
    "fp8, a scale per 128 x 128": (BFLOAT16 | {"expert_dtype": "fp8"}, "float8_e4m3fn"),
    "fp8 and rows too, a scale per column": (BFLOAT16 | ROWS_TOO, ""),
    "fp8 and rows too, a scale per 128 x 128": (BFLOAT16 | ROWS_TOO, "float8_e4m3fn"),
}
"""Settings, and the dtype of 8 bits that the checkpoint holds experts in, by squares; empty: its own."""

Sequence = tuple[list[int], int]
"""Tokens, and how many of the last ones are an answer that may be right."""
Outputs = tuple[np.ndarray, np.ndarray, bool]


def problems_of(num_problems: int) -> list[Sequence]:
    """Return at most a number of problems of each task, with their answers."""
    tokenizer, found = Tokenizer(CALCULATOR), []
    for problem in (each for task in TASKS for each in held_out_problems(task, limit=num_problems)):
        ids = tokenizer.encode(problem.prompt + problem.answers[0])
        found.append((ids, len(ids) - len(tokenizer.encode(problem.prompt))))
    return found


def outputs_of(path: Path, sequences: list[Sequence], settings: dict[str, str]) -> Iterator[Outputs]:
    """Return for each sequence log-probs [T, V], sets of experts [M, T, K], and if its answer is the likeliest."""
    runner = new_runner(path, cpu_kernels="off", num_pages=16, **settings)
    runner.load()
    compute = prompt_outputs_of(runner, longest=max(len(ids) for ids, _ in sequences))
    for ids, num_answer in sequences:
        logits_TV, experts_MTK = compute(ids)
        is_right = (logits_TV[:-1].argmax(-1) == ids[1:])[len(ids) - 1 - num_answer :].all()
        yield np.asarray(jax.nn.log_softmax(logits_TV, axis=-1)), np.sort(experts_MTK, axis=-1), bool(is_right)


def measure(path: Path, sequences: list[Sequence], ways: list[str]) -> dict[str, dict[str, float]]:
    """Return by way: mean and largest KL from bfloat16 in nats, shares of other top tokens and sets, right answers."""
    exact, found = list(outputs_of(path, sequences, BFLOAT16)), {}
    found["bfloat16"] = _next_to(exact, iter(exact))
    for name in ways:
        settings, stored = WAYS[name]
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model = stored_in_blocks(path, folder / "model", stored) if stored else path
            found[name] = _next_to(exact, outputs_of(model, sequences, settings))
        note(f"{name}: mean KL {found[name]['mean_kl']:.1e}")
    return found


def _next_to(exact: list[Outputs], others: Iterator[Outputs]) -> dict[str, float]:
    kl, tokens, sets, right = [], [], [], []
    for (log_probs, experts, _), (other_probs, other_experts, is_right) in zip(exact, others, strict=True):
        kl.append((np.exp(log_probs) * (log_probs - other_probs)).sum(-1))
        tokens.append(log_probs.argmax(-1) != other_probs.argmax(-1))
        sets.append((experts != other_experts).any(-1).reshape(-1))
        right.append(is_right)
    all_kl, all_sets = np.concatenate(kl), np.concatenate(sets)
    return {
        "mean_kl": float(all_kl.mean()),
        "largest_kl": float(all_kl.max()),
        "other_tokens": float(np.concatenate(tokens).mean()),
        "other_sets": float(all_sets.mean()),
        "right": float(np.mean(right)),
        "tokens": len(all_kl),
        "token_layers": len(all_sets),
    }


def main() -> None:
    """Measure, write the result file, print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=100, help="of each task (default: 100)")
    parser.add_argument("--sequences", type=int, default=8, help=f"of {LONGEST} random tokens (default: 8; 0: none)")
    parser.add_argument(
        "--only", choices=list(WAYS), action="append", help="ways to measure; others stay (default: all)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "narrow_experts.json")
    chosen = parser.parse_args()
    found = json.loads(chosen.out.read_text(encoding="utf-8"))[KEY] if chosen.only else {}
    ways = chosen.only or list(WAYS)

    def add(model: str, path: Path, sequences: list[Sequence]) -> None:
        found[model] = found.get(model, {}) | measure(path, sequences, ways)
        save({KEY: found}, chosen.out)

    add("calculator", CALCULATOR, problems_of(chosen.problems))
    if chosen.sequences:
        generator = np.random.default_rng(0)
        ids = generator.integers(FIRST_PLAIN_ID, 16384, (chosen.sequences, LONGEST))
        add("random, 972 M", checkpoint_of(RANDOM), [(row, 0) for row in ids.tolist()])
    print(as_table(found))


if __name__ == "__main__":
    main()
