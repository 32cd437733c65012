"""Throughput of the rollout job, against a server and with an engine of its own, beside the engine alone.

    python -m benchmarks.rollout_job [--model synthetic:small] [--prompts 64] [--n 4] [--new-tokens 64] [--repeats 5]
                                     [--sums] [--devices 1] [--max-running 16] [--in-flight N] [--no-own]
                                     [--out FILE.json]

With `--sums` prompts are sums of two numbers below 1000, and samples end where the model ends them: what the calculator
is made for. Otherwise ids are drawn at random, and samples have from half to one and a half times `--new-tokens`.

The engine alone runs twice: in one process, and with its worker in another, as every server and every job has it. All
but the first are in one Ray cluster, as in life. All sides sample the same: prompts, seeds, log-probs and routing
returned. A repeat has every side once, each time with another one first. What counts is the time from when whoever
samples is ready to when the last sample is there, for the job on disk. RuntimeError where more than one in a hundred of
a side's samples differ from the engine's: float32's last bits depend on the batch, and where a router's experts tie to
them a sample takes another turn (docs/rollouts.md).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import ray
import yaml

from benchmarks.conditions import RESULTS, conditions, load_before_start, note, save
from benchmarks.engine_runs import in_turn
from benchmarks.figures import Run
from benchmarks.serve_process import ENVIRONMENT, ServeProcess
from benchmarks.table import tables
from benchmarks.workloads import FIRST_PLAIN_ID
from rayserve_moe.checkpoints.model_path import resolve_model_path
from rayserve_moe.cluster.replica_engine import ReplicaEngine, start_replica_engine
from rayserve_moe.config.load import default_cache_directory, set_environment_defaults, settings_from
from rayserve_moe.execution.platforms import limit_threads
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.inprocess.running import run_to_end
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.rollouts import load
from rayserve_moe.rollouts.batch_job import main as run_job
from rayserve_moe.rollouts.prompts import seed_of

MOST_OTHERS = 0.01
LOGICAL_CPUS = 4
"""What three engines reserve beside each other in one cluster; they take turns at computing."""

Ids = dict[tuple[str, int], list[int]]
Side = Engine | ReplicaEngine


class Measurement:
    """The load, and every way to run it; each gives the seconds it took and the ids that came out."""

    def __init__(
        self, options: argparse.Namespace, *, directory: Path, engines: dict[str, Side], where: dict[str, list[str]]
    ) -> None:
        self._options, self._directory, self._engines, self._where = options, directory, engines, where
        generator, engine = np.random.default_rng(0), engines["engine"]
        if options.sums:
            terms = generator.integers(0, 1000, (options.prompts, 2)).tolist()
            prompts = [engine.tokenizer.encode(f"{first}+{second}=") for first, second in terms]
        else:
            highest = min(engine.loop.card.vocab_size, 256)
            prompts = generator.integers(FIRST_PLAIN_ID, highest, (options.prompts, options.prompt_len)).tolist()
        self._prompts = {str(i): ids for i, ids in enumerate(prompts)}
        shortest, longest = lengths_of(options)
        self._lengths = generator.integers(shortest, longest + 1, options.prompts).tolist()
        self._file = directory / "prompts.jsonl"
        rows = (
            {"id": name, "input_ids": ids, "sampling_params": {"max_new_tokens": length}}
            for (name, ids), length in zip(self._prompts.items(), self._lengths, strict=True)
        )
        self._file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def run(self, side: str, repeat: int) -> tuple[Run, Ids]:
        """Sample all prompts once, under a seed of this repeat."""
        if side in self._engines:
            return self._run_engine(self._engines[side], repeat)
        return self._run_job(repeat, self._directory / f"{side}-{repeat}", self._where[side])

    def _run_engine(self, engine: Side, repeat: int) -> tuple[Run, Ids]:
        each = {"n": self._options.n, "ignore_eos": not self._options.sums}
        requests = [
            GenerationRequest(
                f"{repeat} {name}",
                np.asarray(ids, np.int32),
                SamplingParams(**each, max_new_tokens=length, seed=seed_of(repeat, name, sampling={})),
                return_routed_experts=True,
                incremental=False,
            )
            for (name, ids), length in zip(self._prompts.items(), self._lengths, strict=True)
        ]
        engine.loop.flush()
        started = time.perf_counter()
        finished = run_to_end(engine.loop, engine.tokenizer, requests=requests, shows_progress=False)
        seconds = time.perf_counter() - started
        return {"seconds": seconds}, {
            (name, sample): result.token_ids
            for name, one in zip(self._prompts, finished, strict=True)
            for sample, result in enumerate(one.results)
        }

    def _run_job(self, repeat: int, out: Path, where: list[str]) -> tuple[Run, Ids]:
        told = ["--prompts", str(self._file), "--out", str(out), "--n", str(self._options.n), "--seed", str(repeat)]
        told += ["--sampling", json.dumps({"ignore_eos": not self._options.sums})]
        told += ["--in-flight", str(self._options.in_flight)]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            status = run_job([*told, *where])
        summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        if status:
            raise RuntimeError(f"the job has failed: {summary['reason']}")
        loaded = load(out)
        keys = zip(loaded.prompt_id, loaded.sample_index.tolist(), strict=True)
        ids = {key: output.tolist() for key, output in zip(keys, loaded.output_ids, strict=True)}
        return {"seconds": summary["sampling_s"]}, ids


def lengths_of(options: argparse.Namespace) -> tuple[int, int]:
    """Return the bounds of a sample's length; with one length, samples of the engine alone would end in step."""
    return max(1, options.new_tokens // 2), options.new_tokens + options.new_tokens // 2


def share_of_others(ids: Ids, expected: Ids) -> float:
    """Return the share of samples that differ; all of them if some are missing."""
    return sum(ids[key] != expected[key] for key in expected) / len(expected) if ids.keys() == expected.keys() else 1.0


def compare(measurement: Measurement, sides: list[str], *, repeats: int) -> tuple[dict[str, list[Run]], float]:
    """Run every side in turn, after an uncounted round; returns with it the tokens of a round, in the mean."""
    num_tokens: list[int] = []
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    for repeat in range(-1, repeats):
        found = {side: measurement.run(side, repeat + 1) for side in in_turn(sides, repeat + 1)}
        for side, (run, ids) in found.items():
            if share_of_others(ids, found["engine"][1]) > MOST_OTHERS:
                raise RuntimeError(f"the samples of {side} differ from the engine's")
            runs[side].append(run)
        num_tokens.append(sum(len(output) for output in found["engine"][1].values()))
        note(
            f"{repeat + 1}/{repeats}: "
            + ", ".join(f"{side} {run['seconds']:.2f} s" for side, (run, _) in found.items())
        )
    return {side: each[1:] for side, each in runs.items()}, float(np.mean(num_tokens[1:]))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="synthetic:small")
    add("--prompts", type=int, default=64)
    add("--prompt-len", type=int, default=32)
    add("--n", type=int, default=4)
    add("--new-tokens", type=int, default=64)
    add("--sums", action="store_true")
    add("--repeats", type=int, default=5)
    add("--devices", type=int, default=1, help="devices of each engine; on a CPU, emulated ones")
    add("--max-running", type=int, default=16)
    add("--in-flight", type=int, default=0, help="samples under way at once (default: the job's own)")
    add("--no-own", action="store_true", help="leave out the engine of the job's own, which compiles on every start")
    add("--out", type=Path, default=RESULTS / "rollout_job.json")
    return parser.parse_args()


