"""The bodies of requests. Fields that are not listed are passed over, as clients of many makes send their own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

# token ids, texts, or one of either
Prompt = str | list[int] | list[str] | list[list[int]]
Stop = str | list[str] | None
StrictNumber = Annotated[float, Field(strict=True)]


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("no tokens are no answer: give 1 or more, or -1 for as many as there is room for")
    return value


TokenLimit = Annotated[int, AfterValidator(_not_zero)] | None


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = None


class StreamOptions(BaseModel):
    """What a stream has besides the answer."""

    include_usage: bool = False


class _GenerationBody(_Body):
    """Fields that completions and chats share, with llama.cpp's besides OpenAI's."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    temperature: StrictNumber | None = None
    top_p: StrictNumber | None = None
    top_k: int | None = None
    min_p: StrictNumber | None = None
    typical_p: StrictNumber | None = None
    repeat_penalty: StrictNumber | None = None
    frequency_penalty: StrictNumber | None = None
    presence_penalty: StrictNumber | None = None
    mirostat_mode: int | None = None
    mirostat_tau: StrictNumber | None = None
    mirostat_eta: StrictNumber | None = None
    seed: int | None = None
    stop: Stop = None
    logit_bias: dict[str, float] | None = None
    grammar: str | None = None

    def sampling(self) -> dict[str, Any]:
        """The sampling arguments that were given, and a temperature."""
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "typical_p",
            "repeat_penalty",
            "frequency_penalty",
            "presence_penalty",
            "mirostat_mode",
            "mirostat_tau",
            "mirostat_eta",
            "seed",
            "stop",
            "logit_bias",
            "grammar",
        )
        given = {name: getattr(self, name) for name in names}
        return {"temperature": 0.8, **{name: value for name, value in given.items() if value is not None}}


class CompletionBody(_GenerationBody):
    """POST /v1/completions."""

    prompt: Prompt
    suffix: str | None = None
    max_tokens: TokenLimit = 16
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None


class ChatBody(_GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_tokens: TokenLimit = None
    max_completion_tokens: TokenLimit = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesBody(_Body):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    stream: bool = False
    max_output_tokens: TokenLimit = None
    temperature: StrictNumber | None = None
    top_p: StrictNumber | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None


class EmbeddingBody(_Body):
    """POST /v1/embeddings."""

    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class TokenizeBody(_Body):
    """POST /tokenize."""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(_Body):
    """POST /detokenize."""

    tokens: list[int]
