"""Rollouts for reinforcement learning: a job that samples many prompts, the files it writes, and a trainer's client."""

from rayserve_moe.rollouts.records import Rollouts, load
from rayserve_moe.rollouts.schema import ERRORS_SCHEMA, SCHEMA, Rollout

__all__ = ["ERRORS_SCHEMA", "SCHEMA", "Rollout", "Rollouts", "load"]