def main() -> None:
    """Measure, write the result file, print its tables."""
    options = parse_arguments()
    load_before = load_before_start()
    path = resolve_model_path(options.model, cache_directory=default_cache_directory())
    limit_threads(path)  # as the workers of the other sides do
    settings = {
        "model_path": str(path),
        "enable_return_routed_experts": True,
        "max_running_requests": options.max_running,
        "max_model_len": options.prompt_len + lengths_of(options)[1],
        "devices_per_host": options.devices,
        "precompile_bs_paddings": [options.max_running],
        "max_step_tokens": 256,
    }
    sides = ["engine", "replica", "server"] + ["own"] * (not options.no_own)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollouts-")))
        config = directory / "config.yaml"
        config.write_text(yaml.safe_dump(settings), encoding="utf-8")
        set_environment_defaults(ENVIRONMENT)
        ray.init(address="local", num_cpus=LOGICAL_CPUS, log_to_driver=False)
        stack.callback(ray.shutdown)
        cluster = ray.get_runtime_context().gcs_address
        server = stack.enter_context(ServeProcess(settings, ray_address=cluster))
        engine = stack.enter_context(Engine(**settings))
        replica = start_replica_engine(settings_from(settings))
        stack.callback(replica.loop.shutdown)
        where = {"server": ["--url", f"http://127.0.0.1:{server.port}"], "own": ["--config", str(config)]}
        engines: dict[str, Side] = {"engine": engine, "replica": replica}
        measurement = Measurement(options, directory=directory, engines=engines, where=where)
        runs, num_tokens = compare(measurement, sides, repeats=options.repeats)
        load = {"prompts": options.prompts, "prompt_len": options.prompt_len, "n": options.n, "sums": options.sums}
        result = {
            **conditions(engine, size=options.model, repeats=options.repeats, load_before=load_before),
            "rollout_job": {
                **load,
                "new_tokens": options.new_tokens,
                "output_tokens": num_tokens,
                "runs": runs,
            },
        }
    save(result, options.out)
    print(tables(result))


if __name__ == "__main__":
    main()
