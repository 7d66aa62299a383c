"""How the messages of a chat are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nicegui import ui

from pykvq.desktop.answer import Answer
from pykvq.desktop.conversations import Message
from pykvq.desktop.markdown import to_blocks
from pykvq.desktop.pages.layout import icon_button

_ROLES = {"user": "You", "assistant": "Model"}
_COPY = '<button type="button" aria-label="Copy code">Copy</button>'


class MessageView:
    """A message with its buttons.

    Args:
        actions: what its buttons do, by name: "edit", "regenerate" and "show", called with a message or its id.
    """

    def __init__(self, message: Message, actions: Mapping[str, Callable[[Any], Any]]) -> None:
        self._message = message
        self._text = message.content
        self._blocks: list[ui.html] = []
        with (
            ui.element("article")
            .classes(f"message {message.role}")
            .props(f'aria-label="{_ROLES[message.role]}" data-message="{message.id}"')
        ):
            for attachment in message.attachments:
                ui.chip(attachment.name, icon="attach_file").props("outline dense")
            self._body = ui.element("div").classes("text")
            self._note = ui.label().classes("muted")
            with ui.row(wrap=True).classes("items-center").style("gap: .2rem"):
                self._buttons(actions)
        self.show(message.content, message.state, message.details)

    def grow(self, answer: Answer) -> None:
        """Shows an answer as far as it has come."""
        details = answer.details()
        if answer.save_error is not None:
            details["error"] = answer.save_error
        self.show(answer.text, answer.state, details)

    def show(self, text: str, state: str, details: dict[str, Any]) -> None:
        """Shows a text; blocks that are as before are left alone."""
        self._text = text
        blocks = [_with_copy_button(block) for block in to_blocks(text)]
        for view, block in zip(self._blocks, blocks, strict=False):
            if view.content != block:
                view.set_content(block)
        for view in self._blocks[len(blocks) :]:
            view.delete()
        del self._blocks[len(blocks) :]
        with self._body:
            for block in blocks[len(self._blocks) :]:
                self._blocks.append(ui.html(block, sanitize=False))  # to_blocks has sanitized it
        note = _note(state, details) if self._message.role == "assistant" else ""
        if self._note.text != note:
            self._note.set_text(note)
            self._note.classes(replace="error" if "error" in details else "muted")

    def _buttons(self, actions: Mapping[str, Callable[[Any], Any]]) -> None:
        message = self._message
        icon_button("content_copy", "Copy message", lambda: ui.clipboard.write(self._text)).props("size=sm")
        icon_button("edit", "Edit message", lambda: actions["edit"](message)).props("size=sm")
        if message.role == "assistant":
            icon_button("refresh", "Answer again", lambda: actions["regenerate"](message.id)).props("size=sm")
        if len(message.siblings) > 1:
            place = message.siblings.index(message.id)
            for step, icon, name in ((-1, "chevron_left", "Branch before"), (1, "chevron_right", "Branch after")):
                if step == 1:
                    ui.label(f"{place + 1} / {len(message.siblings)}").classes("muted").props("data-branch")
                target = place + step
                button = icon_button(icon, name).props("size=sm")
                if 0 <= target < len(message.siblings):
                    button.on_click(lambda target=target: actions["show"](message.siblings[target]))
                else:
                    button.disable()


def _with_copy_button(block: str) -> str:
    return f'<div class="code-block">{block}{_COPY}</div>' if block.startswith("<pre") else block


def _note(state: str, details: dict[str, Any]) -> str:
    """One line about an answer: how it went, and how fast."""
    if state == "streaming" and not details.get("n_tokens") and "error" not in details:
        return "Thinking about the question…"
    parts = []
    if "error" in details:
        parts.append(str(details["error"]))
    if state == "stopped":
        parts.append("interrupted when the app ended" if details.get("interrupted") else "stopped")
    if details.get("finish_reason") == "length":
        parts.append("ended at the limit of its length")
    if details.get("n_tokens"):
        parts.append(f"{details['n_tokens']:,} tokens")
    if details.get("tokens_per_second"):
        parts.append(f"{details['tokens_per_second']:.1f} tokens/s")
    if details.get("first_token_seconds") is not None:
        parts.append(f"first after {details['first_token_seconds']:.2f} s")
    return " · ".join(parts)
