"""What guides that narrow another guide have in common: they note the time that a mask took."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import numpy as np

from rayserve_moe.requests.finish_reason import FinishReason


class TimedGuide(ABC):
    """Follows the outputs of one choice, as a `scheduling.sequence.Guide`."""

    last_ms = 0.0
    """Milliseconds of this thread for the last mask, those of the guide within included."""

    def next_mask(self, output_ids: np.ndarray) -> np.ndarray | FinishReason:
        """Return bits int32 [W] of what may follow `output_ids` int32 [T]; or how the choice ends, as nothing may."""
        begun = time.thread_time()
        mask = self._mask(output_ids)
        self.last_ms = 1e3 * (time.thread_time() - begun)
        return mask

    @abstractmethod
    def _mask(self, output_ids: np.ndarray) -> np.ndarray | FinishReason: ...
