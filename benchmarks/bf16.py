"""A bfloat16 copy of a quantised model, for measurements of bfloat16 weights: the same values, the same tokenizer.

    python benchmarks/bf16.py smollm2-135m /tmp/smollm2-bf16.gguf
    octavo bench latency --model /tmp/smollm2-bf16.gguf --input-len 256 --output-len 128

llama.cpp reads the file too: `peers/compare.py --model /tmp/smollm2-bf16.gguf`. Matrices are dequantised and rounded to
bfloat16, vectors become float32. Needs the package `gguf` (`pip install 'octavo[test]'`).
"""

from __future__ import annotations

import argparse

import gguf
import numpy as np

OF_THE_FILE = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def copy_fields(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    """All metadata but what describes the file itself."""
    for name, field in reader.fields.items():
        if not name.startswith(OF_THE_FILE):
            of_items = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], of_items)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="catalogue name or GGUF file")
    parser.add_argument("target", help="the GGUF file to write")
    args = parser.parse_args()
    from octavo.catalog import resolve_model

    reader = gguf.GGUFReader(resolve_model(args.model, None, None))
    writer = gguf.GGUFWriter(args.target, reader.fields["general.architecture"].contents())
    copy_fields(reader, writer)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, values)
            continue
        rows = gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16)
        writer.add_tensor(tensor.name, rows, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
