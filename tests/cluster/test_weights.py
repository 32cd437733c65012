"""Other weights on several hosts: all of them change between the same two steps, or none does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from safetensors.numpy import load_file

from rayserve_moe import Engine
from rayserve_moe.answers.streams import GenerationStream
from rayserve_moe.checkpoints.bucket import SentBucket, SentShares, SentTensor, WantedTensor, pieces_for
from rayserve_moe.cluster.group_executor import GroupExecutor
from rayserve_moe.cluster.heartbeat import CHANGING
from rayserve_moe.cluster.step_transport import TRANSPORTS
from rayserve_moe.config.settings import UpdateSettings
from rayserve_moe.engine.command_queue import EngineStoppedError
from rayserve_moe.engine.control import WeightOrder, WeightOutcome
from rayserve_moe.engine.executor import TensorReceiver
from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.engine.updates.tensors import BucketOrder
from rayserve_moe.observability.fault_points import arm
from rayserve_moe.requests.records import GenerationRequest, ModelCard, SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.scheduling.step_plan import StepPlan
from rayserve_moe.text.tokenizer import Tokenizer
from tests.cluster.conftest import SETTINGS
from tests.cluster.test_hosts import (
    OverTransport,
    assert_nothing_was_compiled,
    assert_same,
    complete,
    running,
    transport_to,
    two_hosts,
)
from tests.support.checkpoints.broken_checkpoints import WAYS, broken_copy
from tests.support.engine.step_gate import unhurried

UPDATED_WITHIN_S = 900.0
STEP_S = 2.0
"""Delay of each step while weights change. 65 steps remain then."""
LONG = SamplingParams(max_new_tokens=90, temperature=0.0, ignore_eos=True)


class OverGroup(OverTransport):
    """A running group under another transport, or its own."""

    def __init__(self, group: GroupExecutor, transport: str, num_pages: int) -> None:
        super().__init__(transport_to(group, transport), num_pages)
        self._group = group

    def stage_weights(self, model_path: str, expert_of_slot: np.ndarray | None) -> None:
        self._group.stage_weights(model_path, expert_of_slot)

    @property
    def tensors(self) -> TensorReceiver:
        return self._group.tensors


@pytest.fixture(scope="module")
def expected(checkpoint: Path, other_checkpoint: Path) -> tuple[ModelCard, dict[Path, list[ChoiceResult]]]:
    """What one process answers under the weights of each checkpoint."""
    answers = {}
    with Engine(str(checkpoint), **SETTINGS) as engine:
        for path in (checkpoint, other_checkpoint):
            assert engine.update_weights_from_disk(path, weight_version="0").success
            answers[path] = complete(engine.loop, engine.tokenizer)
        return engine.loop.card, answers


@pytest.fixture(scope="module")
def group(raylets: int, checkpoint: Path, programs: Path) -> Iterator[tuple[GroupExecutor, int]]:
    with two_hosts(checkpoint, compile_cache=programs) as running:
        yield running


def running_loop(
    group: tuple[GroupExecutor, int], card: ModelCard, transport: str
) -> AbstractContextManager[EngineLoop]:
    executor, num_pages = group
    return running(OverGroup(executor, transport, num_pages), card)


def long_request(name: str) -> GenerationRequest:
    return GenerationRequest(name, np.arange(5, 25, dtype=np.int32), LONG, return_routed_experts=True)


@pytest.mark.parametrize(
    "transport", [pytest.param(name, marks=pytest.mark.slow if name != "sockets" else ()) for name in TRANSPORTS]
)
def test_all_hosts_change_weights_between_the_same_two_steps(
    transport: str, group: tuple[GroupExecutor, int], expected: tuple, checkpoint: Path, other_checkpoint: Path
) -> None:
    """While a request runs over steps of a compiled graph, too: reading is beside them."""
    card, answers = expected
    tokenizer = Tokenizer(checkpoint)
    with running_loop(group, card, transport) as loop:
        for number, path in enumerate((other_checkpoint, checkpoint)):
            deltas = iter(GenerationStream(loop, tokenizer, request=long_request(f"{transport} {number}")))
            result = ChoiceResult()
            while len(result.token_ids) < 25:
                result.add(next(deltas))
            ray.get([worker.__ray_call__.remote(_note_phase_of_change) for worker in group[0].workers])
            order = WeightOrder(str(path), f"version {number}")
            with unhurried(loop, delay_s=STEP_S):  # the request outlasts the update
                outcome = loop.control.update_weights(order).result(UPDATED_WITHIN_S)
            assert outcome.success, outcome.message
            assert ray.get([worker.__ray_call__.remote(_noted) for worker in group[0].workers]) == [CHANGING] * 2
            for delta in deltas:
                result.add(delta)
            assert result.finish is not None and result.finish.kind == "length"
            versions = [version for _, version in result.weight_versions]
            assert versions[-1] == loop.card.weight_version == f"version {number}" and len(versions) == 2
            assert result.routing is not None and result.routing.weight_version[-1][2] == versions[-1]
            assert_same(complete(loop, tokenizer), answers[path])
    assert_nothing_was_compiled(group[0])


def _note_phase_of_change(worker: Any) -> None:
    """Record the phase of this host's heartbeat in the step that takes staged weights."""

    def note(plan: StepPlan) -> None:
        if plan.takes_staged_weights:
            worker._noted = worker._heartbeat._doing[0]
        else:
            arm("step", note)

    worker._noted = None
    arm("step", note)


