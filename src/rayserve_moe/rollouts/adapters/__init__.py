"""Batches of trainers that exist, from a client's rollouts: one module per trainer, arrays of numpy under its names."""

from rayserve_moe.rollouts.adapters.trajectory import Trajectory, trained_under, trajectory_of

__all__ = ["Trajectory", "trained_under", "trajectory_of"]
