"""Long conversations with routing returned turn by turn, only what is new of it, against a server without routing.

    python -m benchmarks.delta_turns [--size tiny] [--conversations 8] [--turns 100] [--repeats 5] [--out FILE.json]

All conversations take a turn at once; the prompt of a turn is all that came before, and some new tokens. The sides take
turns, one run each per repeat, each time with another one first, on the same prompts; nothing is cached when a run
starts. All sides must give the same ids, and the pieces of routing, spliced, the rows of one whole answer.
"""

from __future__ import annotations

import argparse
import io
import time
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conditions import RESULTS, checkpoint_of, conditions, load_before_start, note, save
from benchmarks.engine_runs import in_turn
from benchmarks.figures import Run, speed_ratio
from benchmarks.table import tables
from benchmarks.workloads import FIRST_PLAIN_ID
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.replay.encoding import extract_routed_experts_from_meta_info

NEW_PROMPT_TOKENS, ANSWER_TOKENS = 8, 8
TURN_TOKENS = NEW_PROMPT_TOKENS + ANSWER_TOKENS


@dataclass(frozen=True)
class Side:
    """Whether the engine captures routing, and from which position of a turn's prompt on it is asked for."""

    captures: bool
    asks: bool = False
    only_new: bool = False


SIDES = {
    "off": Side(captures=False),
    "unasked": Side(captures=True),
    "delta": Side(captures=True, asks=True, only_new=True),
    "whole": Side(captures=True, asks=True),
}


@dataclass(frozen=True)
class Played:
    """All ids of every conversation, and the answers with routing, turn by turn."""

    run: Run
    histories: list[list[int]]
    answers: list[list[dict[str, Any]]]


def play(engine: Engine, side: Side, *, num_conversations: int, num_turns: int, seed: int) -> Played:
    """Play all turns from an empty cache."""
    generator = np.random.default_rng(seed)
    shape = (num_turns, num_conversations, NEW_PROMPT_TOKENS)
    said = generator.integers(FIRST_PLAIN_ID, engine.card.vocab_size, shape).tolist()
    histories: list[list[int]] = [[] for _ in range(num_conversations)]
    kept = []
    engine.loop.flush()
    with redirect_stderr(io.StringIO()):
        started = time.perf_counter()
        for news in said:
            start = max(0, len(histories[0]) - 1) if side.only_new else 0
            prompts = [history + new for history, new in zip(histories, news, strict=True)]
            answers = engine.generate(
                input_ids=prompts,
                max_new_tokens=ANSWER_TOKENS,
                temperature=0.0,
                ignore_eos=True,
                return_routed_experts=side.asks,
                routed_experts_start_len=start,
            )
            histories = [prompt + answer["output_ids"] for prompt, answer in zip(prompts, answers, strict=True)]
            kept.append(answers if side.only_new else answers[:1])
        seconds = time.perf_counter() - started
    return Played({"seconds": seconds}, histories, kept if side.asks else [])


def check_spliced(pieces: list[list[dict[str, Any]]], whole: list[dict[str, Any]]) -> None:
    """Refuse turns whose rows, one after the other, are not those of whole answers."""
    for conversation, answer in enumerate(whole):
        joined = [extract_routed_experts_from_meta_info(turn[conversation]) for turn in pieces]
        if not np.array_equal(np.concatenate(joined), extract_routed_experts_from_meta_info(answer)):
            raise RuntimeError(f"the pieces of conversation {conversation} are not its routing")


def check_same(histories: dict[str, list[list[int]]]) -> None:
    """Refuse sides that differ in a token."""
    for side, found in histories.items():
        if found != histories["off"]:
            raise RuntimeError(f"the conversations of {side} differ from those without routing")


def compare(
    engines: dict[bool, Engine], *, repeats: int, num_conversations: int, num_turns: int
) -> dict[str, list[Run]]:
    """Play every side in turn, after an uncounted round; returns the runs by side."""
    runs: dict[str, list[Run]] = {name: [] for name in SIDES}
    sizes = {"num_conversations": num_conversations, "num_turns": num_turns}
    for repeat in range(-1, repeats):
        played = {}
        for name in in_turn(list(SIDES), repeat + 1):
            side = SIDES[name]
            played[name] = play(engines[side.captures], side, **sizes, seed=repeat + 1)
            runs[name].append(played[name].run)
        check_same({name: each.histories for name, each in played.items()})
        check_spliced(played["delta"].answers, played["whole"].answers[-1])
        note(f"{repeat + 1}/{repeats}: delta / off {speed_ratio(runs['delta'][-1:], runs['off'][-1:]).median:.4f}")
    return {name: each[1:] for name, each in runs.items()}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=["tiny", "small", "mid"], default="tiny")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1, help="devices of each engine; on a CPU, emulated ones")
    parser.add_argument("--out", type=Path, default=RESULTS / "delta_turns.json")
    return parser.parse_args()


def main() -> None:
    """Measure, write the result file, print its tables."""
    arguments = parse_arguments()
    load_before = load_before_start()
    path = checkpoint_of(arguments.size)
    sizes = {"num_conversations": arguments.conversations, "num_turns": arguments.turns}
    longest = arguments.turns * TURN_TOKENS
    settings = {
        "devices_per_host": arguments.devices,
        "max_running_requests": arguments.conversations,
        "max_model_len": longest,
        "max_step_tokens": 256,
        "num_pages": 1 + arguments.conversations * (longest // 16 + 1),
    }
    with ExitStack() as stack:
        engines = {
            captures: stack.enter_context(Engine(str(path), enable_return_routed_experts=captures, **settings))
            for captures in (False, True)
        }
        result = {
            **conditions(engines[True], size=arguments.size, repeats=arguments.repeats, load_before=load_before),
            "delta_turns": {
                **sizes,
                "turn_tokens": TURN_TOKENS,
                "runs": compare(engines, repeats=arguments.repeats, **sizes),
            },
        }
    save(result, arguments.out)
    print(tables(result))


if __name__ == "__main__":
    main()
