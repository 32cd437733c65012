"""Pushes of adapters while sequences decode by them: gaps between steps, memory, and the adapters that answers name.

    python -m benchmarks.adapter_pushes [--size small] [--pushes 1000] [--streams 16] [--every 0.2] [--out FILE.json]

A trainer pushes adapters with different bytes under one name while many streams send one request after another. Then
one request in twenty is repeated alone with the adapter that its answer named; the ids must be equal. A run of 1,000
pushes takes about six minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.adapters import write_adapter
from benchmarks.conditions import RESULTS, checkpoint_of, conditions, load_before_start, note, save
from benchmarks.engine_runs import SequenceGaps, StepStarts
from benchmarks.markdown import markdown_table
from benchmarks.workloads import FIRST_PLAIN_ID
from rayserve_moe.cluster.startup_memory import freeze_what_stays
from rayserve_moe.inprocess.engine import Engine

NAME, RANK, NUM_NEW = "run", 16, 64
PROMPT_LENGTHS = (8, 40)
REPEATED = 20
"""One request in this many is repeated."""
TENSORS = "adapter_model.safetensors"


def pushed(base: Path, directory: Path, *, number: int) -> Path:
    """Write the adapter of a push: the base with random values in one matrix B."""
    directory.mkdir(exist_ok=True)
    tensors = load_file(base / TENSORS)
    name = next(name for name in tensors if "lora_B" in name)
    tensors[name] = np.random.default_rng(number).normal(0, 0.05, tensors[name].shape).astype(np.float32)
    save_file(tensors, directory / TENSORS)
    (directory / "adapter_config.json").write_bytes((base / "adapter_config.json").read_bytes())
    return directory


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def load(engine: Engine, path: Path, name: str = NAME) -> str:
    """Load an adapter; return its key. Raises RuntimeError if it is refused."""
    outcome = engine.load_lora_adapter(path, lora_name=name)
    if not outcome.success:
        raise RuntimeError(outcome.message)
    return outcome.message.partition(" ")[0]


def ask(engine: Engine, prompt: list[int], name: str = NAME) -> tuple[list[int], list[str]]:
    """Return the ids and the weight versions of an answer."""
    answer: Any = engine.generate(
        input_ids=prompt, lora_path=name, temperature=0.0, max_new_tokens=NUM_NEW, ignore_eos=True
    )
    return answer["output_ids"], [span["version"] for span in answer["meta_info"]["weight_versions"]]


def answered(engine: Engine, stop: threading.Event, *, seed: int) -> list[tuple[np.ndarray, np.ndarray, list[str]]]:
    """Send one request after another; return prompts, ids and versions.

    Ids are arrays: lists take ten times the memory, which would look like a leak of the server.
    """
    random, found = np.random.default_rng(seed), []
    while not stop.is_set():
        length = random.integers(*PROMPT_LENGTHS)
        prompt = random.integers(FIRST_PLAIN_ID, engine.card.vocab_size, length, np.int32)
        ids, versions = ask(engine, prompt.tolist())
        found.append((prompt, np.asarray(ids, np.int32), versions))
    return found


def measure(engine: Engine, base: Path, folder: Path, *, asked: argparse.Namespace) -> dict[str, Any]:
    """Push adapters while streams run; return the figures.

    Raises: RuntimeError if an answer does not come from the adapter that it names.
    """
    starts, stop, held, memory = StepStarts(engine), threading.Event(), list[float](), list[int]()
    in_steps = SequenceGaps(engine)
    numbers = {load(engine, pushed(base, folder / "pushed", number=0)): 0}
    with ThreadPoolExecutor(asked.streams) as pool:
        streams = [pool.submit(answered, engine, stop, seed=seed) for seed in range(asked.streams)]
        begun = time.perf_counter()
        time.sleep(5.0)
        quiet = starts.gaps(begun, time.perf_counter())
        seconds, gaps = list[float](), list[float]()
        try:
            for number in range(1, asked.pushes + 1):
                path = pushed(base, folder / "pushed", number=number)
                at = time.perf_counter()
                numbers[load(engine, path)] = number
                seconds.append(time.perf_counter() - at)
                time.sleep(asked.every)
                gaps += starts.gaps(at, time.perf_counter())
                held.append(engine.loop.statistics()["adapters_loaded"])
                if number % max(1, asked.pushes // 20) == 0:
                    memory.append(resident_bytes())
                    note(f"{number}/{asked.pushes} {memory[-1] / 1e9:.3f} GB {max(held):.0f} held")
        finally:
            stop.set()
        answers = [answer for stream in streams for answer in stream.result()]
    return {
        "pushes": asked.pushes,
        "streams": asked.streams,
        "answers": len(answers),
        "asked_again": check(engine, answers, numbers, lambda number: pushed(base, folder / "again", number=number)),
        "generations_named": len({versions[0] for *_, versions in answers}),
        "push_s": statistics.median(seconds),
        "quiet_step_s": statistics.median(quiet),
        "quiet_gaps": max(quiet) / statistics.median(quiet),
        "step_s": statistics.median(gaps),
        "gaps": [value / statistics.median(gaps) for value in np.quantile(gaps, (0.5, 0.99, 0.999, 1.0))],
        "gaps_in_steps": {str(steps): count for steps, count in sorted(in_steps.counts.items())},
        "steps": len(gaps),
        "max_held": max(held),
        "memory_bytes": memory,
    }


def check(engine: Engine, answers: list[Any], numbers: dict[str, int], write: Callable[[int], Path]) -> int:
    """Repeat some requests with the adapters that their answers named; return their number.

    Raises: RuntimeError if an answer does not name one push, or if the repeated answer has other ids.
    """
    count = 0
    for place, (prompt, ids, versions) in enumerate(answers):
        key = versions[0].partition("+")[2]
        if len(versions) != 1 or key not in numbers:
            raise RuntimeError(f"an answer names {versions}")
        if place % REPEATED == 0:
            count += 1
            load(engine, write(numbers[key]), "again")
            if ask(engine, prompt.tolist(), "again")[0] != ids.tolist():
                raise RuntimeError(f"the ids of an answer differ from the ids of {key}")
    return count


def adapter_pushes(found: dict[str, Any]) -> str:
    """Return a table of a run."""
    memory, gaps = found["memory_bytes"], found["gaps"]
    rows = [
        ["pushes, streams", f"{found['pushes']}, {found['streams']}"],
        ["answers, generations that they name", f"{found['answers']}, {found['generations_named']}"],
        ["answers asked again by the bytes that they name, all equal", str(found["asked_again"])],
        ["a push, median", f"{found['push_s'] * 1e3:.0f} ms"],
        ["a step without pushes, with", f"{found['quiet_step_s'] * 1e3:.1f}, {found['step_s'] * 1e3:.1f} ms"],
        ["longest gap over a median step: without pushes, with", f"{found['quiet_gaps']:.1f}, {gaps[-1]:.1f}"],
        ["steps between two tokens of a sequence, at most", max(found["gaps_in_steps"], key=int)],
        ["adapters in host memory, at most", f"{found['max_held']:.0f}"],
        ["memory after a tenth of the pushes, at the end", f"{memory[1] / 1e9:.2f}, {memory[-1] / 1e9:.2f} GB"],
    ]
    return markdown_table(["measured", "seen"], rows)


def main() -> None:
    """Measure, save, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="small", help="synthetic preset (default: small)")
    parser.add_argument("--pushes", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--every", type=float, default=0.2, help="seconds between two pushes")
    parser.add_argument("--out", type=Path, default=RESULTS / "adapter_pushes.json")
    asked = parser.parse_args()
    load_before, checkpoint = load_before_start(), checkpoint_of(asked.size)
    settings: dict[str, Any] = {
        "max_running_requests": asked.streams,
        "precompile_bs_paddings": [asked.streams],
        "max_step_tokens": 128,
        "max_model_len": 256,
        "num_pages": 400,
        "structured_output": False,
        "max_loras": 8,
        "max_lora_rank": RANK,
    }
    with tempfile.TemporaryDirectory() as folder, Engine(str(checkpoint), **settings) as engine:
        base = write_adapter(checkpoint, Path(folder) / "base", rank=RANK, seed=0)
        freeze_what_stays()  # as replicas do: otherwise a full garbage collection stops the steps for 0.1 s
        result = conditions(engine, size=asked.size, repeats=1, load_before=load_before)
        result["adapter_pushes"] = measure(engine, base, Path(folder), asked=asked)
    save(result, asked.out)
    print(adapter_pushes(result["adapter_pushes"]))


if __name__ == "__main__":
    main()
