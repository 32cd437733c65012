"""Other weights while sequences decode: how long an update takes, and the longest that no step began meanwhile.

    python -m benchmarks.weight_updates [--size small] [--sequences 8] [--repeats 5] [--devices 1] [--out FILE.json]

Two checkpoints of one model take turns. They wait on the devices beside those that serve, or, as where there is no room
for both, in host memory; both ways take turns, with a stretch without updates before each.
"""

from __future__ import annotations

import argparse
import statistics
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.conditions import RESULTS, checkpoint_of, conditions, load_before_start, note, save
from benchmarks.engine_runs import StepStarts
from benchmarks.figures import Run
from benchmarks.table import tables
from benchmarks.workloads import FIRST_PLAIN_ID
from rayserve_moe.checkpoints.synthetic import ensure_checkpoint
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.requests.records import GenerationRequest, SamplingParams

PLACES = {"devices": None, "host": 0}
"""Places where new weights wait, with the spare device memory that leads to them; None: the actual spare memory."""

PROMPT_TOKENS, MAX_MODEL_LEN, QUIET_S, BETWEEN_S = 8, 2048, 1.0, 0.2


@contextmanager
def decoding(engine: Engine, num_sequences: int) -> Iterator[None]:
    """Keep `num_sequences` sequences decoding inside the context."""
    is_over = False
    generator = np.random.default_rng(0)

    def submit() -> None:
        prompt = generator.integers(FIRST_PLAIN_ID, engine.card.vocab_size, PROMPT_TOKENS).astype(np.int32)
        sampling = SamplingParams(max_new_tokens=MAX_MODEL_LEN // 2, temperature=0.0, ignore_eos=True)
        request = GenerationRequest(uuid.uuid4().hex, prompt, sampling, incremental=False)
        engine.loop.submit(request, lambda updates: None if is_over else submit())

    for _ in range(num_sequences):
        submit()
    try:
        yield
    finally:
        is_over = True
        engine.loop.abort_all()


def update_once(engine: Engine, starts: StepStarts, path: Path) -> Run:
    """Update while steps run; return the seconds of the update, of the swap, and of steps before and around it."""
    begun = time.perf_counter()
    time.sleep(QUIET_S)
    asked = time.perf_counter()
    outcome = engine.update_weights_from_disk(path)
    ended = time.perf_counter()
    time.sleep(BETWEEN_S)
    if not outcome.success:
        raise RuntimeError(outcome.message)
    quiet, around = starts.gaps(begun, asked), starts.gaps(asked, ended + BETWEEN_S)
    return {
        "update_s": ended - asked,
        "swap_s": outcome.gap_s,
        "step_s": statistics.median(quiet),
        "longest_quiet_s": max(quiet),
        "longest_s": max(around),
    }


def measure(engine: Engine, paths: list[Path], *, num_sequences: int, repeats: int) -> dict[str, list[Run]]:
    """Run updates of both kinds in turn; return `repeats` of each, after an uncounted one."""
    runs: dict[str, list[Run]] = {name: [] for name in PLACES}
    starts, read = StepStarts(engine), engine.runner.staged.read
    with decoding(engine, num_sequences):
        for repeat in range(repeats + 1):
            for turn, (name, spare) in enumerate(PLACES.items()):
                engine.runner.staged.read = partial(read, spare=spare)  # ty: ignore[invalid-assignment]
                runs[name].append(update_once(engine, starts, paths[(repeat + turn + 1) % 2]))
            note(f"{repeat}/{repeats}")
    return {name: of_place[1:] for name, of_place in runs.items()}


def main() -> None:
    """Measure, write the result file, print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="small", help="preset of the synthetic checkpoints")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1, help="devices of the engine; on a CPU, emulated ones")
    parser.add_argument("--out", type=Path, default=RESULTS / "weight_updates.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    first = checkpoint_of(arguments.size)
    paths = [first, ensure_checkpoint(first.with_name(f"{first.name}-other"), arguments.size, seed=1)]
    settings = {"max_running_requests": arguments.sequences, "max_model_len": MAX_MODEL_LEN}
    with Engine(str(first), devices_per_host=arguments.devices, **settings) as engine:
        begun = conditions(engine, size=arguments.size, repeats=arguments.repeats, load_before=load_before)
        weight_bytes = engine.runner.staged.bytes_per_device
        runs = measure(engine, paths, num_sequences=arguments.sequences, repeats=arguments.repeats)
    result = {**begun, "weight_updates": {"bytes_per_device": weight_bytes, "runs": runs}}
    save(result, arguments.out)
    print(tables(result))


if __name__ == "__main__":
    main()
