"""One context and the tokens it holds: prompt evaluation in pieces, reuse of a common prefix, state."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pykvq.errors import InvalidArgumentError, StateError
from pykvq.runtime import Buffer, Context, Model
from pykvq.turn import Turn

if TYPE_CHECKING:
    from pykvq.prompt_cache import PromptCache

# a saved state: this line, the CRC-32 of all after it, the length of the JSON part, the JSON part, the native state
_STATE_MAGIC = b"PYKVQ-STATE-1\n"
_STATE_HEADER = struct.Struct("<II")
_MAX_TOKEN = 2**31


class Engine:
    """A context, the token ids that its sequence 0 holds, and the turn to use it.

    ``n_ctx`` is how many tokens the sequence may hold.

    The methods must be called by whoever has the turn.
    """

    def __init__(self, model: Model, context: Context, n_ctx: int) -> None:
        self.model = model
        self.context = context
        self.n_ctx = n_ctx
        self.turn = Turn()
        self.cache: PromptCache | None = None
        # appended to before a decode and corrected by sync() if that fails, so that no interrupt can leave it short
        self.tokens: list[int] = []
        # whether the context's logits are those after the last token
        self.has_logits = False
        # which token of the last batch has the logits that the newest token was drawn from; -1: the last one
        self.drawn_at = -1

    @property
    def n_free(self) -> int:
        """Tokens that the sequence has room for."""
        return self.n_ctx - len(self.tokens)

    def sync(self) -> None:
        """Makes the token list and the KV cache agree after a decode that may have stopped half-way."""
        n_held = self.context.pos_max() + 1
        if n_held < len(self.tokens):
            del self.tokens[n_held:]
        elif n_held > len(self.tokens):
            self._truncate(len(self.tokens))

    def reset(self) -> None:
        """Forgets all tokens."""
        self.has_logits = False
        self.tokens.clear()
        self.context.kv_clear()

    def keep_prefix(self, tokens: Sequence[int]) -> int:
        """Keeps what the cache has in common with ``tokens`` and removes the rest.

        The last of ``tokens`` is never kept, because sampling needs its logits.

        Returns:
            The number of leading tokens that need no evaluation.
        """
        self.sync()
        self.truncate(min(common_prefix(self.tokens, tokens), len(tokens) - 1))
        return len(self.tokens)

    def truncate(self, n_keep: int) -> None:
        """Removes all but the first n_keep tokens, or all tokens where the cache cannot do that."""
        if n_keep < len(self.tokens):
            self._truncate(n_keep)

    def _truncate(self, n_keep: int) -> None:
        """Removes all but the first n_keep tokens, or all tokens where the cache cannot do that."""
        self.has_logits = False
        if self.context.kv_keep(n_keep):
            del self.tokens[n_keep:]
        else:
            self.reset()

    def evaluate(
        self, tokens: Sequence[int], on_piece: Callable[[int], None] | None = None, *, all_logits: bool = False
    ) -> None:
        """Computes tokens after those held, n_batch at a time.

        The logits of the last token are kept. With ``on_piece`` or ``all_logits`` those of every token of the last
        piece are, and ``on_piece`` is called with the length of each piece after its decode.

        Raises:
            ContextFullError: no room. AbortedError: stopped; the tokens that were computed remain.
        """
        self.drawn_at = -1
        n_batch = self.context.info.n_batch
        for start in range(0, len(tokens), n_batch):
            piece = tokens[start : start + n_batch]
            is_last = start + len(piece) == len(tokens)
            all_wanted = all_logits or on_piece is not None
            wanted = [all_wanted or (is_last and i == len(piece) - 1) for i in range(len(piece))]
            first_pos = len(self.tokens)
            self.tokens.extend(piece)
            self.has_logits = False
            try:
                self.context.decode(piece, first_pos, wanted)
            except BaseException:
                self.sync()
                raise
            self.has_logits = wanted[-1]
            if on_piece is not None:
                on_piece(len(piece))

    def save_state(self) -> bytes:
        """The tokens and their KV cache as bytes that load_state takes."""
        self.sync()
        header = json.dumps({"tokens": self.tokens}).encode("ascii")
        body = header + self.context.save_state()
        checksum = zlib.crc32(body)
        return _STATE_MAGIC + _STATE_HEADER.pack(checksum, len(header)) + body

    def load_state(self, data: Buffer) -> None:
        """Replaces the tokens and the KV cache by saved ones.

        Raises:
            StateError: damaged, or of another model or KV type; nothing is changed then.
            InvalidArgumentError: not bytes.
        """
        tokens, native_state = _parse_state(data, self.model.info.n_vocab)
        self.sync()
        before = self.context.save_state()
        self.has_logits = False
        self.context.load_state(native_state)
        n_held = self.context.pos_max() + 1
        if n_held != len(tokens):
            self.context.load_state(before)
            raise StateError(f"the saved state lists {len(tokens)} tokens and holds {n_held}: nothing was changed")
        self.tokens = tokens


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Leading tokens that two lists have in common."""
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)


def state_tokens(data: bytes) -> list[int]:
    """The tokens that a saved state holds.

    Raises:
        StateError: it is damaged, or is not a state.
    """
    return _parse_state(data, _MAX_TOKEN)[0]


def _parse_state(data: Buffer, n_vocab: int) -> tuple[list[int], memoryview]:
    """The tokens and the native state in saved bytes, both checked as far as can be without the context."""
    try:
        view = memoryview(data).cast("B")
    except TypeError as error:
        raise InvalidArgumentError(f"a state is contiguous bytes, got {type(data).__name__}: {error}") from error
    offset = len(_STATE_MAGIC) + _STATE_HEADER.size
    if len(view) < offset or view[: len(_STATE_MAGIC)] != _STATE_MAGIC:
        raise StateError("this is not a state that pykvq saved")
    checksum, header_length = _STATE_HEADER.unpack_from(view, len(_STATE_MAGIC))
    body = view[offset:]
    if zlib.crc32(body) != checksum:
        raise StateError("the saved state is damaged or cut short: its checksum does not match")
    return _parse_tokens(bytes(body[:header_length]), n_vocab), body[header_length:]


def _parse_tokens(header: bytes, n_vocab: int) -> list[int]:
    """The token ids in the JSON part of a saved state."""
    try:
        tokens = json.loads(header)["tokens"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StateError(f"the saved state is damaged: its list of tokens cannot be read ({error!r})") from error
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < n_vocab for token in tokens):
        raise StateError(f"the saved state is damaged: its tokens are no list of ids below {n_vocab}")
    return tokens
