"""Pytest plugin: a tiny model, contexts with tiers on it, and the model that judges them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from native_api import Context, Model
from reference_model import ReferenceModel
from tier_context import N_CTX, N_UBATCH, TIERS, TINY
from tiny_models import TinyModel


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(TINY.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture(scope="session")
def reference() -> ReferenceModel:
    return ReferenceModel(TINY)


@pytest.fixture
def new_context(tiny_model: Model, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Context]:
    """Makes contexts that store K and V unrotated."""
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")

    def new(tiers: str | None = TIERS, **params: Any) -> Context:
        return Context(tiny_model, tiers, **{"n_ctx": N_CTX, "n_ubatch": N_UBATCH, "n_batch": N_UBATCH, **params})

    return new


@pytest.fixture
def deep(tmp_path: Path, new_context: Callable[..., Context]) -> tuple[TinyModel, Model]:
    """Layers enough to fill the graphs that move and turn rows."""
    tiny = TinyModel(n_layer=30, n_embd=32, n_ff=32, n_head=1, n_head_kv=1)
    return tiny, Model(tiny.write(tmp_path / "deep.gguf"))
