"""Calls of the API as checked plans: from arguments in llama-cpp-python's names to requests and response shapes."""

from __future__ import annotations

import functools
import random
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias

from pykvq import peer_arguments
from pykvq.arguments import require_type
from pykvq.chat_template import Message, check_messages
from pykvq.errors import InvalidArgumentError
from pykvq.loaded_model import RANDOM_SEED, LoadedModel
from pykvq.request import LogitsProcessor, Request, Result, StoppingCriterion, callables
from pykvq.responses import ChatWriter, CompletionWriter, Plan, ResponseHead
from pykvq.sampling import SamplingParams
from pykvq.text_stream import stop_strings
from pykvq.tool_calls import ToolCallParser, ToolFormat, tool_format
from pykvq.tool_choice import ToolUse, tool_constraint, tool_use, with_parsed_arguments, with_tool_prompt

if TYPE_CHECKING:
    from pykvq.constraint import Constraint

_MAX_LOGPROBS = 100
_MAX_CHOICES = 128
# what templates are given by us
_TEMPLATE_NAMES = frozenset({"self", "messages", "tools"})

LogitsProcessors = Sequence[LogitsProcessor] | LogitsProcessor | None
StoppingCriteria = Sequence[StoppingCriterion] | StoppingCriterion | None
Grammar: TypeAlias = "str | Constraint | None"
_P = ParamSpec("_P")


def _answered(plan: Callable[_P, Plan]) -> Callable[_P, Any]:
    """The method that carries out what the method ``plan`` plans, with the same arguments."""

    @functools.wraps(plan)
    def answer(*args: _P.args, **values: _P.kwargs) -> Any:
        model: Any = args[0]
        return model._respond(plan(*args, **values))

    answer.__name__ = plan.__name__.replace("plan_", "create_")
    return answer


