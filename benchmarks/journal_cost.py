"""What keeping requests in the journal costs: tokens per second of streams that it keeps, and of others, in turn.

    python -m benchmarks.journal_cost [--size small] [--streams 16] [--tokens 128] [--pairs 7] [--out FILE.json]

One server and one journal, each a process beside the clients'; streams are kept where they have a `rid`. Their rows of
routing are not asked for. Bytes per token are those of the journal's records, from its own count.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conditions import RESULTS, checkpoint_of, conditions, load_before_start, note, save
from benchmarks.engine_runs import in_turn
from benchmarks.http_streams import StreamClients
from benchmarks.serve_process import HOST
from rayserve_moe.config.load import inherited_environment
from rayserve_moe.fleet.journal_client import JournalClient
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from tests.support.cluster.ports import free_port
from tests.support.serving.http_server import running

PROMPT_TOKENS = 64


@contextmanager
def journal_process() -> Iterator[JournalClient]:
    """Yield a journal in a process of its own, and a replica's connection to it."""
    port, key = free_port(), secrets.token_hex(16)
    environment = {**inherited_environment(), "RAYSERVE_MOE_JOURNAL_KEY": key}
    command = [sys.executable, "-m", "rayserve_moe.fleet.journal", f"--port={port}"]
    with subprocess.Popen(command, env=environment) as process:
        client = JournalClient((HOST, port), key=key.encode(), wait_s=60.0)
        try:
            yield client
        finally:
            client.link.stop()
            process.terminate()


def measure(engine: Engine, journal: JournalClient, *, streams: int, tokens: int, pairs: int) -> dict[str, Any]:
    """Return tokens per second of both sides, in pairs of alternating order after an uncounted one; bytes per token."""
    rates: dict[str, list[float]] = {"off": [], "on": []}
    kept_bytes: list[float] = []
    state = ApiState(engine.loop, engine.tokenizer, journal=journal)
    with running(create_api(state)) as url, StreamClients(int(url.rpartition(":")[2])) as clients:
        for pair in range(-1, pairs):
            draw = np.random.default_rng(pair + 1)
            prompts = draw.integers(5, engine.card.vocab_size, (streams, PROMPT_TOKENS)).tolist()
            for side in in_turn(list(rates), pair + 1):
                engine.flush_cache()
                before = journal.statistics()["bytes"]
                name = f"pair {pair}" if side == "on" else ""
                run = clients.run(prompts, tokens, name=name)
                rates[side].append(run["num_new_tokens"] / run["seconds"])
                if side == "on":
                    kept_bytes.append((journal.statistics()["bytes"] - before) / run["num_new_tokens"])
            note(f"pair {pair + 1}/{pairs}: {rates['off'][-1]:.0f} tokens/s without, {rates['on'][-1]:.0f} with")
    counted = {side: values[1:] for side, values in rates.items()}
    ratios = [on / off for on, off in zip(counted["on"], counted["off"], strict=True)]
    return {
        "tokens_per_s": counted,
        "median_ratio": statistics.median(ratios),
        "ratios": ratios,
        "bytes_per_token": statistics.median(kept_bytes[1:]),
    }


def main() -> None:
    """Measure, write the result file, print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=["tiny", "small", "mid"], default="small")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "journal_cost.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    settings = {"max_running_requests": arguments.streams, "max_model_len": 1024}
    how = {"streams": arguments.streams, "tokens": arguments.tokens, "pairs": arguments.pairs}
    with Engine(str(checkpoint_of(arguments.size)), **settings) as engine, journal_process() as journal:
        found = measure(engine, journal, **how)
        about = conditions(engine, size=arguments.size, repeats=arguments.pairs, load_before=load_before)
    save({**about, **how, **found}, arguments.out)
    print(f"tokens/s with / without: {found['median_ratio']:.3f}; {found['bytes_per_token']:.0f} bytes a token")


if __name__ == "__main__":
    main()
