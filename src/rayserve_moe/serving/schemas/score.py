"""The body of `/v1/score` in SGLang's dialect."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from rayserve_moe.serving.schemas.field_types import ListedIds, RequestBody, fault
from rayserve_moe.serving.schemas.prompt_types import Prompt, Prompts


class ScoreBody(RequestBody):
    """How likely each of the labels is right after the query and each item, both text or both token ids.

    With `item_first` the items come before the query. With `apply_softmax` the labels alone share the probability.
    """

    query: Prompts
    items: Prompts
    label_token_ids: ListedIds
    apply_softmax: bool = False
    item_first: bool = False
    model: str | None = None
    rid: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] = ""

    @model_validator(mode="after")
    def _are_of_one_kind(self) -> Self:
        if not self.label_token_ids:
            raise fault("`label_token_ids` should not be empty")
        if len(self.query) != 1:
            raise fault("`query` should be one text, or one list of token ids")
        if any(type(item) is not type(self.query[0]) for item in self.items):
            raise fault("`items` should be texts where `query` is text, and token ids where it has token ids")
        return self

    @property
    def prompts(self) -> list[Prompt]:
        """What the labels are scored after."""
        (query,) = self.query
        joined = ((item, query) if self.item_first else (query, item) for item in self.items)
        return [_joined(first, last) for first, last in joined]


def _joined(first: Prompt, last: Prompt) -> Prompt:
    if isinstance(first, list) and isinstance(last, list):
        return [*first, *last]
    return f"{first}{last}"
