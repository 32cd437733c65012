"""Durations of text over published tokenizers: opening, the table for grammars, grammars, masks, streamed tokens.

    make published && python -m benchmarks.published_text [--tokens 20000] [--out FILE.json]

A grammar is a JSON schema as clients send it. Its duration excludes the tokenizer's table. Masks follow random allowed
tokens. A stream decodes a text id by id. Grammars, masks and tokens have p50 and p99.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, save
from benchmarks.table import tables
from rayserve_moe.config.settings import StructuredSettings
from rayserve_moe.constraints.compiler import grammar_of
from rayserve_moe.constraints.matchers import built_matcher
from rayserve_moe.engine.guides import vocabulary_of
from rayserve_moe.requests.records import Constraint
from rayserve_moe.text.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.support.text.published_tokenizers import NAMES, folder_of, is_there
from tests.support.text.tokenizer_laws import texts

NUM_GRAMMARS, MAX_ANSWER = 100, 200


def schema(number: int) -> dict[str, Any]:
    """Return a schema of nested objects and lists that only this number has."""
    item = {
        "type": "object",
        "properties": {f"name_{number}": {"type": "string", "maxLength": 20}, "price": {"type": "number"}},
        "required": [f"name_{number}", "price"],
    }
    order = {"kind": {"enum": ["open", "paid", "sent"]}, "items": {"type": "array", "items": item, "maxItems": 4}}
    return {"type": "object", "properties": order, "required": ["kind", "items"], "additionalProperties": False}


def measured(tokenizer_of: Callable[[], Tokenizer], *, num_tokens: int) -> dict[str, Any]:
    """Return the figures of a tokenizer: number of ids, seconds, and [p50, p99] in milliseconds or microseconds."""
    begun = time.perf_counter()
    tokenizer = tokenizer_of()
    opened = time.perf_counter()
    table = vocabulary_of(tokenizer, tokenizer.vocab_size, eos_ids=tokenizer.eos_token_ids).tokens()
    built = time.perf_counter()
    limits, generator = StructuredSettings(), np.random.default_rng(0)
    built_ms, mask_us = [], []
    for number in range(NUM_GRAMMARS):
        constraint = Constraint("json_schema", json.dumps(schema(number)), "json")
        start = time.perf_counter()
        matcher = built_matcher(table, grammar_of(constraint, limits=limits))
        built_ms.append(1e3 * (time.perf_counter() - start))
        assert not matcher.is_error(), matcher.get_error()
        for _ in range(MAX_ANSWER):
            if matcher.is_stopped():
                break
            start = time.perf_counter()
            mask = matcher.compute_bitmask()
            mask_us.append(1e6 * (time.perf_counter() - start))
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
            assert matcher.consume_token(int(generator.choice(allowed))), matcher.get_error()
    return {
        "ids": tokenizer.vocab_size,
        "open_s": round(opened - begun, 2),
        "table_s": round(built - opened, 2),
        "grammar_ms": spread(built_ms),
        "mask_us": spread(mask_us),
        "token_us": spread(token_durations(tokenizer, num_tokens)),
    }


def token_durations(tokenizer: Tokenizer, count: int) -> list[float]:
    """Return the microseconds of each token of a stream of random texts."""
    ids = [token_id for text in texts(count // 4, seed=11) for token_id in tokenizer.encode(text)][:count]
    detokenizer, found = IncrementalDetokenizer(tokenizer), []
    for token_id in ids:
        start = time.perf_counter()
        detokenizer.push(token_id)
        found.append(1e6 * (time.perf_counter() - start))
    return found


def spread(values: Iterable[float]) -> list[float]:
    """Return p50 and p99."""
    return [round(float(value), 2) for value in np.percentile(list(values), [50, 99])]


def main() -> None:
    """Measure every fetched tokenizer, save the result and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=RESULTS / "published_text.json")
    arguments = parser.parse_args()
    load = load_before_start()
    found = {
        name: measured(lambda name=name: Tokenizer(folder_of(name)), num_tokens=arguments.tokens)
        for name in NAMES
        if is_there(name)
    }
    result = {"published_text": found, "facts": machine_facts(load)}
    save(result, arguments.out)
    print(tables(result))


if __name__ == "__main__":
    main()
