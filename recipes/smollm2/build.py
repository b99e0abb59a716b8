"""Make drafters for SmolLM2-135M-Instruct: `python -m recipes.smollm2.build STAGE`, from the root; see README.md."""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    get_tensor_name_map,
)
from gguf.quants import quantize
from numpy.typing import NDArray
from transformers import PreTrainedModel

from recipes.common import ROOT, command, say
from truedraft.drafters.registry import IDS, RECORD
from truedraft.measure.bench.prompts import read_questions
from truedraft.models.architecture import LlamaShape, load_causal_lm, new_llama, save_llama
from truedraft.models.loading import read_model, resolve_source
from truedraft.training.texts.data import copy_tokenizer

SEED = 7
PROMPTS = "prompts.jsonl"
PACKED = ROOT / "packages/truedraft-smollm2/src/truedraft_smollm2/draft"
SHAPE: dict[str, Any] = {"width": 256, "layers": 6, "heads": 4, "kv_heads": 2, "intermediate": 768}
START_SPREAD = 0.02  # standard deviation of the first embedding
_SHARED_WORDS = 10
_PASSAGES = (80, 420)  # words of a passage
_LEAST_CODE, _MOST_CODE = 80, 1_200  # characters of a signature with its docstring


def main(arguments: list[str] | None = None) -> int:
    """Run one stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--target", type=Path, required=True, help="the model's folder")
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "smollm2", help="prompts and drafts")
    parser.add_argument("--data", type=Path, help="prompts, stage 'prompts': the folder with prompts/ and text/")
    parser.add_argument("--gguf", type=Path, help="stage 'pack': the target's GGUF file, whose tokenizer is taken")
    return command(parser, lambda options: STAGES[options.stage](options), arguments)


def _prompts(options: argparse.Namespace) -> None:
    data = options.data
    sets = ("gsm8k", "mt_bench", "spec_bench", "humaneval")
    held_out = [question.text for name in sets for question in read_questions(data / "prompts" / name)[1]]
    prose = [data / "text" / name for name in ("darwin.txt", "bronte.txt")]
    texts = written_prompts(
        data / "prompts/gsm8k/train.jsonl", data / "text/thealgorithms_python.jsonl", prose, held_out, SEED
    )
    options.run.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
    (options.run / PROMPTS).write_text(lines)
    say(f"{len(texts):,} prompts")


def _start(options: argparse.Namespace) -> None:
    """A draft whose embedding is the best one of its rank to the target's."""
    target = load_causal_lm(options.target)
    config = target.config
    shape = LlamaShape(
        vocab_size=config.vocab_size,
        context=config.max_position_embeddings,
        rope_theta=config.rope_parameters["rope_theta"],
        eos_token_id=config.eos_token_id,
        head_size=SHAPE["width"] // SHAPE["heads"],
        **SHAPE,
    )
    draft = new_llama(shape, seed=SEED)
    table = target.get_input_embeddings().weight.detach().double()
    _, directions = torch.linalg.eigh(table.T @ table)  # rising: the last are the heaviest
    near = table @ directions[:, -shape.width :]
    draft.get_input_embeddings().weight.data = (near * (START_SPREAD / near.std())).float()
    draft.tie_weights()
    save_llama(draft, options.run / "start")
    copy_tokenizer(options.target, options.run / "start")


def _unpack(options: argparse.Namespace) -> None:
    """The packed draft as a folder, to train it further by --start-from."""
    packed = str(next(PACKED.glob("*.gguf")))
    draft = read_model(resolve_source(packed), packed, torch.float32)
    save_llama(draft, options.run / "first", dtype=torch.float32)
    copy_tokenizer(options.target, options.run / "first")


def _pack(options: argparse.Namespace) -> None:
    """The draft as a GGUF file of 4 bits, beside the record that says whose draft it is."""
    folder: Path = options.run / "packed" / "draft"
    folder.mkdir(parents=True, exist_ok=True)
    kind = GGMLQuantizationType.Q4_0
    write_gguf(load_causal_lm(options.run / "draft"), options.gguf, folder / f"draft-{kind.name}.gguf", kind)
    shutil.copy(options.run / "draft" / IDS, folder)
    record = json.loads((options.run / "draft" / RECORD).read_text())
    config = json.loads((options.run / "draft" / "config.json").read_text())
    (folder / RECORD).write_text(json.dumps(record | {"vocab_size": config["vocab_size"]}, indent=1) + "\n")


