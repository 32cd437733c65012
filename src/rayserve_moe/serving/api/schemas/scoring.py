"""Bodies of `/v1/score`, in the form of SGLang or vLLM, and of `/v1/embeddings`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rayserve_moe.requests.fields import INT32_MAX
from rayserve_moe.serving.api.schemas.field_types import ListedIds, RequestBody, RequestId, fault
from rayserve_moe.serving.api.schemas.prompt_types import Prompt, Prompts

Priority = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)]
Salt = Annotated[str, Field(max_length=256)]


class EmbeddingBody(RequestBody):
    """Texts or token ids to embed: the hidden state at the last token, normalized to length 1.

    `use_activation` false skips the normalization. `dimensions` must be the hidden size.
    """

    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    use_activation: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    rid: RequestId | None = None
    cache_salt: Salt = ""
    priority: Priority = 0


class ScoreBody(RequestBody):
    """SGLang's form: probabilities of labels after the query and each item, both text or both token ids.

    With `item_first` the items precede the query. With `apply_softmax` probabilities are normalized over the labels, at
    `temperature`.

    vLLM's form: similarity of the embeddings of two texts, of a text and several, or of pairs.
    """

    query: Prompts | None = None
    items: Prompts | None = None
    label_token_ids: ListedIds = ()
    text_1: Prompts | None = None
    text_2: Prompts | None = None
    queries: Prompts | None = None
    documents: Prompts | None = None
    data_1: Prompts | None = None
    data_2: Prompts | None = None
    apply_softmax: bool = False
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    item_first: bool = False
    model: str | None = None
    rid: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    cache_salt: Salt = ""

    @model_validator(mode="after")
    def _are_of_one_kind(self) -> Self:
        if self.pairs_name is not None or self.query is None or self.items is None:
            return self
        if len(self.query) != 1:
            raise fault("`query` should be one text, or one list of token ids")
        if any(type(item) is not type(self.query[0]) for item in self.items):
            raise fault("`items` should be texts where `query` is text, and token ids where it has token ids")
        if self.temperature != 1 and not self.apply_softmax:
            raise fault("`temperature` is that of the labels' own distribution: it needs `apply_softmax`")
        return self

    @property
    def pairs_name(self) -> str | None:
        """Return a given field of vLLM's form, or None in SGLang's form."""
        names = (name for names in PAIRS for name in names if name != "items")
        return next((name for name in names if getattr(self, name) is not None), None)

    @property
    def prompts(self) -> list[Prompt]:
        """Return the prompts after which labels are scored."""
        assert self.query is not None and self.items is not None, "checked by the route"
        (query,) = self.query
        joined = ((item, query) if self.item_first else (query, item) for item in self.items)
        return [_joined(first, last) for first, last in joined]


PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""Field names of the compared texts in vLLM's form."""


def _joined(first: Prompt, last: Prompt) -> Prompt:
    if isinstance(first, list) and isinstance(last, list):
        return [*first, *last]
    return f"{first}{last}"
