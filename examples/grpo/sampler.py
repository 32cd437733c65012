"""Samples from the server that a run owns, and starts it again, with its weights, where it is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self, TypeVar

import numpy as np

from examples.grpo.chain import Chain
from examples.grpo.settings import GrpoSettings
from examples.grpo.tasks import problems_of_step
from rayserve_moe.rollouts import Rollout
from rayserve_moe.rollouts.answers import Faulty, SampleRequest, Unavailable
from rayserve_moe.rollouts.client import BlockingRolloutClient

MOST_RESTARTS = 3
SAMPLING = {"max_new_tokens": 6, "temperature": 1.0}
SEEDS = 2**32


_Answer = TypeVar("_Answer")


class Server(Protocol):
    """A context manager; inside it, a server answers at `url`."""

    url: str

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Sampled(NamedTuple):
    """The episodes of a step, group after group, each as its turns; their rewards [groups, samples], and the seconds
    that it took."""

    step: int
    episodes: list[list[Rollout]]
    rewards: np.ndarray
    seconds: float


class RunSampler(Protocol):
    """Sampler of a run, which also receives its weights."""

    num_restarts: int

    @property
    def url(self) -> str: ...

    def serve(self, tensors: dict[str, np.ndarray], *, version: str, under_way: bool = False) -> float: ...

    def sample(self, requests: Sequence[SampleRequest]) -> list[list[Rollout]]: ...


class Sampler:
    """A context manager around the server of a run, which `start` gives. Calls may come from several threads."""

    def __init__(self, start: Callable[[], Server]) -> None:
        self._start, self._restarting = start, threading.Lock()
        self._server: Server | None = None
        self._wanted: tuple[dict[str, np.ndarray], str] | None = None
        self.num_restarts = 0

    @property
    def url(self) -> str:
        """The address of the server."""
        assert self._server is not None, "enter the sampler first"
        return self._server.url

    def __enter__(self) -> Self:
        self._server = self._start().__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.__exit__(None, None, None)

    def serve(self, tensors: dict[str, np.ndarray], *, version: str, under_way: bool = False) -> float:
        """Have the server serve these weights as `version`; returns the seconds that it took.

        Samples that are `under_way` in another thread are held meanwhile, and computed anew before they go on.
        """
        started, self._wanted = time.perf_counter(), (tensors, version)
        self._lasting(self._push_under_samples if under_way else self._push)
        return time.perf_counter() - started

    def sample(self, requests: Sequence[SampleRequest]) -> list[list[Rollout]]:
        """The samples of each request. Unavailable where the server does not stay up."""
        return self._lasting(lambda client: client.generate(requests))

    def _push(self, client: BlockingRolloutClient) -> None:
        assert self._wanted is not None
        tensors, version = self._wanted
        client.update_weights_from(tensors, weight_version=version)

    def _push_under_samples(self, client: BlockingRolloutClient) -> None:
        client.pause("retract")
        try:
            self._push(client)
        finally:
            client.resume()

    def _lasting(self, call: Callable[[BlockingRolloutClient], _Answer]) -> _Answer:
        """Call with a client; where the server does not answer, start another one with the same weights first."""
        for _ in range(MOST_RESTARTS):
            num_restarts = self.num_restarts
            try:
                with BlockingRolloutClient(self.url) as client:
                    return call(client)
            except (Unavailable, Faulty):
                with self._restarting:
                    if num_restarts == self.num_restarts:
                        self._restart()
        with BlockingRolloutClient(self.url) as client:
            return call(client)

    def _restart(self) -> None:
        self.num_restarts += 1
        self.__exit__(None, None, None)
        self.__enter__()
        if self._wanted is not None and self._server is not None:
            with BlockingRolloutClient(self._server.url) as client:
                self._push(client)


def sample_step(sampler: RunSampler, step: int, settings: GrpoSettings) -> Sampled:
    """Sample the groups of a step. Its problems and seeds follow from the run's seed and the step alone."""
    started = time.perf_counter()
    problems = problems_of_step(step, settings.prompts, seed=settings.seed, task=settings.task)
    seeds = np.random.default_rng([settings.seed, step]).integers(SEEDS, size=len(problems)).tolist()
    requests = [
        SampleRequest(f"{step}/{number}", list(problem.prompt.encode()), SAMPLING, seed=seed, count=settings.group)
        for number, (problem, seed) in enumerate(zip(problems, seeds, strict=True))
    ]
    episodes = [[rollout] for group in sampler.sample(requests) for rollout in group]
    of_episodes = [problem for problem in problems for _ in range(settings.group)]
    for turn in range(1, 1 + len(problems[0].operands)):
        _take_turn(sampler, episodes, of_episodes, turn)
    pairs = zip(episodes, of_episodes, strict=True)
    rewards = [
        problem.reward(len(turns) - 1, turns[-1].output_ids.astype(np.uint8).tobytes()) for turns, problem in pairs
    ]
    seconds = time.perf_counter() - started
    return Sampled(step, episodes, np.array(rewards).reshape(len(problems), -1), seconds)


def _take_turn(sampler: RunSampler, episodes: list[list[Rollout]], problems: Sequence[Chain], turn: int) -> None:
    """Ask the next question of all episodes that go on; of the routing only rows that are new come back.

    The whole conversation is the prompt, the newline too that ended the last answer: its row comes a turn late.
    """
    going, requests = [], []
    for turns, problem in zip(episodes, problems, strict=True):
        last = turns[-1]
        output = last.output_ids.astype(np.uint8).tobytes()
        if len(turns) == turn and problem.goes_on(turn - 1, output):
            said = np.concatenate([last.prompt_ids, last.output_ids]).tolist()
            question = problem.question(turn, answer_before=output[:-1].decode())
            prompt = [*said, *question.encode()]
            place = {"seed": (last.seed + 1) % SEEDS, "first": last.sample_index, "rows_from": len(said) - 1}
            requests.append(SampleRequest(f"{last.prompt_id}+", prompt, SAMPLING, **place))
            going.append(turns)
    for turns, (rollout,) in zip(going, sampler.sample(requests) if requests else [], strict=True):
        turns.append(rollout)