# ---------------------------------------------------------------------------------------------- questions that are ours


def written_prompts(gsm8k: Path, code: Path, prose: Sequence[Path], held_out: Iterable[str], seed: int) -> list[str]:
    """User messages in a random order: arithmetic, code, and passages to sum up and to ask about.

    The model asks itself a good part of its questions (2406.08464); these here bring the kinds that it seldom asks.
    What shares ten words in a row with a prompt that drafters are measured on is left out.

    Args:
        gsm8k: lines of objects with "question", the train part of GSM8K.
        code: lines of objects with "text", a Python file each.
        prose: plain texts.
        held_out: questions whose words are avoided.
        seed: of the order, the passages and the questions about them.
    """
    dice = random.Random(seed)
    found = [json.loads(line)["question"] for line in gsm8k.read_text(encoding="utf-8").splitlines()]
    found = dice.sample(found, min(len(found), 2_500))
    functions = sorted(set(_functions(code)))
    found += dice.sample(functions, min(len(functions), 2_500))
    for path in prose:
        found += _about_passages(path.read_text(encoding="utf-8"), 500, dice)
    avoided = {gram for text in held_out for gram in _grams(text)}
    kept = [text for text in dict.fromkeys(found) if avoided.isdisjoint(_grams(text))]
    dice.shuffle(kept)
    return kept


def _grams(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return (tuple(words[start : start + _SHARED_WORDS]) for start in range(len(words) - _SHARED_WORDS + 1))


def _functions(path: Path) -> Iterator[str]:
    """Signatures with their docstrings, without bodies, to be completed."""
    for line in path.read_text(encoding="utf-8").splitlines():
        source = json.loads(line)["text"]
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        lines = source.splitlines()
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and not node.decorator_list:
                end = node.body[0].end_lineno or node.lineno
                text = "\n".join(lines[node.lineno - 1 : end]) + "\n"
                if _LEAST_CODE <= len(text) <= _MOST_CODE:
                    yield text


def _about_passages(text: str, count: int, dice: random.Random) -> Iterable[str]:
    """Passages to sum up, and as many with a question about one of their words behind them."""
    paragraphs = [" ".join(each.split()) for each in re.split(r"\n\s*\n", text)]
    words = [word for each in paragraphs for word in each.split()]
    for number in range(2 * count):
        length = dice.randint(*_PASSAGES)
        start = dice.randrange(max(1, len(words) - length))
        passage = " ".join(words[start : start + length])
        if number % 2:
            yield f"Summarize: {passage}"
            continue
        names = [word.strip(".,;:!?\"'()") for word in passage.split() if len(word) > 6] or ["this"]
        question = dice.choice(("What is said about {}?", "Why is {} mentioned?", "What does the text say of {}?"))
        yield f"{passage}\n{question.format(dice.choice(names))}"


# --------------------------------------------------------------------------------------------- the draft as a GGUF file


def write_gguf(draft: PreTrainedModel, target: Path, out: Path, kind: GGMLQuantizationType) -> None:
    """Quantise the matrices of a draft with tied embeddings and write them, for us and for other engines.

    Norms stay float32; the tokenizer is that of the GGUF file `target`.
    """
    config = draft.config
    writer = GGUFWriter(out, "llama")
    writer.add_name("Draft model for SmolLM2-135M-Instruct")
    writer.add_file_type({"Q8_0": LlamaFileType.MOSTLY_Q8_0, "Q4_0": LlamaFileType.MOSTLY_Q4_0}[kind.name])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _copy_tokenizer(GGUFReader(target), writer)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in draft.model.state_dict().items():
        stored = names.get_name(f"model.{name}", (".weight",))
        values = weight.detach().float().numpy()
        part = stored.split(".")[2] if stored.startswith("blk.") else ""
        if part in heads:
            values = _interleaved(values, heads[part])
        if values.ndim == 2:
            writer.add_tensor(stored, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of queries or keys as GGUF has them: the halves that are rotated together are neighbours.

    With one head of 4 rows, (a, b, c, d) becomes (a, c, b, d).
    """
    rows, width = values.shape
    return np.ascontiguousarray(values.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width))


def _copy_tokenizer(source: GGUFReader, writer: GGUFWriter) -> None:
    for name, field in source.fields.items():
        if name.startswith("tokenizer."):
            inner: Any = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)


STAGES = {"prompts": _prompts, "start": _start, "unpack": _unpack, "pack": _pack}


if __name__ == "__main__":
    sys.exit(main())
