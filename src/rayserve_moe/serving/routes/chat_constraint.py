"""What the answer of a chat has to keep to: its own constraint after reasoning, or calls of the tools it must call."""

from __future__ import annotations

import json

from rayserve_moe.requests.constraint_fields import Constraint
from rayserve_moe.requests.records import GenerationRequest, RequestError
from rayserve_moe.serving.schemas.openai import ChatBody
from rayserve_moe.text.chat_output import ChatOutput
from rayserve_moe.text.tool_calls.call_grammar import FORMS, call_grammar, content_grammar
from rayserve_moe.text.tool_calls.parameter_schemas import UnwritableSchemaError
from rayserve_moe.text.tool_calls.registry import HARMONY, RESPONSE_TEMPLATE

_CHOICE = "tool_choice"


def chat_constraint(output: ChatOutput, body: ChatBody, *, request: GenerationRequest) -> Constraint | None:
    """Return the constraint of the engine's request. RequestError for one that this checkpoint cannot keep to."""
    constraint = request.constraint
    if body.forced_tools:
        if constraint is not None:
            raise RequestError(f"`{_CHOICE}` is given too: an answer keeps to one constraint", constraint.param)
        return _calls(output, body)._replace(after=output.reasoning_end(request.prompt_ids))
    if constraint is None:
        return None
    if HARMONY in output.format:
        reasoning = FORMS[HARMONY].reasoning
        assert reasoning is not None, "answers in channels may reason"
        return constraint._replace(within=content_grammar(reasoning, special_ids=output.special_ids))
    return constraint._replace(after=output.reasoning_end(request.prompt_ids))


def _calls(output: ChatOutput, body: ChatBody) -> Constraint:
    form = None if RESPONSE_TEMPLATE in output.format else output.call_form()
    if form is None:
        raise RequestError("can be none or auto: how this checkpoint writes calls is not known", _CHOICE)
    functions = [tool["function"] for tool in body.forced_tools]
    allows_several = body.parallel_tool_calls and isinstance(body.tool_choice, str)
    try:
        lark, schemas = call_grammar(form, functions, special_ids=output.special_ids, allows_several=allows_several)
    except UnwritableSchemaError as error:
        raise RequestError(f"the parameters of a tool cannot be used: `{error}` is not supported", _CHOICE) from error
    return Constraint("calls", json.dumps({"lark": lark, "schemas": schemas}, ensure_ascii=False), _CHOICE)
