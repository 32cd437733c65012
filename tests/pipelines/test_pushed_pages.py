"""Pages that another engine has computed are those that this one computes: ids, log-probs and rows are the same bits.

One family of each kind of state, on native kernels. A push that is refused, changed or cut short costs its pages only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.engine.prefill import compute_pages
from rayserve_moe.engine.pushed_pages import LOST, PagePushes, PromptRequest, Push, PushRefusedError
from rayserve_moe.scheduling.host_pages import HostPages
from rayserve_moe.scheduling.host_slots import HostedPage, SlotBytes
from tests.support.engine.neighbour import Neighbour, Spoil
from tests.support.engine.workload import draw_prompt
from tests.support.kernels.native_kernels import need_native_kernels
from tests.support.models.families import family_case, write_family
from tests.support.speculation.draft_checkpoints import with_prediction_layer

PROMPT, ANSWER, PAGE = 150, 12, 16
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "cpu_kernels": "native",
    "enable_return_routed_experts": True,
    "structured_output": False,
    "host_cache_mib": 32,
    "num_pages": 64,
    "page_size": PAGE,
    "max_running_requests": 4,
    "max_step_tokens": 32,
    "max_model_len": 512,
    "precompile_bs_paddings": [4],
}
SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("qwen3_5_moe_text-0", "deepseek_v3-0", "gpt_oss-0", "deepseek_v32-0", "nemotron_h-0")
]


class Pair:
    """Engines that decode and prefill."""

    def __init__(self, decodes: Engine, prefills: Engine) -> None:
        self.decodes, self.prefills = decodes, prefills
        self.neighbour = Neighbour(prefills.loop)
        pushes = decodes.loop.control.pushes
        assert pushes is not None
        self.pushes: PagePushes = pushes
        self.pushes.receive_from(self.neighbour, min_tokens=32)

    def begin(self) -> None:
        """Forget all cached pages, and earlier pushes."""
        for engine in (self.decodes, self.prefills):
            assert engine.flush_cache()
        self.neighbour.requests.clear()
        self.neighbour.spoil = lambda push: push
        self.pushes.refused.clear()

    def run(self, prompt: list[int], *, computes: bool = False, **keywords: Any) -> dict[str, Any]:
        """Return the answer of the decoding engine; with `computes` it computes the prompt itself."""
        self.pushes.receive_from(self.neighbour, min_tokens=1 << 30 if computes else 32)
        sampling = {"max_new_tokens": ANSWER, "temperature": 1.0, "sampling_seed": 5, "ignore_eos": True}
        answer = self.decodes.generate(
            input_ids=prompt, sampling_params=sampling, return_routed_experts=True, return_logprob=True, **keywords
        )
        assert isinstance(answer, dict)
        self.decodes.loop.check_integrity()
        self.prefills.loop.check_integrity()
        return answer


@pytest.fixture(scope="module", params=["qwen3_moe-0", *SLOW])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Pair]:
    need_native_kernels()
    case = family_case(request.param)
    path: Path = write_family(case, tmp_path_factory.mktemp(case.name) / "model", seed=5, dtype="bfloat16")
    with Engine(str(path), **SETTINGS) as decodes, Engine(str(path), **SETTINGS) as prefills:
        yield Pair(decodes, prefills)


def prompt_of(seed: int, length: int = PROMPT) -> list[int]:
    return draw_prompt(np.random.default_rng(seed), length).tolist()


def bits(answer: dict[str, Any]) -> tuple[Any, ...]:
    """Return ids, log-probs and rows, which must be equal."""
    meta = answer["meta_info"]
    return answer["output_ids"], meta["output_token_logprobs"], meta["routed_experts"]


def kept_of(pair: Pair) -> int:
    """Return the number of tokens after which every state kind has a cached page."""
    (rank,) = pair.decodes.loop._cycle.scheduler.ranks
    return max(rank.entry_tokens, PAGE)


def has_windows(pair: Pair) -> bool:
    """Return True if some layers free the pages behind their window."""
    (rank,) = pair.decodes.loop._cycle.scheduler.ranks
    return bool(rank.page_maps)


def test_every_way_to_a_prompt_gives_the_same_bits(pair: Pair):
    pair.begin()
    prompt, kept = prompt_of(1), kept_of(pair)
    computed = pair.run(prompt, computes=True)
    on_devices = pair.run(prompt, computes=True)
    for number in range(2, 9):  # evict them
        pair.run(prompt_of(number), computes=True)
    in_host_memory = pair.run(prompt, computes=True)
    pair.begin()
    pushed, again = pair.run(prompt), pair.run(prompt)
    assert bits(on_devices) == bits(in_host_memory) == bits(pushed) == bits(again) == bits(computed)
    num_cached = (PROMPT - 1) // kept * kept
    assert not pair.pushes.refused and sources(pushed)[0] == [0, num_cached, "transferred"]
    if has_windows(pair):
        return  # the answers have moved the windows past the end of the prompt
    for answer in (on_devices, in_host_memory, again):
        assert answer["meta_info"]["cached_tokens"] == num_cached
    assert sources(on_devices)[0] == [0, num_cached, "cached"]
    assert len(pair.neighbour.requests) == 1


def sources(answer: dict[str, Any]) -> list[list[Any]]:
    return answer["meta_info"]["routed_experts_info"]["source"]


def test_pages_that_the_decoding_engine_has_keep_their_rows(pair: Pair):
    pair.begin()
    prompt, kept = prompt_of(1), kept_of(pair)
    expected = pair.run(prompt, computes=True)
    pair.begin()
    pair.run(prompt[: kept + 1], computes=True)
    answer = pair.run(prompt)
    assert bits(answer) == bits(expected)
    (asked,) = pair.neighbour.requests
    if has_windows(pair):
        return
    assert asked.first_page == kept // PAGE
    end = (PROMPT - 1) // kept * kept
    assert sources(answer)[:2] == [[0, kept, "cached"], [kept, end, "transferred"]]


def _with_shares(push: Push, change: Callable[[SlotBytes], SlotBytes]) -> Push:
    return replace(push, shares={place: change(share) for place, share in push.shares.items()})


def _flip_in_page(number: int) -> Spoil:
    def flip(share: SlotBytes) -> SlotBytes:
        first = share.arrays[0].copy()
        first.view(np.uint8)[number].flat[7] ^= 1
        return share._replace(arrays=(first, *share.arrays[1:]))

    return lambda push: _with_shares(push, flip)


SPOILS: dict[str, tuple[Spoil, str, int]] = {
    "a changed bit in the first page": (_flip_in_page(0), "checksum", 0),
    "a changed bit in the fourth page": (_flip_in_page(3), "checksum", 3),
    "another version": (lambda push: replace(push, weight_version="other"), "weight_version", 0),
    "another namespace": (lambda push: replace(push, namespace=("other",)), "namespace", 0),
    "another range": (lambda push: replace(push, first_page=1), "range", 0),
    "no bytes": (lambda push: replace(push, shares={}), "layout", 0),
    "half of the bytes": (
        lambda push: _with_shares(
            push, lambda share: share._replace(arrays=tuple(a[: len(a) // 2] for a in share.arrays))
        ),
        "layout",
        0,
    ),
    "another dtype": (
        lambda push: _with_shares(
            push, lambda share: share._replace(arrays=tuple(a.astype(np.float32) for a in share.arrays))
        ),
        "layout",
        0,
    ),
    "a lost sender": (lambda push: PushRefusedError(LOST), "lost", 0),
}


@pytest.mark.parametrize("name", SPOILS)
def test_a_spoilt_push_costs_its_pages(pair: Pair, name: str):
    spoil, reason, num_pages = SPOILS[name]
    pair.begin()
    prompt, kept = prompt_of(3), kept_of(pair)
    expected = pair.run(prompt, computes=True)
    pair.begin()
    pair.neighbour.spoil = spoil
    answer = pair.run(prompt)
    assert bits(answer) == bits(expected)
    assert dict(pair.pushes.refused) == {reason: 1}
    assert answer["meta_info"]["cached_tokens"] == num_pages * PAGE // kept * kept


def fill(engine: Engine, *, but: int) -> list[HostedPage]:
    """Lend all slots of host memory but some; return their records."""
    slots = host_of(engine).slots
    lent = []
    while (hosted := slots.lend(tuple(False for _ in host_of(engine)._rank.states), rows=None)) is not None:
        lent.append(hosted)
    for _ in range(but):
        slots.take_back(lent.pop())
    return lent


def host_of(engine: Engine) -> HostPages:
    host = engine.loop._cycle.scheduler.ranks[0].host
    assert isinstance(host, HostPages)
    return host


@pytest.mark.parametrize(("side", "but", "num_pages"), [("decodes", 0, 0), ("decodes", 4, 4), ("prefills", 4, 4)])
def test_a_full_host_memory_on_either_side_costs_pages(pair: Pair, side: str, but: int, num_pages: int):
    pair.begin()
    prompt, kept = prompt_of(4), kept_of(pair)
    expected = pair.run(prompt, computes=True)
    pair.begin()
    engine: Engine = getattr(pair, side)
    lent = fill(engine, but=but)
    answer = pair.run(prompt)
    for hosted in lent:
        host_of(engine).slots.take_back(hosted)
    assert bits(answer) == bits(expected)
    assert pair.pushes.refused["full"] == (side == "decodes")
    assert answer["meta_info"]["cached_tokens"] <= num_pages * PAGE // kept * kept
    host_of(engine).check_integrity()


def test_a_change_of_weights_meanwhile_costs_the_pages(pair: Pair):
    pair.begin()
    prompt, control = prompt_of(5), pair.decodes.loop.control
    expected, version = pair.run(prompt, computes=True), pair.decodes.card.weight_version
    pair.begin()

    def rename(push: Push) -> Push:
        control.rename_weights("other").result()
        return push

    pair.neighbour.spoil = rename
    answer = pair.run(prompt)
    control.rename_weights(version).result()
    assert bits(answer) == bits(expected) and dict(pair.pushes.refused) == {"weight_version": 1}
    assert answer["meta_info"]["cached_tokens"] == 0


@pytest.mark.parametrize("mode", ["abort_request", "pause"])
def test_a_request_whose_pages_are_on_their_way_can_be_ended(pair: Pair, mode: str):
    pair.begin()
    prompt, is_asked, may_arrive = prompt_of(6), threading.Event(), threading.Event()

    def wait(push: Push) -> Push:
        is_asked.set()
        assert may_arrive.wait(60)
        return push

    pair.neighbour.spoil = wait
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(pair.run, prompt, rid="held")
        assert is_asked.wait(60)
        if mode == "pause":
            pair.decodes.pause_generation("abort")
            pair.decodes.continue_generation()
        else:
            pair.decodes.abort_request("held")
        ended = running.result(60)
        may_arrive.set()
    assert ended["meta_info"]["finish_reason"]["type"] == "abort" and ended["output_ids"] == []
    assert pair.run(prompt_of(7))["meta_info"]["finish_reason"]["type"] != "abort"
    assert not pair.pushes.held


def test_all_choices_of_a_request_start_behind_its_pages(pair: Pair):
    pair.begin()
    prompt = prompt_of(8)
    sampling = {"max_new_tokens": ANSWER, "temperature": 1.0, "sampling_seed": 5, "ignore_eos": True, "n": 2}
    keywords = {"input_ids": prompt, "sampling_params": sampling, "return_routed_experts": True, "return_logprob": True}
    pair.pushes.receive_from(pair.neighbour, min_tokens=1 << 30)
    expected = pair.decodes.generate(**keywords)
    pair.begin()
    pair.pushes.receive_from(pair.neighbour, min_tokens=32)
    found = pair.decodes.generate(**keywords)
    assert len(pair.neighbour.requests) == 1
    assert [bits(answer) for answer in found] == [bits(answer) for answer in expected]
    end = (PROMPT - 1) // kept_of(pair) * kept_of(pair)
    assert all(sources(answer)[0] == [0, end, "transferred"] for answer in found)


def test_a_prompt_whose_scores_are_requested_is_computed_where_it_is(pair: Pair):
    pair.begin()
    pair.run(prompt_of(9), logprob_start_len=0)
    pair.run(prompt_of(10, 32))
    assert not pair.neighbour.requests


def pages_of(engine: Engine, prompt: list[int]) -> list[np.ndarray]:
    """Return the pages of a cached prompt, as the devices have them, of every pool without entries."""
    host_of(engine).slots.clear()
    asked = PromptRequest(np.array(prompt, np.int32), ("",), 0, engine.card.weight_version)
    (share,) = compute_pages(engine.loop, asked).result(60).shares.values()
    assert engine.runner.pages is not None
    shapes = engine.runner.pages._shapes
    return [array for shape, array in zip(shapes, share.arrays, strict=True) if not shape.is_entry]


def check_pages_arrive(pair: Pair, *, num_arrays: int) -> None:
    """Check that both engines hold the same bytes of a prompt's pages."""
    pair.begin()
    prompt = prompt_of(11)
    pair.run(prompt)
    assert not pair.pushes.refused
    sent, arrived = pages_of(pair.prefills, prompt), pages_of(pair.decodes, prompt)
    assert len(sent) >= num_arrays and all(array.any() for array in sent)
    for theirs, ours in zip(sent, arrived, strict=True):
        num_pages = (PROMPT - 1) // kept_of(pair) * kept_of(pair) // PAGE
        np.testing.assert_array_equal(theirs[:num_pages].view(np.uint8), ours[:num_pages].view(np.uint8))


def test_the_devices_have_the_bytes_that_were_sent(pair: Pair):
    if not has_windows(pair):  # pages behind a window hold nothing
        check_pages_arrive(pair, num_arrays=1)


@pytest.mark.slow
def test_keys_of_a_draft_model_come_along(core_checkpoint: Path, tmp_path: Path):
    need_native_kernels()
    with_prediction_layer(tmp_path / "head", core_checkpoint)
    settings = {
        **SETTINGS,
        "speculative_algorithm": "NEXTN",
        "speculative_draft_model_path": str(tmp_path / "head"),
        "speculative_num_steps": 2,
    }
    with Engine(str(core_checkpoint), **settings) as decodes, Engine(str(core_checkpoint), **settings) as prefills:
        pair = Pair(decodes, prefills)
        assert prefills.runner.state.draft is not None
        check_pages_arrive(pair, num_arrays=2)
        pair.begin()
        computed = pair.run(prompt_of(11), computes=True)
        pair.begin()
        assert bits(pair.run(prompt_of(11))) == bits(computed)
