"""Body of `/v1/embeddings`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rayserve_moe.requests.fields import INT32_MAX
from rayserve_moe.serving.api.schemas.field_types import RequestBody, RequestId
from rayserve_moe.serving.api.schemas.prompt_types import Prompts

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
