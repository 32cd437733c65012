"""Prompts that an engine computes for other replicas, which get their pages."""

from __future__ import annotations

import uuid
from concurrent.futures import Future

from rayserve_moe.engine.admission import EngineBusyError, EngineRebuildingError
from rayserve_moe.engine.command_queue import EngineStoppedError
from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.engine.pushed_pages import BUSY, NOT_KEPT, STOPPED, VERSION, PromptRequest, Push, PushRefusedError
from rayserve_moe.requests.records import GenerationRequest, RequestError, SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.scheduling.sequence import Sequence

GREEDY_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0)
"""The sampled token is dropped: the other replica computes the last token of the prompt itself."""


def compute_pages(loop: EngineLoop, asked: PromptRequest) -> Future[Push]:
    """Compute a prompt and read its pages, from any thread.

    The future fails with PushRefusedError, whose text is the reason.
    """
    done: Future[Push] = Future()
    pushes = loop.control.pushes
    if pushes is None or loop.card.weight_version != asked.weight_version:
        done.set_exception(PushRefusedError(NOT_KEPT if pushes is None else VERSION))
        return done
    (salt,) = asked.namespace
    request = GenerationRequest(f"prefill-{uuid.uuid4().hex}", asked.token_ids, GREEDY_TOKEN, cache_salt=salt)
    submitted: Future[Sequence] = Future()

    def take(updates: list[ChoiceResult]) -> None:
        finish = next((update.finish for update in updates if update.finish is not None), None)
        if finish is None:
            return
        if finish.kind in ("error", "abort"):
            done.set_exception(PushRefusedError(STOPPED))
        else:
            pushes.post(lambda: pushes.send(submitted.result(), first_page=asked.first_page, done=done))

    try:
        submitted.set_result(loop.submit(request, take)[0])
    except (EngineBusyError, EngineRebuildingError, RequestError):
        done.set_exception(PushRefusedError(BUSY))
    except EngineStoppedError:
        done.set_exception(PushRefusedError(STOPPED))
    return done
