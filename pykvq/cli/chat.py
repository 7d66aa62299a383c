"""The interactive chat of ``pykvq-run``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pykvq.cli.chat_file import load_chat, save_chat
from pykvq.cli.console import answer_summary, interruptible, kv_summary, note, write
from pykvq.errors import ContextFullError, PykvqError

if TYPE_CHECKING:
    from pykvq.cli.run import Options
    from pykvq.llama import Llama

HELP = {
    "/help": "this list",
    "/reset": "start over",
    "/kv": "what the KV cache is and takes",
    "/save FILE": "keep the chat and its KV cache in a file",
    "/load FILE": "go on with a chat from a file",
    "/quit": "leave (Ctrl-D too); Ctrl-C stops an answer",
}


class Chat:
    """A conversation with a model: its messages, and what a line of input does to them."""

    def __init__(self, llm: Llama, options: Options) -> None:
        self._llm = llm
        self._options = options
        self.messages: list[dict[str, Any]] = options.first_messages()
        self.finished = False

    def handle(self, line: str) -> None:
        """Answers a message or carries out a command. Failures are reported in one line; the chat goes on."""
        line = line.strip()
        if not line:
            return
        try:
            if line.startswith("/"):
                self._command(line)
            else:
                self._answer(line)
        except PykvqError as error:
            note(f"error: {error}")
        except (OSError, ValueError, RuntimeError, MemoryError) as error:  # a file name that cannot be used
            note(f"error: {str(error) or type(error).__name__}")

    def _answer(self, text: str) -> None:
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            generation = self._llm.start_generation(
                self._llm.chat_prompt(messages),
                max_tokens=self._options.max_tokens,
                sampling=self._llm.sampling_params(temperature=self._options.temperature),
            )
        except ContextFullError as error:
            note(f"error: the chat is too long: {error}; /reset starts over")
            return
        texts: list[str] = []
        stopped = False
        try:
            with contextlib.closing(interruptible(generation, self._llm.abort)) as pieces:
                for piece in pieces:
                    texts.append(piece.text)
                    write(piece.text)
        except KeyboardInterrupt:
            stopped = True
        finally:
            if texts:
                write("\n")
                # a stopped answer stays, so that the next message can refer to it
                self.messages = [*messages, {"role": "assistant", "content": "".join(texts)}]
        if stopped:
            note("(stopped)")
        if generation.result.finish_reason == "length" and self._options.max_tokens is None:
            note("the context is full: /reset starts over, or start with a larger --ctx")
        note(answer_summary(generation.result, self._llm.kv_info()))

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        if name in ("/save", "/load"):
            if not argument:
                note(f"error: {name} needs a file name: {name} FILE")
            elif name == "/save":
                self._save(Path(argument).expanduser())
            else:
                self._load(Path(argument).expanduser())
        elif name == "/quit":
            self.finished = True
        elif name == "/reset":
            self._llm.reset()
            self.messages = self._options.first_messages()
            note("started over")
        elif name == "/kv":
            for key, value in self._llm.kv_info().items():
                note(f"{key}: {value}")
        elif name == "/help":
            for command, meaning in HELP.items():
                print(f"{command:<12} {meaning}", file=sys.stderr)
        else:
            note(f"error: unknown command {name}: /help lists them")

    def _save(self, path: Path) -> None:
        save_chat(path, self.messages, self._llm.save_state())
        note(f"saved {len(self.messages)} messages and {self._llm.n_tokens} tokens of KV cache to {path}")

    def _load(self, path: Path) -> None:
        messages, state = load_chat(path)
        self._llm.load_state(state)
        self.messages = messages
        note(f"loaded {len(messages)} messages and {self._llm.n_tokens} tokens of KV cache from {path}")


def run_chat(llm: Llama, options: Options) -> int:
    """Chats until /quit or the end of the input; returns the exit code."""
    chat = Chat(llm, options)
    llm.chat_prompt([*chat.messages, {"role": "user", "content": "?"}])  # a model without a template is refused here
    note(f"{llm.description()}, {llm.model_path}")
    kv = llm.kv_info()
    note(f"context {kv['n_ctx']} tokens, {kv['kv_quant']}: {kv_summary(kv)}; /help lists the commands")
    if kv["n_ctx"] > llm.n_ctx_train():
        note(f"note: the model was trained on {llm.n_ctx_train()} tokens and may lose the thread beyond them")
    for line in _terminal_lines() if sys.stdin.isatty() else sys.stdin:
        chat.handle(line)
        if chat.finished:
            break
    return 0


def _terminal_lines() -> Iterator[str]:
    """Lines typed at a terminal, with editing and a history that outlives the program."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import create_output

    session: PromptSession[str] = PromptSession(history=_history(), output=create_output(stdout=sys.stderr))
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:
            note("/quit or Ctrl-D leaves")
        except EOFError:
            return


def _history() -> Any:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from pykvq.catalog import cache_dir

    class TolerantHistory(FileHistory):
        """A history file that may become unwritable without ending the chat."""

        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):
                super().store_string(string)

    path = cache_dir() / "history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError:
        return InMemoryHistory()
    return TolerantHistory(str(path))
