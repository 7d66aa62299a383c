"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from pykvq.async_llama import AsyncLlama
from pykvq.responses import Plan, merge_plans
from pykvq.server.context import answer_plan, without_none
from pykvq.server.errors import ApiError
from pykvq.server.schemas import ChatBody, CompletionBody, Prompt

router = APIRouter()


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """Completes a prompt, or several at once."""
    if body.best_of is not None and body.best_of != body.n:
        raise ApiError(400, f"best_of={body.best_of} is not supported: use n", param="best_of")

    def make_plan(name: str, llm: AsyncLlama) -> Plan:
        plans = [
            llm.plan_completion(
                prompt,
                model=name,
                n=body.n,
                stream=body.stream,
                max_tokens=body.max_tokens,
                echo=body.echo,
                **without_none(suffix=body.suffix, logprobs=body.logprobs),
                **body.sampling(),
            )
            for prompt in _prompts(body.prompt)
        ]
        return merge_plans(plans)

    return await answer_plan(request, body.model, make_plan, _wants_usage(body))


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answers a chat."""

    def make_plan(name: str, llm: AsyncLlama) -> Plan:
        max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        return llm.plan_chat_completion(
            body.messages,
            model=name,
            n=body.n,
            stream=body.stream,
            max_tokens=max_tokens,
            parallel_tool_calls=body.parallel_tool_calls,
            **without_none(
                tools=body.tools,
                tool_choice=body.tool_choice,
                functions=body.functions,
                function_call=body.function_call,
                response_format=body.response_format,
                logprobs=body.logprobs,
                top_logprobs=body.top_logprobs,
                chat_template_kwargs=body.chat_template_kwargs,
            ),
            **body.sampling(),
        )

    return await answer_plan(request, body.model, make_plan, _wants_usage(body))


def _wants_usage(body: CompletionBody | ChatBody) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def _prompts(prompt: Prompt) -> list[str | list[int]]:
    """The prompts of a body: one text or list of token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "the prompt is empty", param="prompt")
    if isinstance(prompt[0], int):
        return [[int(token) for token in prompt]]
    return list(prompt)
