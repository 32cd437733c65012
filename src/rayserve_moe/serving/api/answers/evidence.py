"""Optional fields of OpenAI answers besides text: ids, versions, scored prompts."""

from __future__ import annotations

from collections.abc import Sequence

from rayserve_moe.answers.native import hidden_states, native_answer, output_versions, prompt_logprobs_of
from rayserve_moe.requests.records import GenerationRequest, ModelCard
from rayserve_moe.requests.results import ChoiceResult, DraftCounts
from rayserve_moe.serving.api.answers.logprobs import echoed_text
from rayserve_moe.serving.api.answers.request_streams import RequestStreams
from rayserve_moe.serving.api.schemas.openai import ChatBody, CompletionBody
from rayserve_moe.text.tokenizer import Tokenizer


class EvidenceWriter:
    """Writer of requested fields; other fields are absent.

    `so_far` is the accumulated choice and `delta` its new output. Prompt fields are in the choices of completions, and
    beside the choices of a chat.
    """

    def __init__(
        self, body: CompletionBody | ChatBody, *, card: ModelCard, tokenizer: Tokenizer, streams: RequestStreams
    ) -> None:
        self._body, self._card, self._tokenizer, self._streams = body, card, tokenizer, streams

    def of_choice(self, choice: int, delta: ChoiceResult, *, so_far: ChoiceResult, is_first: bool) -> dict:
        """Return the fields of a choice, in vLLM's order."""
        body, request = self._body, self._streams.request_of_choice[choice]
        fields: dict = {"token_ids": list(delta.token_ids)} if body.return_token_ids else {}
        if not isinstance(body, ChatBody):
            fields |= self._of_prompt(request, so_far, is_first=is_first)
        elif body.return_prompt_token_ids:
            fields |= {"prompt_token_ids": request.prompt_ids.tolist(), "response_token_ids": list(so_far.token_ids)}
        if delta.finish is not None and (states := hidden_states(request, so_far)) is not None:
            fields["hidden_states"] = states
        if body.return_weight_versions and delta.finish is not None:
            fields["weight_versions"] = output_versions(request, so_far)
        return fields

    def of_chat(self, results: Sequence[ChoiceResult], *, is_first: bool = True) -> dict:
        """Return the fields beside the choices."""
        if not isinstance(self._body, ChatBody):
            return {}
        request = self._streams.request_of_choice[0]
        fields = self._of_prompt(request, results[0], is_first=is_first)
        if self._body.return_prompt_text and is_first:
            fields["prompt_text"] = echoed_text(self._tokenizer, request.prompt_ids.tolist())
        return fields

    def sglext(self, results: Sequence[ChoiceResult]) -> dict:
        """Return the object of SGLang's extensions beside the choices; empty if none is requested."""
        body, request = self._body, self._streams.request_of_choice[0]
        found: dict = {}
        if body.return_cached_tokens_details:
            found["cached_tokens_details"] = {"device": results[0].num_cached_tokens, "host": 0}
        if body.return_spec_tokens_details:
            details = [draft_details(result.drafts) for result in results]
            found["spec_tokens_details"] = details[0] if len(details) == 1 else details
        if isinstance(body, ChatBody) and body.return_input_ids_in_sglext:
            found["input_ids"] = request.prompt_ids.tolist()
        if isinstance(body, ChatBody) and body.return_output_ids_in_sglext:
            found["output_ids"] = [list(result.token_ids) for result in results]
        return {"sglext": found} if found else {}

    def meta_info(self, choice: int, result: ChoiceResult) -> dict:
        """Return `meta_info` as in `/generate`, without routing; empty unless requested."""
        body = self._body
        if not isinstance(body, ChatBody) or not body.return_meta_info:
            return {}
        answer = native_answer(
            self._streams.request_of_choice[choice],
            result,
            card=self._card,
            e2e_latency_s=self._streams.elapsed_s[choice],
            return_logprob=body.logprobs,
        )
        return answer["meta_info"]

    def _of_prompt(self, request: GenerationRequest, result: ChoiceResult, *, is_first: bool) -> dict:
        fields: dict = {}
        if (num_top := self._body.prompt_logprobs) is not None:
            fields["prompt_logprobs"] = prompt_logprobs(request, result, num_top=num_top, tokenizer=self._tokenizer)
        if self._body.return_token_ids and is_first:
            fields["prompt_token_ids"] = request.prompt_ids.tolist()
        return fields


def draft_details(drafts: DraftCounts) -> dict:
    """Return the counts of drafts, as in SGLang's `spec_tokens_details`."""
    return {
        "spec_accept_rate": drafts.accepted / max(drafts.drafted, 1),
        "spec_accept_length": 1 + drafts.accepted / drafts.chains if drafts.chains else 0.0,
        "spec_num_correct_drafts": drafts.accepted,
        "spec_num_proposed_drafts": drafts.drafted,
        "spec_verify_ct": drafts.chains,
    }


def prompt_logprobs(
    request: GenerationRequest, result: ChoiceResult, *, num_top: int, tokenizer: Tokenizer | None = None
) -> list[dict[str, dict] | None]:
    """Return an object per prompt token, by token id: the token itself, then the likeliest; null for the first token.

    Clients read the first value of an object as the token's own. A tokenizer adds the text of every token.
    """
    written: list[dict[str, dict] | None] = []
    for tokens in prompt_logprobs_of(result, request.prompt_ids.tolist(), num_top=num_top):
        entries = (
            None
            if tokens is None
            else {
                str(token.token_id): {
                    "logprob": token.logprob,
                    "rank": token.rank,
                    **({"decoded_token": tokenizer.token_text(token.token_id)} if tokenizer else {}),
                }
                for token in tokens
            }
        )
        written.append(entries)
    return written
