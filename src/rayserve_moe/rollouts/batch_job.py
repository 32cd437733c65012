"""The rollout job: samples every prompt of a file into Parquet shards, and resumes an earlier run.

    python -m rayserve_moe.rollouts.batch_job --prompts FILE --out DIR --n 8 --url http://127.0.0.1:8000
    python -m rayserve_moe.rollouts.batch_job --prompts FILE --out DIR --n 8 --config configs/x.yaml

With `--url` a running server samples; with `--config` engines that the job starts in its Ray cluster. Exit status: 0 if
complete, 1 if the server stopped answering, 2 for wrong use, 3 after SIGTERM or SIGINT.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from tqdm import tqdm

from rayserve_moe.cluster.startup_memory import frozen
from rayserve_moe.config.load import environment_setting, settings_from_yaml
from rayserve_moe.config.settings import LoggingSettings
from rayserve_moe.observability.logs import use_logging
from rayserve_moe.rollouts.answers import Faulty, Unavailable, Unusable
from rayserve_moe.rollouts.client import RolloutClient
from rayserve_moe.rollouts.driver import Driver, Source, with_retries
from rayserve_moe.rollouts.job_options import ANY_VERSION, JobSettings, add_arguments, check
from rayserve_moe.rollouts.plan_experts import place_from_rows
from rayserve_moe.rollouts.prompts import check_sampling, count_rows, read_rows
from rayserve_moe.rollouts.replica_pool import ReplicaPool, num_replicas_for
from rayserve_moe.rollouts.request_batching import RequestBatcher
from rayserve_moe.rollouts.shards import RolloutDirectory
from rayserve_moe.rollouts.summary import Tally, as_text, summary_of
from rayserve_moe.text.tokenizer import Tokenizer, TokenizerError

COMPLETE, GIVEN_UP, WRONG_USE, INTERRUPTED = 0, 1, 2, 3
DEFAULT_IN_FLIGHT = 256
TERMINAL_INTERVAL_S, LOG_INTERVAL_S = 0.5, 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job and return the exit status."""
    parser = argparse.ArgumentParser(prog="rollout", description=__doc__.splitlines()[0])
    add_arguments(parser)
    options = parser.parse_args(arguments)
    try:
        check(options)
        return run(options)
    except ValueError as error:
        sys.stderr.write(f"rollout: {error}\n")
        return WRONG_USE


def run(options: argparse.Namespace) -> int:
    """Run the job under a lock on its directory. Raises ValueError for wrong use, before anything is sampled."""
    settings = _job_settings(options)
    num_rows = count_rows(options.prompts)
    with RolloutDirectory(options.out, sets_aside=options.resample_damaged) as directory:
        sys.stderr.write(f"rollout: writes to {options.out}\n")
        started = time.perf_counter()
        tally, status, reason = asyncio.run(_run(options, settings, directory=directory, num_rows=num_rows))
        summary = summary_of(tally, directory, seconds=time.perf_counter() - started, status=status, reason=reason)
        if status == COMPLETE and options.place_experts:
            summary["experts"] = _place_experts(options)
        directory.write_json("summary.json", summary)
    sys.stdout.write(as_text(summary) + "\n")
    return status


def _place_experts(options: argparse.Namespace) -> str:
    """Move the server's experts by the routing of this job; return the outcome, which is also printed."""
    try:
        version = place_from_rows(options.out, url=options.url, batch=options.place_experts)
        outcome = f"experts move to placement {version}"
    except (Unavailable, Faulty, Unusable, ValueError) as error:
        outcome = f"experts stay: {error}"
    sys.stderr.write(f"rollout: {outcome}\n")
    return outcome


async def _run(
    options: argparse.Namespace, settings: JobSettings, *, directory: RolloutDirectory, num_rows: int
) -> tuple[Tally, int, str | None]:
    """Sample until all is done, the server stops answering, or this task is cancelled."""
    tally = Tally()
    try:
        async with _source(options) as source:
            facts = await with_retries(source.model_info, give_up_s=settings.give_up_s)
            settings = _suited(settings, options, facts=facts)
            directory.agree(_binding(settings, facts))
            tokenizer = await asyncio.to_thread(_tokenizer, options.tokenizer, facts)
            with _bar(num_rows * settings.num_samples) as bar:
                driver = Driver(source, directory, settings=settings, tokenizer=tokenizer, progress=bar)
                tally = driver.tally
                with frozen():
                    await driver.run(read_rows(options.prompts))
    except asyncio.CancelledError:
        return tally, INTERRUPTED, "stopped by a signal"
    except (Unusable, RayTaskError, RayActorError, OSError) as error:
        return tally, GIVEN_UP, str(error)
    return tally, COMPLETE, None


