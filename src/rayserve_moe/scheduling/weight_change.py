"""What becomes of sequences when the model gets other weights, and who they are. Between steps, none under way."""

from __future__ import annotations

from rayserve_moe.scheduling.scheduler import Scheduler
from rayserve_moe.scheduling.sequence import Sequence, note_weights


def unfinished(scheduler: Scheduler) -> list[Sequence]:
    """All choices that have not ended, whether they run, wait, or follow another."""
    found = {id(choice): choice for s in (*scheduler.running, *scheduler.waiting) for choice in s.choices}
    return [choice for choice in found.values() if choice.finish is None]


def preempt_all(scheduler: Scheduler) -> None:
    """Preempt everything that runs; it waits in the order it ran in."""
    for sequence in reversed(scheduler.running):
        scheduler.preempt(sequence)


def change_weights(scheduler: Scheduler, weight_version: str) -> None:
    """Go on under other weights.

    No prefix from before is found again, whatever the weights are called. What has no output yet starts over, so that
    all it tells is of the new weights; what has outputs goes on from the keys and values that it holds. Once it is
    computed anew, the rows that it keeps are those of older weights than its keys: nobody else finds such pages.
    """
    scheduler.weight_version = weight_version
    for sequence in reversed(scheduler.running):
        if sequence.num_outputs == 0:
            scheduler.preempt(sequence)
    scheduler.flush()
    for sequence in unfinished(scheduler):
        note_weights(sequence, weight_version)
        if sequence.num_outputs and sequence.request.return_routed_experts:
            sequence.num_cacheable = sequence.num_prompt_tokens
        if sequence.scoring is not None:
            sequence.scoring.change_weights(weight_version)
