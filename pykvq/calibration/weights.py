"""What a calibration needs of a model's weights: how an error of a value reaches the residual stream."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from pykvq.calibration.moments import Array, LayerMoments
from pykvq.file_names import part_paths

_OUTPUT_NORM = re.compile(r"blk\.(\d+)\.post_attention_norm\.weight")


class _TensorReader(gguf.GGUFReader):
    """Passes over arrays of metadata: the vocabulary of a model takes the library seconds."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        file = self.data.data
        item, count = struct.unpack_from("<IQ", file, orig_offs)
        end = orig_offs + struct.calcsize("<IQ")
        if item == gguf.GGUFValueType.STRING:
            for _ in range(count):
                end += 8 + struct.unpack_from("<Q", file, end)[0]
        else:
            end += count * np.dtype(self.gguf_scalar_to_np[item]).itemsize
        return end - orig_offs, [], [], [gguf.GGUFValueType.ARRAY]


def read_tensors(model_path: str | os.PathLike[str]) -> dict[str, gguf.ReaderTensor]:
    """The tensors of all files of a model by name; their data is mapped."""
    return {tensor.name: tensor for path in part_paths(model_path) for tensor in _TensorReader(path).tensors}


def output_norms(tensors: Mapping[str, gguf.ReaderTensor]) -> dict[int, float]:
    """By layer, the squared norm of the weights that scale a normalized attention output before it is added, if any.

    Where a layer has no other norm around its feed-forward part, as in gpt-oss, that one is before it, and not meant.
    """
    result: dict[int, float] = {}
    for name, tensor in tensors.items():
        match = _OUTPUT_NORM.fullmatch(name)
        if match is None or tensor.tensor_type != gguf.GGMLQuantizationType.F32:
            continue
        if tensors.keys() & {f"blk.{match[1]}.ffn_norm.weight", f"blk.{match[1]}.post_ffw_norm.weight"}:
            result[int(match[1])] = float(np.square(tensor.data, dtype=np.float64).sum())
    return result


def output_grams(tensors: Mapping[str, gguf.ReaderTensor], layers: list[LayerMoments]) -> dict[int, Array]:
    """Mean of Woᵀ Wo over the query heads of each KV head, [n_head, dim_v, dim_v], by layer.

    Layers whose output projection is missing, merged with another or of a type that cannot be decoded are left out.
    """
    result: dict[int, Array] = {}
    for layer in layers:
        tensor = tensors.get(f"blk.{layer.layer}.attn_output.weight")
        if tensor is None:
            continue
        n_head, dim_v = layer.v.shape
        try:
            weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            continue
        heads = np.asarray(weight, dtype=np.float32).reshape(len(weight), n_head, -1, dim_v)
        rows = heads.transpose(1, 0, 2, 3).reshape(n_head, -1, dim_v)
        result[layer.layer] = (rows.transpose(0, 2, 1) @ rows).astype(np.float64) / heads.shape[2]
    return result
