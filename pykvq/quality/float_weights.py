"""A copy of a model with its weights decoded, to tell what the KV cache costs from what rounding of activations does.

Quantized weights are multiplied with activations rounded to 8 bits. Any change of the cache, however small, flips some
of these roundings, which alone moves the predictions of a small model by a KLD of some thousandths. With F32 weights
nothing is rounded to less than F32.
"""

from __future__ import annotations

import os

import gguf
import numpy as np

_KEPT = {gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16}


def write_float_copy(model_path: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    """Writes the model with every quantized tensor decoded and stored in F32."""
    reader = gguf.GGUFReader(model_path)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(output, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value_type = field.types[0]
        sub_type = field.types[-1] if value_type == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), value_type, sub_type=sub_type)
    for tensor in reader.tensors:
        data = tensor.data
        if tensor.tensor_type not in _KEPT:
            data = gguf.quants.dequantize(data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
