"""Conversations of several turns: prompt tokens computed against those that no earlier turn can have left cached.

    python -m benchmarks.conversations [--size tiny] [--conversations 16] [--turns 8] [--repeats 5] [--out FILE.json]

All conversations take a turn at once; the prompt of a turn is all that came before, and some new tokens.
"""

from __future__ import annotations

import argparse
import io
import time
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np

from benchmarks.conditions import RESULTS, checkpoint_of, conditions, load_before_start, note, save
from benchmarks.figures import Run
from benchmarks.table import tables
from benchmarks.workloads import FIRST_PLAIN_ID
from rayserve_moe.inprocess.engine import Engine

PAGE_SIZE = 16
NEW_PROMPT_TOKENS = (24, 120)
ANSWER_TOKENS = 24


def fewest_computed(prompt_len: int, num_known: int, *, page_size: int) -> int:
    """Return prompt tokens that a turn must compute where the first `num_known` have been computed before.

    Pages are shared whole, and the last prompt token is always computed: its logits are needed.
    """
    return prompt_len - min(num_known, prompt_len - 1) // page_size * page_size


def replay(engine: Engine, *, num_conversations: int, num_turns: int, seed: int) -> Run:
    """Play all turns; returns prompt tokens given, computed, and unavoidable, in whole pages and token by token.

    RuntimeError where the engine's own count of computed tokens is not what the answers say.
    """
    generator = np.random.default_rng(seed)
    histories: list[list[int]] = [[] for _ in range(num_conversations)]
    given = computed = ideal = ideal_unpaged = generated = 0
    before, started = engine.loop.statistics(), time.perf_counter()
    for turn in range(num_turns):
        num_known = [max(0, len(history) - 1) if turn else 0 for history in histories]
        for history in histories:
            history += _new_tokens(generator, engine.card.vocab_size)
        with redirect_stderr(io.StringIO()):
            answers = engine.generate(
                input_ids=histories, max_new_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True
            )
        for history, known, answer in zip(histories, num_known, answers, strict=True):
            given += len(history)
            computed += len(history) - answer["meta_info"]["cached_tokens"]
            ideal += fewest_computed(len(history), known, page_size=PAGE_SIZE)
            ideal_unpaged += fewest_computed(len(history), known, page_size=1)
            generated += len(answer["output_ids"])
            history += answer["output_ids"]
    seconds, after = time.perf_counter() - started, engine.loop.statistics()
    check_computed(
        int(after["tokens_computed"] - before["tokens_computed"]) - (generated - num_conversations * num_turns),
        computed,
    )
    return {
        "seconds": seconds,
        "prompt_tokens": given,
        "computed": computed,
        "ideal": ideal,
        "ideal_unpaged": ideal_unpaged,
    }


def check_computed(by_steps: int, by_answers: int) -> None:
    """Refuse answers that say that more was cached than the steps have left out."""
    if by_steps != by_answers:
        raise RuntimeError(f"steps computed {by_steps} prompt tokens, the answers say {by_answers}")


def _new_tokens(generator: np.random.Generator, vocab_size: int) -> list[int]:
    length = generator.integers(*NEW_PROMPT_TOKENS, endpoint=True)
    return generator.integers(FIRST_PLAIN_ID, vocab_size, length).tolist()


def main() -> None:
    """Measure, write the result file, print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=["tiny", "small", "mid"], default="tiny")
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1, help="devices of the engine; on a CPU, emulated ones")
    parser.add_argument("--out", type=Path, default=RESULTS / "conversations.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    path = checkpoint_of(arguments.size)
    sizes = {"num_conversations": arguments.conversations, "num_turns": arguments.turns}
    settings = {"page_size": PAGE_SIZE, "max_running_requests": arguments.conversations}
    with Engine(str(path), devices_per_host=arguments.devices, **settings) as engine:
        runs = []
        for repeat in range(arguments.repeats):
            runs.append(replay(engine, **sizes, seed=repeat))
            note(f"{repeat + 1}/{arguments.repeats}: {runs[-1]['computed'] / runs[-1]['ideal']:.4f} of the ideal")
        result = {
            **conditions(engine, size=arguments.size, repeats=arguments.repeats, load_before=load_before),
            "conversations": {**sizes, "page_size": PAGE_SIZE, "answer_tokens": ANSWER_TOKENS, "runs": runs},
        }
    save(result, arguments.out)
    print(tables(result))


if __name__ == "__main__":
    main()
