"""A llama model file with its weights, in the shape that the reference model and the reader of saved tiers ask for."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray


class FileModel:
    """What TinyModel is to a generated file this is to a given one."""

    arch = "llama"
    window = 0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = gguf.GGUFReader(path)
        assert self._value("general.architecture") == self.arch
        self.n_layer = self._value("llama.block_count")
        self.n_embd = self._value("llama.embedding_length")
        self.n_head = self._value("llama.attention.head_count")
        self.n_head_kv = self._value("llama.attention.head_count_kv")
        self.head_dim_k = self.dim_v = self.n_embd // self.n_head
        self.rope_base = self._value("llama.rope.freq_base")
        self.rms_eps = self._value("llama.attention.layer_norm_rms_epsilon")

    def _value(self, key: str):
        return self.reader.fields[key].contents()

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """All tensors in float32, matrices as [outputs, inputs]."""
        return {t.name: gguf.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]) for t in self.reader.tensors}

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """The tensors; output.weight is the embedding's where the file has none."""
        tensors = self.tensors()
        return {"output.weight": tensors["token_embd.weight"], **tensors}

    def write_f32(self, path: Path) -> FileModel:
        """The same model in a file of float32 tensors: ggml then computes products without rounding activations."""
        writer = gguf.GGUFWriter(path, self.arch)
        for field in self.reader.fields.values():
            if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
                sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
        for name, values in self.tensors().items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return FileModel(path)
