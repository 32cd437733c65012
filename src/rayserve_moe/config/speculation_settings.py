"""The settings of speculative decoding, and what follows from them alone."""

from __future__ import annotations

from dataclasses import dataclass

from rayserve_moe.config.setting_fields import choice as _choice
from rayserve_moe.config.setting_fields import named as _named
from rayserve_moe.config.setting_fields import number as _number

MOST_DRAFTS = 7
DRAFT_MODELS = ("EAGLE", "EAGLE3", "NEXTN")
"""Values of `speculative_algorithm` that take a draft model."""


@dataclass(frozen=True)
class SpeculationSettings:
    """Tokens that are drafted, and verified several at a time: they change how fast answers are, not what they are."""

    algorithm: str = _choice("off", "NGRAM", "SIBLINGS", *DRAFT_MODELS, key="speculative_algorithm")
    """`NGRAM` drafts what followed the last tokens of a sequence before, `SIBLINGS` also what did in other answers to
    its prompt; `EAGLE`, `EAGLE3` and `NEXTN` what a draft model says; `off` or null none."""
    draft_model_path: str = _named("", "speculative_draft_model_path")
    """Where the head of `EAGLE` or `EAGLE3` lies, as `model_path`; `NEXTN` is a layer of the checkpoint without one."""
    eagle_topk: int = _number(1, (1, 8), "speculative_eagle_topk")
    """Drafts that may follow each draft; beyond 1 they are a tree. Not for models with sliding windows."""
    num_steps: int = _number(0, (0, 7), "speculative_num_steps")
    """Drafts of a sequence in one step at most that follow each other; 0 is 7. Chains have 0, 1, 3, 5 or 7 in a step,
    whichever measured times favour."""
    num_draft_tokens: int = _number(0, (0, 32), "speculative_num_draft_tokens")
    """Rows that are verified: of a chain `speculative_num_steps` and one more, of a tree all its nodes with the token
    that it begins at, 32 at most; a tree needs it."""
    shortest_match: int = _number(2, (1, 64), "speculative_ngram_min_match_window_size")
    """Tokens at the end of a sequence that must have stood elsewhere before anything is drafted."""
    longest_match: int = _number(8, (1, 64), "speculative_ngram_max_match_window_size")
    """Tokens at the end of a sequence that are looked for at most."""

    @property
    def most_drafts(self) -> int:
        """Drafts of a sequence in one step at most; 0 without speculation."""
        if self.has_trees:
            return self.num_draft_tokens - 1
        return 0 if self.algorithm == "off" else self.num_steps or max(self.num_draft_tokens - 1, 0) or MOST_DRAFTS

    @property
    def has_trees(self) -> bool:
        """Whether drafts are trees."""
        return self.algorithm != "off" and self.eagle_topk > 1

    @property
    def num_levels(self) -> int:
        """Drafts of a sequence in one step at most that follow each other."""
        return min(self.num_steps or MOST_DRAFTS, self.most_drafts) if self.has_trees else self.most_drafts
