"""What structured output costs: tokens per second of 16 streams with and without constraints, in one engine by turns.

    python -m benchmarks.structured calculator|bytes|typical|random [--repeats 5] [--tokens 256] [--out FILE.json]

`calculator` is that model under a schema, `bytes` a random one of 114 M with a vocabulary as small. `typical`
has 131,072 ids and writes JSON as it is usual; to `random`, with the same vocabulary, every token is alike. A result
file keeps those that were measured before.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.engine_runs import in_turn
from benchmarks.table import tables
from benchmarks.typical_json import SCHEMA, write_typical
from rayserve_moe import Engine
from rayserve_moe.checkpoints.model_path import TRAINED_PREFIX
from rayserve_moe.checkpoints.synthetic import PRESETS, write_checkpoint
from rayserve_moe.checkpoints.synthetic_tokenizer import MIN_VOCAB_SIZE
from rayserve_moe.config.load import default_cache_directory

NUM_STREAMS = 16
SETTINGS: dict[str, Any] = {
    "max_running_requests": NUM_STREAMS,
    "precompile_bs_paddings": [NUM_STREAMS],
    "max_step_tokens": 128,
    "num_pages": 800,
    "enable_prefix_caching": False,
}
TEXTS = {
    "calculator": "the calculator's (1 M)",
    "bytes": "random bytes (114 M)",
    "typical": "JSON as it is usual (135 M)",
    "random": "random tokens (135 M)",
}
SIDES = {"plain": 0, "constrained": NUM_STREAMS, "mixed": NUM_STREAMS // 2}
CLOCK = ("steps", "schedule_s", "pack_s", "transport_s", "device_s", "commit_s", "mask_s")


def model_of(name: str) -> str:
    """Return the path of a model, written now if it is missing."""
    if name == "calculator":
        return f"{TRAINED_PREFIX}calculator"
    path = Path(default_cache_directory()) / f"structured-{name}"
    if name == "bytes":
        return str(write_checkpoint(path, replace(PRESETS["small"], vocab_size=MIN_VOCAB_SIZE)))
    if not (path / "tokenizer.json").exists():
        write_typical(path, is_random=name == "random")
    return str(path)


def run(engine: Engine, prompt: list[int], *, num_constrained: int, num_tokens: int, seed: int) -> dict[str, float]:
    """Run a batch in which some streams keep to SCHEMA."""
    plain = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True}
    sampling = [
        plain
        | {"sampling_seed": seed + place}
        | ({"json_schema": json.dumps(SCHEMA)} if place < num_constrained else {})
        for place in range(NUM_STREAMS)
    ]
    before, started = engine.loop.statistics(), time.perf_counter()
    answers = engine.generate(input_ids=[prompt] * NUM_STREAMS, sampling_params=sampling)
    seconds, after = time.perf_counter() - started, engine.loop.statistics()
    counts = {answer["meta_info"]["completion_tokens"] for answer in answers}
    assert counts == {num_tokens}, f"answers have {counts} tokens: {answers[0]['text'][-200:]}"
    clock = {name: after[name] - before[name] for name in CLOCK}
    return {"seconds": seconds, "tokens_s": NUM_STREAMS * num_tokens / seconds, **clock}


def measure(engine: Engine, *, repeats: int, num_tokens: int) -> tuple[dict[str, list[dict[str, float]]], str]:
    """Measure all sides in turn after an uncounted turn; also return the beginning of a constrained answer."""
    prompt = engine.tokenizer.encode("[{")
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for repeat in range(-1, repeats):
        for side in in_turn(list(runs), repeat + 1):
            asked = {"num_constrained": SIDES[side], "num_tokens": num_tokens, "seed": 100 * repeat}
            runs[side].append(run(engine, prompt, **asked))
        note(", ".join(f"{side} {each[-1]['tokens_s']:.0f} tokens/s" for side, each in runs.items()))
    one = {"max_new_tokens": 64, "temperature": 1.0, "sampling_seed": 1, "json_schema": json.dumps(SCHEMA)}
    text = engine.generate(input_ids=prompt, sampling_params=one)["text"]
    return {side: each[1:] for side, each in runs.items()}, text


def main() -> None:
    """Measure one of the texts, print the table, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", choices=TEXTS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, default=RESULTS / "structured_output.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    with Engine(model_of(arguments.text), max_model_len=arguments.tokens + 64, **SETTINGS) as engine:
        runs, text = measure(engine, repeats=arguments.repeats, num_tokens=arguments.tokens)
        num_ids, dtype = engine.card.vocab_size, str(engine.runner.served.dtype)
    result = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    measured = {
        "text": TEXTS[arguments.text],
        "ids": num_ids,
        "dtype": dtype,
        "tokens": NUM_STREAMS * arguments.tokens,
        "begins": text,
        "runs": runs,
        "facts": machine_facts(load_before),
    }
    result["structured_output"] = result.get("structured_output", {}) | {arguments.text: measured}
    save(result, arguments.out)
    print(tables({"structured_output": {arguments.text: measured}}))


if __name__ == "__main__":
    main()
