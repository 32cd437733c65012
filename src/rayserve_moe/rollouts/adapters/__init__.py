"""Training batches for existing trainers from a client's rollouts: a module per trainer, with its array names."""

from rayserve_moe.rollouts.adapters.trajectory import Trajectory, index_rows, router_gates, trained_under, trajectory_of

__all__ = ["Trajectory", "index_rows", "router_gates", "trained_under", "trajectory_of"]
