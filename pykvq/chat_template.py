"""Renders chat messages to a prompt with the model's own jinja2 template, the way transformers does.

Source of the conventions (names, filters, block trimming): the documentation of chat templates in Hugging Face
transformers. A template comes with the model file, so it runs in jinja2's immutable sandbox.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from pykvq.errors import ChatTemplateError, InvalidArgumentError

Message = Mapping[str, Any]


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts ``{% generation %}``, which only marks the assistant's text for training, and renders its body."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the template's text.
        bos_token, eos_token: text of the model's special tokens, "" if it has none.

    Raises:
        ChatTemplateError: the template cannot be parsed.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"the chat template cannot be parsed: {_one_line(error)}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text for a list of messages.

        Args:
            messages: dicts with "role" and "content" (text, a list of text parts, or None beside tool calls).
            add_generation_prompt: end with the opening of the assistant's turn.
            tools, documents: passed to the template as they are.
            variables: further variables of the template, such as ``enable_thinking``.

        Raises:
            InvalidArgumentError: a message has no role or a content that is not text.
            ChatTemplateError: the template refuses the messages or fails.
        """
        values = {**self._tokens, "tools": tools, "documents": documents, **variables}
        checked = check_messages(messages)
        try:
            return self._template.render(messages=checked, add_generation_prompt=add_generation_prompt, **values)
        except Exception as error:  # a template can fail with any exception that an expression raises
            raise ChatTemplateError(f"the chat template refuses these messages: {_one_line(error)}") from error


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as plain dicts with text content.

    Raises:
        InvalidArgumentError: names the first message that is wrong, and how.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidArgumentError("messages must be a list of at least one dict with 'role' and 'content'")
    return [_check_message(i, message) for i, message in enumerate(messages)]


def _check_message(i: int, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidArgumentError(f"messages[{i}] must be a dict with 'role' and 'content', got {message!r}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidArgumentError(f"messages[{i}] needs a 'role' such as 'user', got {role!r}")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        content = "\n".join(_part_text(i, part) for part in content)
    elif content is None and not message.get("tool_calls"):
        raise InvalidArgumentError(f"messages[{i}] (role {role!r}) has no 'content'")
    elif content is not None and not isinstance(content, str):
        raise InvalidArgumentError(f"messages[{i}]['content'] must be text, got {type(content).__name__}")
    return {**message, "content": content}


def _part_text(i: int, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidArgumentError(f"messages[{i}]: only text parts are supported, got {kind!r}")


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which models were not trained on
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {text}"