class TextModel(LoadedModel):
    """A model that answers prompts and chats. ``plan_*`` checks a call, ``create_*`` also carries it out."""

    def plan_completion(
        self,
        prompt: str | bytes | Sequence[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | Sequence[str] | None = None,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        top_k: int = 40,
        stream: bool = False,
        seed: int | None = None,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: StoppingCriteria = None,
        logits_processor: LogitsProcessors = None,
        grammar: Grammar = None,
        logit_bias: Mapping[int, float] | None = None,
        n: int = 1,
        **unsupported: Any,
    ) -> Plan:
        """Completes a text.

        Args:
            prompt: text, or token ids (to which no BOS is added).
            suffix: text after a gap that the answer fills, for models with fill-in-the-middle tokens.
            max_tokens: most tokens of the answer; None or <= 0 means until the context is full.
            temperature, top_k, top_p, min_p, typical_p: how the next token is drawn; temperature 0 is greedy.
            logprobs: report the log probability of each token and of that many likeliest ones.
            echo: put the prompt before the answer.
            stop: strings that end the answer and are not part of it.
            frequency_penalty, presence_penalty, repeat_penalty: make tokens of the answer less likely to come again.
            stream: return an iterator of chunks instead of one dict.
            seed: of the draw; None takes the next one of the model's seeds, -1 a random one.
            mirostat_mode, mirostat_tau, mirostat_eta: 1 or 2 aims at a constant surprise (Basu et al. 2020,
                arXiv:2007.14966) instead of filtering.
            model: the name to report.
            stopping_criteria: callables (ids, scores) -> bool that end the answer before the token just drawn.
            logits_processor: callables (ids, scores) -> scores, before everything else.
            grammar: what the answer must follow: GBNF or Lark text, or a ``pykvq.constraint.Constraint``.
            logit_bias: added to the logits, by token id.
            n: number of answers, which differ by their seeds.
            unsupported: arguments of llama-cpp-python that pykvq has not; they must have their default.

        Returns:
            A dict in the shape of OpenAI's text_completion, or an iterator of such chunks.

        Raises:
            ContextFullError: the prompt does not fit; the message has both numbers.
            InvalidArgumentError, AbortedError, BusyError, ClosedError.
        """
        peer_arguments.refuse("create_completion", unsupported)
        requests = self._requests(
            n,
            self._infill_tokens(prompt, suffix) if suffix is not None else prompt,
            max_tokens=max_tokens,
            stop=stop,
            seed=seed,
            sampling={
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
                "min_p": min_p,
                "typical_p": typical_p,
                "repeat_penalty": repeat_penalty,
                "frequency_penalty": frequency_penalty,
                "presence_penalty": presence_penalty,
                "mirostat_mode": mirostat_mode,
                "mirostat_tau": mirostat_tau,
                "mirostat_eta": mirostat_eta,
                "logit_bias": logit_bias,
            },
            n_logprobs=_checked_logprobs("logprobs", logprobs),
            prompt_logprobs=echo and logprobs is not None,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            constraint=grammar_argument(grammar),
        )
        prompt_text = self._prompt_text(prompt) if echo or logprobs is not None else ""
        make_writer = partial(CompletionWriter, echo=prompt_text if echo else "", text_offset=len(prompt_text))
        head = ResponseHead("cmpl-", "text_completion", self.model_path if model is None else model)
        return Plan(head, requests, partial(make_writer, head), stream)

    def plan_chat_completion(
        self,
        messages: Sequence[Message],
        functions: Sequence[Mapping[str, Any]] | None = None,
        function_call: str | Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        temperature: float = 0.2,
        top_p: float = 0.95,
        top_k: int = 40,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        stream: bool = False,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        logits_processor: LogitsProcessors = None,
        grammar: Grammar = None,
        logit_bias: Mapping[int, float] | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        n: int = 1,
        **unsupported: Any,
    ) -> Plan:
        """Answers a chat, through the model's chat template.

        Args:
            messages: dicts with "role" and "content".
            tools: functions that the model may call, {"type": "function", "function": {...}} each.
            tool_choice: "auto", "none", "required", or {"type": "function", "function": {"name": ...}}.
            functions, function_call: the older form of both.
            parallel_tool_calls: whether one answer may have several calls.
            response_format: {"type": "json_object"}, with a "schema" if wanted, or {"type": "json_schema",
                "json_schema": {"schema": ...}}: the answer is JSON, and of the schema.
            logprobs, top_logprobs: report each token's log probability, and that many likeliest ones.
            chat_template_kwargs: further variables of the template, such as ``{"enable_thinking": False}``.
            max_tokens and the rest: as in ``create_completion``.

        Returns:
            A dict in the shape of OpenAI's chat.completion, or an iterator of chat.completion.chunk dicts.

        Raises:
            ChatTemplateError: no template, or it refuses the messages. ContextFullError: the chat does not fit.
            InvalidArgumentError, AbortedError, BusyError, ClosedError.
        """
        peer_arguments.refuse("create_chat_completion", unsupported)
        if top_logprobs is not None and not logprobs:
            raise InvalidArgumentError(f"top_logprobs={top_logprobs} needs logprobs=True")
        require_type("functions", functions, Iterable, optional=True)
        require_type("chat_template_kwargs", chat_template_kwargs, Mapping, optional=True)
        if functions:
            tools = [{"type": "function", "function": function} for function in functions]
            tool_choice = function_call
            parallel_tool_calls = False
        use = tool_use(tools, tool_choice, parallel_tool_calls)
        constraint = _chat_constraint(use, self.tool_format if use else None, response_format, grammar)
        requests = self._requests(
            n,
            self._chat_text(messages, use, chat_template_kwargs or {}),
            max_tokens=max_tokens,
            stop=stop,
            seed=seed,
            sampling={
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
                "min_p": min_p,
                "typical_p": typical_p,
                "repeat_penalty": repeat_penalty,
                "frequency_penalty": frequency_penalty,
                "presence_penalty": presence_penalty,
                "mirostat_mode": mirostat_mode,
                "mirostat_tau": mirostat_tau,
                "mirostat_eta": mirostat_eta,
                "logit_bias": logit_bias,
            },
            n_logprobs=_checked_logprobs("top_logprobs", top_logprobs or 0) if logprobs else None,
            logits_processor=logits_processor,
            constraint=constraint,
            show_special=use is not None and self.tool_format.markers_are_special,
        )
        head = ResponseHead("chatcmpl-", "chat.completion", self.model_path if model is None else model)

        def make_writer(request: Request, result: Result, index: int) -> ChatWriter:
            parser = ToolCallParser(self.tool_format, use.names, required=use.required) if use is not None else None
            return ChatWriter(head, request, result, index, parser=parser, legacy_functions=bool(functions))

        return Plan(head, requests, make_writer, stream)

    create_completion = _answered(plan_completion)

    create_chat_completion = _answered(plan_chat_completion)

    def __call__(self, *args: Any, **values: Any) -> Any:
        """``create_completion``."""
        return self.create_completion(*args, **values)

    @abstractmethod
    def _respond(self, plan: Plan) -> Any:
        """Carries a plan out."""

    @property
    def tool_format(self) -> ToolFormat:
        """How the model writes tool calls."""
        return tool_format(self.template_source)

    def _chat_text(self, messages: Sequence[Message], use: ToolUse | None, variables: Mapping[str, Any]) -> str:
        """The prompt of a chat with tools, which the template or a system message describes."""
        checked = with_parsed_arguments(check_messages(messages))
        taken = [name for name in variables if not isinstance(name, str) or name in _TEMPLATE_NAMES]
        if taken:
            raise InvalidArgumentError(
                f"chat_template_kwargs has {', '.join(map(repr, taken))}: names are text, and not one of "
                f"{', '.join(sorted(_TEMPLATE_NAMES))}"
            )
        if "tools" in (self.template_source or ""):
            return self.chat_prompt(checked, tools=list(use.tools) if use is not None else None, **variables)
        return self.chat_prompt(with_tool_prompt(checked, use), **variables)

    def _requests(
        self,
        n: int,
        prompt: str | bytes | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        sampling: Mapping[str, Any],
        n_logprobs: int | None = None,
        prompt_logprobs: bool = False,
        logits_processor: LogitsProcessors = None,
        stopping_criteria: StoppingCriteria = None,
        constraint: Constraint | None = None,
        show_special: bool = False,
    ) -> tuple[Request, ...]:
        """The requests of n answers; their seeds follow one another."""
        if self._makes_embeddings:
            raise InvalidArgumentError("this model was loaded with embedding=True: load it without to generate text")
        if _checked_int("n", n) not in range(1, _MAX_CHOICES + 1):
            raise InvalidArgumentError(f"n must be between 1 and {_MAX_CHOICES} answers, got {n}")
        if constraint is not None:
            # here rather than where it would hold up other requests: the first time takes a second
            constraint.start(self._model)
        first = self.sampling_params(seed=seed, **sampling)
        request = Request(
            prompt=self._prompt_tokens(prompt),
            max_tokens=None if max_tokens is None else _checked_int("max_tokens", max_tokens),
            sampling=first,
            stop=stop_strings(stop),
            n_logprobs=n_logprobs,
            prompt_logprobs=prompt_logprobs,
            logits_processors=callables("logits_processor", logits_processor),
            stopping_criteria=callables("stopping_criteria", stopping_criteria),
            constraint=constraint,
            draft=self._draft,
            show_special=show_special,
        )
        return tuple(replace(request, sampling=replace(first, seed=first.seed + i)) for i in range(n))

    def _infill_tokens(self, prompt: str | bytes | Sequence[int], suffix: str) -> list[int]:
        """The prompt for the text between ``prompt`` and ``suffix``: prefix, suffix, middle."""
        info = self._model.info
        if min(info.token_fim_prefix, info.token_fim_suffix, info.token_fim_middle) < 0:
            raise InvalidArgumentError(
                "suffix needs a model with fill-in-the-middle tokens, and this one has none: leave it out"
            )
        if not isinstance(suffix, str):
            raise InvalidArgumentError(f"suffix must be text, got {type(suffix).__name__}")
        before = self.tokenize(prompt, add_bos=False) if isinstance(prompt, (str, bytes)) else list(prompt)
        start = [info.token_bos] if info.add_bos and info.token_bos >= 0 else []
        after = self.tokenize(suffix, add_bos=False)
        return [*start, info.token_fim_prefix, *before, info.token_fim_suffix, *after, info.token_fim_middle]

    def _embedding_tokens(self, input: Any, truncate: bool, limit: int) -> list[list[int]]:
        """The tokens of one text or several (or of lists of token ids), at most ``limit`` each if they may be cut."""
        texts = [input] if isinstance(input, (str, bytes)) else input
        if not isinstance(texts, (list, tuple)):
            raise InvalidArgumentError(f"the input must be a text or a list of texts, got {type(input).__name__}")
        tokens = [
            self.tokenize(text) if isinstance(text, (str, bytes)) else self._checked_tokens(text) for text in texts
        ]
        return [ids[:limit] for ids in tokens] if truncate else tokens

    def _prompt_text(self, prompt: str | bytes | Sequence[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        raw = prompt if isinstance(prompt, bytes) else self.detokenize(prompt)
        return raw.decode("utf-8", "replace")

    def sampling_params(
        self, *, seed: int | None = None, logit_bias: Mapping[int, float] | None = None, **values: Any
    ) -> SamplingParams:
        """Sampling parameters with a seed drawn from the model's seeds where none is given."""
        if seed is None:
            seed = self._seeds.getrandbits(31)
        elif seed in (-1, RANDOM_SEED):
            seed = random.SystemRandom().getrandbits(31)
        bias = _checked_bias(logit_bias)
        self._checked_tokens(bias)
        # there are no more tokens than that to look back at
        last_n = self.n_ctx() if self._last_n_tokens < 0 else min(self._last_n_tokens, self.n_ctx())
        return SamplingParams(seed=_checked_int("seed", seed), logit_bias=bias, last_n_tokens=last_n, **values)


def _checked_logprobs(name: str, value: int | None) -> int | None:
    if value is None:
        return None
    if not 0 <= _checked_int(name, value) <= _MAX_LOGPROBS:
        raise InvalidArgumentError(f"{name} must be between 0 and {_MAX_LOGPROBS} tokens, got {value!r}")
    return value


def _checked_int(name: str, value: Any) -> int:
    require_type(name, value, int)
    return int(value)


def _checked_bias(bias: Any) -> dict[int, float]:
    if bias is not None and not isinstance(bias, Mapping):
        raise InvalidArgumentError(f"logit_bias must be a dict of token ids and numbers, got {bias!r}")
    try:
        return {int(token): float(value) for token, value in (bias or {}).items()}
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"logit_bias must be a dict of token ids and numbers: {error}") from error


def grammar_argument(grammar: Any) -> Constraint | None:
    """The constraint of a grammar argument: text, a Constraint, or an object of llama-cpp-python's LlamaGrammar."""
    if grammar is None:
        return None
    from pykvq.constraint import Constraint, grammar_constraint

    if isinstance(grammar, Constraint):
        return grammar
    text = grammar if isinstance(grammar, str) else getattr(grammar, "_grammar", None)
    if not isinstance(text, str):
        raise InvalidArgumentError(
            f"grammar must be GBNF or Lark text, or a pykvq.constraint.Constraint, got {grammar!r}"
        )
    return grammar_constraint(text)


def _chat_constraint(
    use: ToolUse | None, format: ToolFormat | None, response_format: Any, grammar: Grammar
) -> Constraint | None:
    """The one grammar that a chat's arguments ask for."""
    of_format = _format_constraint(response_format)
    if of_format is not None and grammar is not None:
        raise InvalidArgumentError("response_format and grammar cannot be combined: give one of them")
    if use is None or format is None:
        return of_format or grammar_argument(grammar)
    if of_format is not None or grammar is not None:
        raise InvalidArgumentError("response_format and grammar cannot be combined with tools: use tool_choice='none'")
    return tool_constraint(use, format)


def _format_constraint(response_format: Any) -> Constraint | None:
    if response_format is None:
        return None
    from pykvq.constraint import json_object_constraint, json_schema_constraint

    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        schema = response_format.get("schema")
        return json_object_constraint() if schema is None else json_schema_constraint(schema)
    if kind == "json_schema":
        outer = response_format.get("json_schema")
        schema = outer.get("schema") if isinstance(outer, Mapping) else response_format.get("schema")
        if isinstance(schema, Mapping):
            return json_schema_constraint(schema)
        raise InvalidArgumentError(
            'response_format must be {"type": "json_schema", "json_schema": {"schema": {...}}}: it has no schema'
        )
    raise InvalidArgumentError(
        f"response_format must have type 'text', 'json_object' or 'json_schema', got {response_format!r}"
    )
