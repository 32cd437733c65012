"""The driver of a job: reads rows, samples a bounded number concurrently, and retries each until it succeeds."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from itertools import groupby
from typing import Any, Protocol, TypeVar

from tqdm import tqdm

from rayserve_moe.rollouts.answers import Faulty, Refused, SampleRequest, Unavailable, Unusable
from rayserve_moe.rollouts.job_options import JobSettings
from rayserve_moe.rollouts.prompts import BadRow, Row, prompt_ids_of, seed_of
from rayserve_moe.rollouts.schema import Failure, Rollout
from rayserve_moe.rollouts.shards import RolloutDirectory
from rayserve_moe.rollouts.summary import Tally
from rayserve_moe.text.tokenizer import Tokenizer

MAX_FAULTS = 8
MAX_REQUEST_SAMPLES = 128
"""Maximum samples per request."""


class Source(Protocol):
    """A sampler of prompts: a server, or the job's own engines."""

    async def generate(self, request: SampleRequest) -> list[Rollout]:
        """Sample a prompt. Raises Unavailable, Faulty, Refused, Unusable."""
        ...

    async def model_info(self) -> dict[str, Any]:
        """Return the served model in the fields of `/model_info`; `max_running` is the number of concurrent samples, if
        known.
        """
        ...


class Driver:
    """A run of a job. `run` may be cancelled at any time: samples received by then are written."""

    def __init__(
        self,
        source: Source,
        directory: RolloutDirectory,
        *,
        settings: JobSettings,
        tokenizer: Tokenizer | None = None,
        progress: tqdm | None = None,
    ) -> None:
        self.tally = Tally()
        self._source, self._directory, self._settings = source, directory, settings
        self._tokenizer, self._progress = tokenizer, progress
        self._rollouts: list[Rollout] = []
        self._failures: list[Failure] = []
        self._num_bytes = 0
        self._writing = asyncio.Lock()
        self._started_s = self._last_answer_s = time.monotonic()

    async def run(self, rows: Iterable[Row]) -> None:
        """Sample every row that is not done. Raises Unusable if the source no longer answers."""
        slots = asyncio.Semaphore(max(1, self._settings.in_flight // self._settings.num_samples))
        try:
            async with asyncio.TaskGroup() as writing:
                flushing = writing.create_task(self._flush_now_and_then())
                async with asyncio.TaskGroup() as prompts:
                    for row in rows:
                        await slots.acquire()
                        task = prompts.create_task(self._complete(row))
                        task.add_done_callback(lambda _: slots.release())
                flushing.cancel()
        except BaseExceptionGroup as errors:
            raise _first_of(errors) from errors
        finally:
            self.tally.sampling_s = time.monotonic() - self._started_s
            await asyncio.shield(self._flush())

    async def _flush_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self._settings.flush_s)
            await asyncio.shield(self._flush())

    async def _complete(self, row: Row) -> None:
        """Sample the missing samples of a prompt, or record why it cannot be sampled."""
        self.tally.prompts += 1
        if row.prompt_id in self._directory.failed and not self._settings.retries_failed:
            self.tally.prompts_failed_before += 1
            self._advance(self._settings.num_samples)
            return
        done = self._directory.samples_of(row.prompt_id, self._settings.weight_version)
        missing = set(range(self._settings.num_samples)) - done
        self.tally.samples_done_before += self._settings.num_samples - len(missing)
        self._advance(self._settings.num_samples - len(missing))
        if not missing:
            return
        try:
            if row.fault is not None:
                raise BadRow(row.fault)
            prompt_ids = prompt_ids_of(row, self._tokenizer)
            await self._sample(row, prompt_ids, missing)
        except (BadRow, Refused, Faulty) as error:
            self._failures.append(Failure(row.prompt_id, row.position, str(error), time.time()))
            self.tally.count_failure(str(error))
            self._advance(len(missing))

    async def _sample(self, row: Row, prompt_ids: list[int], missing: set[int]) -> None:
        """Request the samples in `missing` until it is empty; aborted samples are requested again."""
        sampling = {**self._settings.sampling, **row.sampling}
        seed = seed_of(self._settings.seed, row.prompt_id, sampling=sampling)
        sampling.pop("sampling_seed", None)
        backoff = Backoff()
        while missing:
            for first, count in _runs(sorted(missing)):
                request = SampleRequest(
                    row.prompt_id,
                    prompt_ids,
                    sampling,
                    seed,
                    first,
                    count,
                    returns_routing=self._settings.returns_routing,
                    returns_index=self._settings.returns_index,
                    returns_gates=self._settings.returns_gates,
                    returns_mask=self._settings.returns_mask,
                    returns_drafts=self._settings.returns_drafts,
                )
                answered = [each for each in await self._answer(request) if each.finish_reason != "abort"]
                rollouts = [dataclasses.replace(each, prompt_fields=row.others) for each in answered]
                self._check_versions(rollouts)
                missing.difference_update(each.sample_index for each in rollouts)
                await self._keep(rollouts)
            if missing:
                self.tally.retries += 1
                await backoff.wait()

    async def _answer(self, request: SampleRequest) -> list[Rollout]:
        """Request until an answer arrives. Raises Faulty if answers stay wrong, Unusable if none arrives."""
        backoff, num_faults, unavailable_since_s = Backoff(), 0, math.inf
        while True:
            try:
                rollouts = await self._source.generate(request)
            except Unavailable as error:
                unavailable_since_s = min(unavailable_since_s, time.monotonic())
                since_s = max(unavailable_since_s, self._last_answer_s)
                check_deadline(since_s, error, give_up_s=self._settings.give_up_s)
                min_s = error.retry_after_s
            except Faulty:
                num_faults, min_s = num_faults + 1, 0.0
                if num_faults == MAX_FAULTS:
                    raise
            else:
                self._last_answer_s = time.monotonic()
                return rollouts
            self.tally.retries += 1
            await backoff.wait(min_s)

    def _check_versions(self, rollouts: list[Rollout]) -> None:
        wanted = self._settings.weight_version
        others = {each.weight_version for each in rollouts} - {wanted}
        if wanted is not None and others:
            raise Unusable(f"samples have weight version {min(others)}, but {wanted} is required")

    async def _keep(self, rollouts: list[Rollout]) -> None:
        for rollout in rollouts:
            self._rollouts.append(rollout)
            self._num_bytes += rollout.num_bytes
            self.tally.prompt_tokens += len(rollout.prompt_ids)
            self.tally.output_tokens += len(rollout.output_ids)
            self.tally.finish_reasons[rollout.finish_reason] += 1
            self.tally.weight_versions[rollout.weight_version] += 1
        self._advance(len(rollouts))
        if self._num_bytes >= self._settings.shard_bytes:
            await asyncio.shield(self._flush())

    async def _flush(self) -> None:
        """Write the received samples. Other callers wait meanwhile, so that memory stays bounded."""
        async with self._writing:
            rollouts, failures = self._rollouts, self._failures
            self._rollouts, self._failures, self._num_bytes = [], [], 0
            try:
                if rollouts:
                    await asyncio.to_thread(self._directory.write_rollouts, rollouts)
                    self.tally.samples_written += len(rollouts)
                    rollouts = []
                if failures:
                    await asyncio.to_thread(self._directory.write_failures, failures)
            except OSError:
                self._rollouts[:0], self._failures[:0] = rollouts, failures
                raise

    def _advance(self, num_samples: int) -> None:
        if self._progress is not None:
            rate = self.tally.output_tokens / max(time.monotonic() - self._started_s, 1e-9)
            self._progress.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
            self._progress.update(num_samples)


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Return the first index and length of each run of consecutive numbers, split at the maximum request size."""
    blocks = [list(run) for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return [
        (run[start][1], len(run[start : start + MAX_REQUEST_SAMPLES]))
        for run in blocks
        for start in range(0, len(run), MAX_REQUEST_SAMPLES)
    ]


def _first_of(errors: BaseExceptionGroup) -> BaseException:
    first = errors.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 10.0
_Result = TypeVar("_Result")


async def with_retries(call: Callable[[], Awaitable[_Result]], *, give_up_s: float) -> _Result:
    """Call until it succeeds. Raises Unusable once every call has failed for `give_up_s`."""
    started_s, backoff = time.monotonic(), Backoff()
    while True:
        try:
            return await call()
        except (Unavailable, Faulty) as error:
            check_deadline(started_s, error, give_up_s=give_up_s)
        await backoff.wait()


def check_deadline(since_s: float, error: Exception, *, give_up_s: float) -> None:
    """Raise Unusable if calls have failed since `since_s` (monotonic clock) for longer than `give_up_s`."""
    if time.monotonic() - since_s > give_up_s:
        raise Unusable(f"no answer for {give_up_s:.0f} s; the last try: {error}") from error


class Backoff:
    """Waits that double, with jitter."""

    def __init__(self) -> None:
        self._next_s = FIRST_PAUSE_S

    async def wait(self, min_s: float = 0.0) -> None:
        """Wait for the next pause, at least `min_s`."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, MAX_PAUSE_S)
        await asyncio.sleep(max(min_s, pause_s * random.uniform(0.75, 1.25)))