@contextlib.asynccontextmanager
async def _source(options: argparse.Namespace) -> AsyncGenerator[Source]:
    """Connect to a server, or start engines, for which this process joins a Ray cluster unless it is in one.

    A call to another process requests at most a quarter of the samples in flight, so that others are left when it ends.
    """
    _stop_on_signals()
    together = max(1, (options.in_flight or DEFAULT_IN_FLIGHT) // 4)
    if options.url:
        use_logging(LoggingSettings())
        async with RolloutClient(options.url, api_key=environment_setting("api_key")) as client:
            yield RequestBatcher(client, max_samples=together)
        return
    wanted, joins = settings_from_yaml(options.config), not ray.is_initialized()
    use_logging(wanted.logging)
    if joins:
        ray.init()
        _stop_on_signals()  # replace Ray's own handlers, which lose unwritten samples
    try:
        async with ReplicaPool(wanted, options.replicas or num_replicas_for(wanted)) as pool:
            yield pool if pool.is_local else RequestBatcher(pool, max_samples=together)
    finally:
        if joins:
            ray.shutdown()


def _stop_on_signals() -> None:
    """Make SIGTERM and SIGINT cancel this task."""
    this_task = asyncio.current_task()
    assert this_task is not None, "a coroutine runs in a task"
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, this_task.cancel)


def _job_settings(options: argparse.Namespace) -> JobSettings:
    basic = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature}
    return JobSettings(
        options.n,
        options.seed,
        sampling={**basic, **check_sampling(json.loads(options.sampling))},
        returns_routing=not options.no_routing,
        returns_index=options.index_rows,
        returns_gates=options.gates,
        returns_mask=options.masks,
        returns_drafts=options.drafts,
        weight_version=None if options.weight_version == ANY_VERSION else options.weight_version,
        retries_failed=options.retry_errors,
        in_flight=options.in_flight,
        shard_bytes=options.shard_mib << 20,
        flush_s=options.flush_s,
        give_up_s=options.give_up_s,
    )


def _suited(settings: JobSettings, options: argparse.Namespace, *, facts: dict[str, Any]) -> JobSettings:
    """Adapt the settings to the server: at least twice as many samples in flight as it runs at once, if known."""
    if settings.returns_routing and not facts.get("enable_return_routed_experts"):
        raise ValueError("routing is not captured: set enable_return_routed_experts: true, or pass --no-routing")
    if settings.returns_index and not facts.get("enable_return_indexer_topk"):
        raise ValueError("index rows are not captured: set enable_return_indexer_topk: true, for sparse attention")
    if settings.returns_gates and not facts.get("enable_return_router_gates"):
        raise ValueError("router gates are not captured: set enable_return_router_gates: true")
    wanted, served = settings.weight_version, str(facts.get("weight_version"))
    if wanted not in (None, served):
        raise Unusable(f"the server has weight version {served}, but {wanted} is required")
    in_flight = options.in_flight or max(DEFAULT_IN_FLIGHT, 2 * int(facts.get("max_running", 0)))
    return dataclasses.replace(settings, in_flight=in_flight)


def _binding(settings: JobSettings, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that all samples of a directory depend on."""
    named = {"model": str(facts.get("served_model_name")), "seed": settings.seed, "sampling": settings.sampling}
    parts = {
        "index_rows": settings.returns_index,
        "gates": settings.returns_gates,
        "masks": settings.returns_mask,
        "drafts": settings.returns_drafts,
    }
    # Older directories have no such facts.
    return {**named, "routing": settings.returns_routing, **{name: True for name, is_on in parts.items() if is_on}}


def _tokenizer(directory: Path | None, facts: dict[str, Any]) -> Tokenizer | None:
    """Load the tokenizer of `directory`, or the server's if this machine has it; None otherwise (ids need none)."""
    if directory is not None:
        return Tokenizer(directory)
    try:
        return Tokenizer(str(facts.get("tokenizer_path") or facts.get("model_path")))
    except TokenizerError:
        return None


def _bar(total: int) -> tqdm:
    """Build a progress bar for a terminal, or occasional lines for a log."""
    interval_s = TERMINAL_INTERVAL_S if sys.stderr.isatty() else LOG_INTERVAL_S
    return tqdm(total=total, unit="sample", mininterval=interval_s, maxinterval=interval_s, dynamic_ncols=True)


if __name__ == "__main__":
    sys.exit(main())
