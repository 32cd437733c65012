"""How many experts the rows of a step reach, and so what one row more costs: most of a small step is reading them."""

from __future__ import annotations

import numpy as np

OWN_WORK = 0.1
"""What a row takes of its own, for attention and products, of a step that has it alone."""
LOOK_EVERY = 16
"""Steps between looks at captured routing."""
FORGETTING = 0.9
HALVINGS = 20


class ExpertReach:
    """Distinct experts of a layer that `n` rows reach: E (1 - (1 - k / E)^n), where rows choose `top_k` of E alike and
    apart. Rows that resemble each other choose as among fewer: E is what captured routing tells, at first all."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        self._num_experts, self._top_k = num_experts, top_k
        self._effective, self._num_steps = float(num_experts), 0
        self._work: dict[int, float] = {}

    def distinct(self, num_rows: int) -> float:
        """Experts of a layer that so many rows reach, on average."""
        return self._effective * (1 - (1 - self._top_k / self._effective) ** num_rows)

    def work(self, num_rows: int) -> float:
        """What a step of so many rows takes, in steps of one, but for what all steps take alike."""
        if num_rows not in self._work:
            experts = self.distinct(num_rows) / self._top_k
            self._work[num_rows] = (1 - OWN_WORK) * experts + OWN_WORK * num_rows
        return self._work[num_rows]

    def note(self, routing: np.ndarray) -> None:
        """Take captured rows [T, layers, k] of one step into account, now and then."""
        self._num_steps += 1
        if len(routing) > 1 and self._num_steps % LOOK_EVERY == 1:
            found = self._effective_of(routing)
            self._effective = FORGETTING * self._effective + (1 - FORGETTING) * found
            self._work.clear()

    def _effective_of(self, routing: np.ndarray) -> float:
        """Of how many experts as many rows that choose apart would have reached as many, by halving."""
        num_rows, num_layers, _ = routing.shape
        reached = np.zeros((num_layers, self._num_experts), np.bool_)
        reached[np.arange(num_layers)[:, None], routing.swapaxes(0, 1).reshape(num_layers, -1)] = True
        wanted, low, high = reached.sum() / num_layers, float(self._top_k), float(self._num_experts)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            too_few = middle * (1 - (1 - self._top_k / middle) ** num_rows) < wanted
            low, high = (middle, high) if too_few else (low, middle)
        return high
