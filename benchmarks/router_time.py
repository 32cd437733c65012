"""A router's own time per request: from the bytes of a body to the replica that is chosen.

    python -m benchmarks.router_time [--replicas 4] [--repeats 200] [--model DIRECTORY]

Every body is another one; a chat goes on from turn to turn, and its replica has it cached. HTTP and Ray Serve
around it are not in these times.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, save
from benchmarks.fleet_table import router_time
from rayserve_moe.checkpoints.model_path import TRAINED
from rayserve_moe.fleet.choosing import Choosing
from rayserve_moe.fleet.page_log import ADDED, EVENTS, WEIGHTS, PageMessage
from rayserve_moe.fleet.prefix_index import PrefixIndex
from rayserve_moe.serving.prompt_reader import PromptReader
from rayserve_moe.text.tokenizer import Tokenizer

KEY = bytes(range(32))
PAGE_SIZE = 16
WORDS = ("the", "expert", "of", "a", "layer", "routes", "tokens", "to", "pages", "and", "seven", "answers", "wait")


def bodies_of_ids(num_ids: int, count: int) -> Iterator[bytes]:
    """Return bodies of as many token ids."""
    draw = np.random.default_rng(num_ids)
    for _ in range(count):
        ids = draw.integers(3, 150_000, num_ids).tolist()
        yield json.dumps({"input_ids": ids, "sampling_params": {"max_new_tokens": 8}}).encode()


def bodies_of_text(num_words: int, count: int) -> Iterator[bytes]:
    """Return bodies of one text."""
    draw = random.Random(num_words)
    for _ in range(count):
        yield json.dumps({"prompt": " ".join(draw.choices(WORDS, k=num_words)), "max_tokens": 8}).encode()


def bodies_of_chat(num_words: int, count: int) -> Iterator[bytes]:
    """Return a chat that goes on: each body has one more turn, up to `num_words` words, then comes another chat."""
    draw, messages = random.Random(num_words), []
    for _ in range(count):
        messages = messages if len(messages) < num_words // 50 else []
        messages.append({"role": "user", "content": " ".join(draw.choices(WORDS, k=50))})
        yield json.dumps({"messages": messages, "max_tokens": 8}).encode()
        messages.append({"role": "assistant", "content": " ".join(draw.choices(WORDS, k=50))})


def times_of(reader: PromptReader, bodies: Iterator[bytes], *, num_replicas: int) -> tuple[list[float], int]:
    """Return milliseconds of each request, and the median number of tokens."""
    index, names = PrefixIndex(), [str(n) for n in range(num_replicas)]
    index.follow(names)
    choosing = Choosing(index, draw=random.Random(0), clock=time.monotonic)
    for name in names:
        index.apply(name, PageMessage("epoch", 0, 0, ((WEIGHTS, 0, b"0"),)))
    times, sizes, numbers = [], [], dict.fromkeys(names, 0)
    for body in bodies:
        started = time.perf_counter()
        prompt = reader.read(body, page_size=PAGE_SIZE)
        chosen = choosing.choose(prompt, names)
        times.append(1e3 * (time.perf_counter() - started))
        sizes.append(prompt.num_tokens)
        index.apply(chosen, PageMessage("epoch", numbers[chosen], EVENTS, ((ADDED, 0, b"".join(prompt.digests)),)))
        numbers[chosen] += 1
    return times, int(statistics.median(sizes))


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--model", type=Path, help="a directory with a tokenizer; else that of the trained calculator")
    arguments = parser.parse_args()
    load_before = load_before_start()
    reader, count = PromptReader(Tokenizer(arguments.model or TRAINED["calculator"]), key=KEY), arguments.repeats
    kinds = {
        "1,000 ids": bodies_of_ids(1000, count),
        "8,000 ids": bodies_of_ids(8000, count),
        "text": bodies_of_text(1500, count),
        "a chat that goes on": bodies_of_chat(3000, count),
    }
    rows = []
    for name, bodies in kinds.items():
        times, num_tokens = times_of(reader, bodies, num_replicas=arguments.replicas)
        cuts = statistics.quantiles(times, n=100)
        rows.append({"kind": name, "num_tokens": num_tokens, "p50_ms": cuts[49], "p99_ms": cuts[98]})
    measured = {"num_replicas": arguments.replicas, "page_size": PAGE_SIZE, "rows": rows}
    save({"router_machine": machine_facts(load_before), "router_time": measured}, RESULTS / "router_time.json")
    print(router_time(measured))


if __name__ == "__main__":
    main()