def _noted(worker: Any) -> str | None:
    return worker._noted


def sent(path: Path, *, only: str = "") -> list[SentTensor]:
    """The tensors of a checkpoint whose names hold a word."""
    tensors = load_file(path / "model.safetensors")
    return [SentTensor(name, values) for name, values in tensors.items() if only in name]


def send(loop: EngineLoop, tensors: list[SentTensor], version: str) -> WeightOutcome:
    """Send tensors in three buckets."""
    for number in range(3):
        order = BucketOrder(version, WeightOrder("", version), number, is_last=number == 2)
        outcome = loop.control.tensors.stage(SentBucket(tuple(tensors[number::3])), order).result(UPDATED_WITHIN_S)
    return outcome


@pytest.mark.slow
def test_hosts_are_sent_their_shares_while_a_request_runs(
    group: tuple[GroupExecutor, int], expected: tuple, checkpoint: Path, other_checkpoint: Path
) -> None:
    """What serves then is what both would have read; of an expert a host is sent what its devices hold, once."""
    card, answers = expected
    executor, tokenizer = group[0], Tokenizer(checkpoint)
    with running_loop(group, card, "sockets") as loop:
        for path in (other_checkpoint, checkpoint):
            deltas = iter(GenerationStream(loop, tokenizer, request=long_request(f"sent {path.name}")))
            result = ChoiceResult()
            while len(result.token_ids) < 25:
                result.add(next(deltas))
            with unhurried(loop, delay_s=STEP_S):
                assert send(loop, sent(path), f"sent {path.name}").success
            for delta in deltas:
                result.add(delta)
            assert [version for _, version in result.weight_versions][-1] == f"sent {path.name}"
            assert_same(complete(loop, tokenizer), answers[path])
        before, experts = list(executor.tensors.sent_bytes), sent(checkpoint, only=".experts.")
        assert send(loop, experts, "experts alone").success
        counted = [after - earlier for earlier, after in zip(before, executor.tensors.sent_bytes, strict=True)]
        assert counted == [sum(tensor.values.nbytes for tensor in experts) // 2] * 2
        refused = loop.control.tensors.stage(
            SentBucket((SentTensor("model.x", np.zeros(3, np.float32)),)), BucketOrder("wrong", WeightOrder(""))
        ).result(UPDATED_WITHIN_S)
        assert not refused.success and "host 0: the model has no tensor model.x" in refused.message
        assert_same(complete(loop, tokenizer), answers[checkpoint])
        assert loop.control.update_weights(WeightOrder(str(checkpoint), "0")).result(UPDATED_WITHIN_S).success
    assert_nothing_was_compiled(executor)


@ray.remote(num_cpus=0)
class Trainer:
    """A process that cuts weights, holds the objects, and may be lost."""

    def put(self, tensors: list[SentTensor], wanted: list[list[WantedTensor]]) -> SentShares:
        pieces = [pieces_for(tensors, host) for host in wanted]
        sizes = [sum(piece.num_bytes for piece in share) for share in pieces]
        return SentShares(tuple(ray.put(share) for share in pieces), tuple(sizes))


def share_out(
    loop: EngineLoop, trainer: ray.actor.ActorHandle, tensors: list[SentTensor], version: str, *, kills: bool = False
) -> WeightOutcome:
    """Have a trainer put tensors as objects, in three buckets; where it `kills`, the last ones die with it."""
    for number in range(3):
        order = BucketOrder(version, WeightOrder("", version), number, is_last=number == 2)
        bucket = tensors[number::3]
        heads = [(tensor.name, tensor.shape) for tensor in bucket]
        wanted = loop.control.tensors.wanted(heads, order, base_version=None).result(UPDATED_WITHIN_S)
        shares = ray.get(trainer.put.remote(bucket, wanted))
        if kills and order.is_last:
            ray.kill(trainer)
            ray.wait(list(shares.by_host), timeout=1, fetch_local=False)
        outcome = loop.control.tensors.stage(shares, order).result(UPDATED_WITHIN_S)
    return outcome


@pytest.mark.slow
def test_hosts_fetch_the_shares_that_were_cut_for_them(
    group: tuple[GroupExecutor, int], expected: tuple, checkpoint: Path, other_checkpoint: Path
) -> None:
    """As when they are sent. Where the trainer is lost, no host is, and the old weights serve on."""
    card, answers = expected
    executor, tokenizer = group[0], Tokenizer(checkpoint)
    with running_loop(group, card, "sockets") as loop:
        trainer = Trainer.remote()
        for path in (other_checkpoint, checkpoint):
            assert share_out(loop, trainer, sent(path), f"shared {path.name}").success
            assert_same(complete(loop, tokenizer), answers[path])
        before, experts = list(executor.tensors.sent_bytes), sent(checkpoint, only=".experts.")
        assert share_out(loop, trainer, experts, "experts alone").success
        counted = [after - earlier for earlier, after in zip(before, executor.tensors.sent_bytes, strict=True)]
        assert counted == [sum(tensor.values.nbytes for tensor in experts) // 2] * 2
        lost = share_out(loop, trainer, sent(other_checkpoint), "lost", kills=True)
        assert not lost.success and lost.weight_version == "experts alone", lost
        assert_same(complete(loop, tokenizer), answers[checkpoint])
        assert loop.control.update_weights(WeightOrder(str(checkpoint), "0")).result(UPDATED_WITHIN_S).success
    assert_nothing_was_compiled(executor)


@pytest.mark.slow
def test_a_host_that_cannot_use_the_weights_keeps_all_from_changing(
    group: tuple[GroupExecutor, int], expected: tuple, checkpoint: Path, other_checkpoint: Path, tmp_path: Path
) -> None:
    """The checkpoint is whole, and then it is not: one host reads it before, the other one after."""
    card, answers = expected
    executor, _ = group
    broken = broken_copy(other_checkpoint, "truncated", tmp_path / "marker")
    with running_loop(group, card, "sockets") as loop:
        outcome = loop.control.update_weights(WeightOrder(str(broken))).result(UPDATED_WITHIN_S)
        assert not outcome.success and "truncated" in outcome.message and "marker" not in outcome.message
        assert_same(complete(loop, Tokenizer(checkpoint)), answers[checkpoint])
    first, second = executor.workers
    ray.get([first.begin_staging.remote(str(other_checkpoint), None)])
    with running(GroupOfPaths(executor, [str(other_checkpoint), str(broken)]), card) as loop:
        outcome = loop.control.update_weights(WeightOrder(str(broken))).result(UPDATED_WITHIN_S)
        assert not outcome.success and "host 1" in outcome.message
        assert ray.get([worker.__ray_call__.remote(_has_staged) for worker in (first, second)]) == [False, False]
        assert_same(complete(loop, Tokenizer(checkpoint)), answers[checkpoint])


def _has_staged(worker: object) -> bool:
    return worker._runner.staged._ready is not None


class GroupOfPaths(OverGroup):
    """Has every host read a directory of its own, as hosts do whose disks differ."""

    def __init__(self, group: GroupExecutor, paths: list[str]) -> None:
        super().__init__(group, "sockets", SETTINGS["num_pages"])
        self._paths = paths

    def stage_weights(self, model_path: str, expert_of_slot: np.ndarray | None) -> None:
        workers = self._group.workers
        self._group.workers = [_Elsewhere(worker, path) for worker, path in zip(workers, self._paths, strict=True)]
        try:
            super().stage_weights(model_path, expert_of_slot)
        finally:
            self._group.workers = workers


class _Elsewhere:
    """A worker that is told another path."""

    def __init__(self, worker: object, path: str) -> None:
        self._worker, self._path = worker, path
        self.begin_staging = self

    def __getattr__(self, name: str) -> object:
        return getattr(self._worker, name)

    def remote(self, _: str, expert_of_slot: np.ndarray | None) -> object:
        return self._worker.begin_staging.remote(self._path, expert_of_slot)


@pytest.mark.parametrize("way", [pytest.param("header nested", marks=pytest.mark.slow), "more layers than any model"])
def test_a_host_that_cannot_make_sense_of_a_file_is_not_lost(
    way: str, group: tuple[GroupExecutor, int], expected: tuple, checkpoint: Path, tmp_path: Path
) -> None:
    card, answers = expected
    with running_loop(group, card, "sockets") as loop:
        outcome = loop.control.update_weights(WeightOrder(str(broken_copy(checkpoint, way, tmp_path / "x")))).result(
            UPDATED_WITHIN_S
        )
        assert not outcome.success and WAYS[way][1] in outcome.message
        assert_same(complete(loop, Tokenizer(checkpoint)), answers[checkpoint])


@pytest.mark.slow
def test_a_host_that_reads_too_slowly_is_not_waited_for(
    group: tuple[GroupExecutor, int], expected: tuple, checkpoint: Path, other_checkpoint: Path
) -> None:
    """The update is refused, what was read elsewhere is dropped, and the next update is not behind it."""
    card, answers = expected
    executor, _ = group
    settings = executor._settings
    executor._settings = replace(settings, updates=UpdateSettings(staging_timeout_s=1.0))
    hang(executor)
    with running_loop(group, card, "sockets") as loop:
        outcome = loop.control.update_weights(WeightOrder(str(other_checkpoint))).result(UPDATED_WITHIN_S)
        assert not outcome.success and "staging_timeout_s = 1 s" in outcome.message
        assert ray.get([worker.__ray_call__.remote(_has_staged) for worker in executor.workers]) == [False, False]
        assert_same(complete(loop, Tokenizer(checkpoint)), answers[checkpoint])
        executor._settings = settings
        ray.get(executor.workers[1].__ray_call__.remote(_answer_again))
        for path in (other_checkpoint, checkpoint):
            assert loop.control.update_weights(WeightOrder(str(path), "0")).result(UPDATED_WITHIN_S).success
            assert_same(complete(loop, Tokenizer(checkpoint)), answers[path])


def hang(executor: GroupExecutor) -> None:
    """Have the second host wait for its disk, as for a mount that does not answer."""
    ray.get(executor.workers[1].__ray_call__.remote(_hang))


def _hang(worker: object) -> None:
    worker._copy, worker._answers = os.preadv, threading.Event()

    def preadv(*arguments: object) -> int:
        worker._answers.wait()
        return worker._copy(*arguments)

    os.preadv = preadv


def _answer_again(worker: object) -> None:
    os.preadv = worker._copy
    worker._answers.set()


@pytest.mark.slow
def test_a_host_that_is_killed_while_it_reads_ends_the_engine_and_never_serves_the_new_weights(
    group: tuple[GroupExecutor, int], expected: tuple, checkpoint: Path, other_checkpoint: Path
) -> None:
    """Runs last: it leaves the group without a host. Who starts it again starts with the weights it was configured for.

    The host's disk does not answer, so that it is sure to be reading.
    """
    card, _ = expected
    executor, _ = group
    hang(executor)
    pid = ray.get(executor.workers[1].__ray_call__.remote(lambda self: os.getpid()))
    with running_loop(group, card, "sockets") as loop:
        deltas = iter(GenerationStream(loop, Tokenizer(checkpoint), request=long_request("doomed")))
        first = next(deltas)
        assert first.finish is None
        update = loop.control.update_weights(WeightOrder(str(other_checkpoint), "never"))
        time.sleep(0.3)
        assert not update.done()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineStoppedError):
            update.result(UPDATED_WITHIN_S)
        last = [delta for delta in deltas if delta.finish][-1]
        assert last.finish is not None and last.finish.kind == "error"
        assert [version for _, version in last.weight_versions] == ["0"] == [loop.card.weight_version]
        with pytest.raises(EngineStoppedError):
            loop.check_health()
