"""The trainer's side of routing: decode answers, join turns, lay rows out for a trainer, check that they belong."""

from rayserve_moe.replay.alignment.answers import decode_answer
from rayserve_moe.replay.alignment.findings import Finding, check_routing, check_shared_prefixes
from rayserve_moe.replay.alignment.trainer_layout import CONVENTIONS, Sample, TrainerBatch, to_trainer_layout
from rayserve_moe.replay.alignment.turns import join_turns

__all__ = [
    "CONVENTIONS",
    "Finding",
    "Sample",
    "TrainerBatch",
    "check_routing",
    "check_shared_prefixes",
    "decode_answer",
    "join_turns",
    "to_trainer_layout",
]
