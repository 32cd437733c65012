"""Log-probs in answers of the OpenAI and token dialects, for the new output of a choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rayserve_moe.engine.answers import TokenLogprob, output_logprobs, prompt_logprobs_of
from rayserve_moe.requests import ChoiceResult, GenerationRequest
from rayserve_moe.serving.schemas.openai import CompletionBody
from rayserve_moe.text.tokenizer import IncrementalDetokenizer, Tokenizer


class CompletionLogprobs:
    """The `logprobs` object of one choice of `/v1/completions`; `top_logprobs` is by text, the token itself first.

    `text_offset` counts the characters of the choice's text before each token. With `echo` the prompt comes first, and
    its first token has no log-prob. With `return_tokens_as_token_ids` tokens are called `token_id:N`.
    """

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest, *, body: CompletionBody) -> None:
        self._tokenizer, self._request, self._num_top = tokenizer, request, body.logprobs or 0
        self._listed, self._offset = request.logprob_token_ids, 0
        self._name = token_name if body.return_tokens_as_token_ids else tokenizer.token_text
        self._echo_pending = body.echo
        hidden_ids = None if request.sampling.skip_special_tokens else frozenset()
        self._detokenizer = IncrementalDetokenizer(tokenizer, hidden_ids=hidden_ids, continues=True)

    def write(self, delta: ChoiceResult) -> dict:
        """Return the object for the tokens in `delta`."""
        written: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        num_top = self._num_top
        if self._echo_pending:
            self._echo_pending = False
            prompt_ids = self._request.prompt_ids.tolist()
            detokenizer = IncrementalDetokenizer(self._tokenizer, hidden_ids=frozenset())
            scored = prompt_logprobs_of(delta.prompt_scores, prompt_ids, num_top=num_top)
            self._add(written, zip(prompt_ids, scored, strict=True), detokenizer)
            self._offset += len(detokenizer.flush())
        self._add(
            written,
            zip(delta.token_ids, output_logprobs(delta, num_top=num_top, listed_ids=self._listed), strict=True),
            self._detokenizer,
        )
        return written

    def _add(
        self,
        written: dict[str, list],
        entries: Iterable[tuple[int, list[TokenLogprob] | None]],
        detokenizer: IncrementalDetokenizer,
    ) -> None:
        for token_id, likeliest in entries:
            written["tokens"].append(self._name(token_id))
            written["token_logprobs"].append(likeliest and likeliest[0].logprob)
            written["top_logprobs"].append(likeliest and self._by_name(likeliest))
            written["text_offset"].append(self._advance(token_id, detokenizer.push(token_id)))

    def _by_name(self, tokens: Sequence[TokenLogprob]) -> dict[str, float]:
        """Log-probs by text: the highest of tokens with the same text."""
        by_name: dict[str, float] = {}
        for token in tokens:
            name = self._name(token.token_id)
            by_name[name] = max(token.logprob, by_name.get(name, token.logprob))
        return by_name

    def _advance(self, token_id: int, piece: str) -> int:
        """Return the offset of the token: `piece` may also hold the end of a character that earlier tokens began."""
        before = self._offset
        self._offset += len(piece)
        return max(before, self._offset - len(self._tokenizer.token_text(token_id)))


def token_name(token_id: int) -> str:
    """Return what a token is called where ids are wanted for texts."""
    return f"token_id:{token_id}"


def chat_logprobs(
    tokenizer: Tokenizer,
    delta: ChoiceResult,
    *,
    num_top: int,
    listed_ids: Sequence[int] = (),
    as_ids: bool = False,
) -> dict:
    """Return the object of a chat choice; as in vLLM, `top_logprobs` begins with the token itself.

    Tokens are called by their text, or `as_ids`; `bytes` are those of the text.
    """
    name = token_name if as_ids else tokenizer.token_text

    def entry(token: TokenLogprob) -> dict:
        spelled = tokenizer.token_bytes(token.token_id)
        return {"token": name(token.token_id), "logprob": token.logprob, "bytes": list(spelled)}

    return {"content": _content(delta, entry, num_top, listed_ids), "refusal": None}


def token_logprobs(delta: ChoiceResult, *, num_logprobs: int, listed_ids: Sequence[int] = ()) -> dict:
    """Return the object of a choice of `/inference/v1/generate`: more than one asks for the likeliest tokens too.

    A listed token has no rank.
    """

    def entry(token: TokenLogprob) -> dict:
        name = token_name(token.token_id)
        return {"token": name, "token_id": token.token_id, "logprob": token.logprob, "rank": token.rank}

    return {"content": _content(delta, entry, num_logprobs if num_logprobs > 1 else 0, listed_ids)}


def _content(
    delta: ChoiceResult, entry: Callable[[TokenLogprob], dict], num_top: int, listed_ids: Sequence[int]
) -> list[dict]:
    shown = 1 + len(listed_ids) if listed_ids else num_top
    return [
        {**entry(tokens[0]), "top_logprobs": list(map(entry, tokens[:shown]))}
        for tokens in output_logprobs(delta, num_top=num_top, listed_ids=listed_ids)
    ]


def echoed_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the text of a prompt, special tokens spelled out."""
    detokenizer = IncrementalDetokenizer(tokenizer, hidden_ids=frozenset())
    return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()
