"""Routing for trainers: decode answers, join turns, convert to a trainer's layout, check rows against tokens."""

from rayserve_moe.requests.records import RoutingLayout
from rayserve_moe.rollouts.alignment.answers import decode_answer, join_turns, served_layout
from rayserve_moe.rollouts.alignment.findings import Finding, check_routing, check_shared_prefixes
from rayserve_moe.rollouts.alignment.trainer_layout import CONVENTIONS, Sample, TrainerBatch, to_trainer_layout

__all__ = [
    "CONVENTIONS",
    "Finding",
    "RoutingLayout",
    "Sample",
    "TrainerBatch",
    "check_routing",
    "check_shared_prefixes",
    "decode_answer",
    "join_turns",
    "served_layout",
    "to_trainer_layout",
]
