"""Make drafters for SmolLM2-135M-Instruct: `python -m recipes.smollm2.build STAGE`, from the root; see README.md."""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import quantize
from numpy.typing import NDArray
from transformers import AutoConfig, LlamaForCausalLM

from recipes.common import ROOT, command, say, told
from truedraft.drafters.registry import RECORD, write_draft_ids
from truedraft.kinds.medusa.training import MedusaTrainingConfig
from truedraft.kinds.redrafter.training import RedrafterTrainingConfig
from truedraft.measure import TREE_TEMPERATURES
from truedraft.measure.bench.prompts import read_questions
from truedraft.models.architecture import LlamaShape, load_causal_lm, new_llama, save_llama
from truedraft.models.loading import load_model, read_model, resolve_source
from truedraft.training.drafts import DraftConfig, train_draft
from truedraft.training.heads import (
    TRAIN_TEXT,
    TREE_TEXT,
    HeadJob,
    HeadTrainingConfig,
    TargetText,
    forecast,
    train_stage_1,
)
from truedraft.training.optimizer import OptimizerConfig, WarmupStableDecay
from truedraft.training.report import HeadResult, write_head_card
from truedraft.training.texts.answer_writer import Watch, WritingConfig, ask_itself, write_answers
from truedraft.training.texts.data import Curriculum, copy_tokenizer, read_data
from truedraft.training.texts.prompts import PromptSets, shuffled
from truedraft.training.texts.self_distillation import AnswerFiles, read_answers
from truedraft.training.workspace import WORK, TimeBudget

SEED = 7
TEMPERATURES = (0.0, 0.8, 0.0, 1.0)  # of answers, in turn
TREE_PROMPTS, TEST_PROMPTS = 64, 32
PROMPTS = "prompts.jsonl"
PACKED = ROOT / "packages/truedraft-smollm2/src/truedraft_smollm2/draft"
SHAPE: dict[str, Any] = {"width": 256, "layers": 6, "heads": 4, "kv_heads": 2, "intermediate": 768}
START_SPREAD = 0.02  # standard deviation of the first embedding
_SHARED_WORDS = 10
_PASSAGES = (80, 420)  # words of a passage
_LEAST_CODE, _MOST_CODE = 80, 1_200  # characters of a signature with its docstring
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one stage; what is on disk already is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--target", type=Path, required=True, help="the model's folder")
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "smollm2", help="prompts, answers, drafters")
    parser.add_argument("--data", type=Path, help="prompts, stage 'prompts': the folder with prompts/ and text/")
    parser.add_argument("--gguf", type=Path, help="stage 'pack': the target's GGUF file, whose tokenizer is taken")
    parser.add_argument("--start-from", type=Path, help="stage 'draft': a draft to train further")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, help="of a training, its measurements included")
    parser.add_argument("--rows", type=int, default=256, help="stage 'write': answers written at once")
    parser.add_argument("--answers", type=int, default=24_000, help="stage 'write': how many")
    parser.add_argument("--questions", type=int, default=8_192, help="stage 'write': that the model asks itself")
    parser.add_argument("--tokens", type=int, default=256, help="stage 'write': the most of an answer")
    parser.add_argument("--steps", type=int, default=4_000, help="of a training")
    parser.add_argument("--tokens-per-step", type=int, default=16_384, help="stage 'draft'")
    parser.add_argument("--rate", type=float, default=3e-3, help="stage 'draft': the learning rate")
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


def _write(options: argparse.Namespace) -> None:
    """The model's own questions, and answers to all with their vectors; goes on where it was interrupted."""
    run, budget = options.run, TimeBudget(options.minutes)
    model = load_model(options.target, dtype="auto", device=options.device)
    assert model.tokenizer is not None
    _, prompts = read_data([run / PROMPTS], model.tokenizer.backend)
    watch = Watch("asking", "questions", told())
    prompts += ask_itself(model, options.questions, run, seed=SEED, batch=options.rows, watch=watch)
    mixed, held = shuffled(prompts, SEED), TREE_PROMPTS + TEST_PROMPTS
    tree, test, asked = mixed[:TREE_PROMPTS], mixed[TREE_PROMPTS:held], mixed[held:]
    (run / "test.json").write_text(json.dumps(test))
    heats = tuple(TREE_TEMPERATURES.values())
    how = WritingConfig(answer_tokens=options.tokens, temperatures=heats, batch=options.rows, seed=SEED)
    write_answers(model, [prompt for prompt in tree for _ in heats], run, TREE_TEXT, how)
    # An odd number, so that a question that comes again does so at another temperature.
    questions = list(itertools.islice(itertools.cycle(asked[: len(asked) - 1 | 1]), options.answers))
    how = replace(how, temperatures=TEMPERATURES, seed=SEED + 1)
    watch = Watch("answering", callbacks=told(), budget=budget)
    text = write_answers(model, questions, run, TRAIN_TEXT, how, watch=watch)
    decode = model.tokenizer.backend.decode
    with (run / "answers.jsonl").open("w") as texts:
        texts.writelines(json.dumps({"text": decode([*each.prompt, *each.answer])}) + "\n" for each in text.records)


def _start(options: argparse.Namespace) -> Path:
    """A draft whose embedding is the best one of its rank to the target's."""
    folder: Path = options.run / "start"
    if (folder / "config.json").is_file():
        return folder
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
    save_llama(draft, folder)
    copy_tokenizer(options.target, folder)
    return folder


def _draft(options: argparse.Namespace) -> None:
    size = options.tokens_per_step
    config = DraftConfig(
        start_from=options.start_from or _start(options),
        schedule=WarmupStableDecay.of(options.steps, 0.3),
        optimizer=OptimizerConfig(options.rate, options.rate),
        curriculum=Curriculum(512, min(2048, size), size, size),
        seed=SEED,
        device=options.device,
    )
    result = train_draft(
        options.target,
        [options.run / "answers.jsonl"],
        options.run / "draft",
        config,
        callbacks=told(),
        budget=TimeBudget(options.minutes),
    )
    say(json.dumps(result.as_dict()))


def _unpack(options: argparse.Namespace) -> None:
    """The packed draft as a folder, to train it further by --start-from."""
    packed = str(next(PACKED.glob("*.gguf")))
    draft = read_model(resolve_source(packed), packed, torch.float32)
    save_llama(draft, options.run / "first", dtype=torch.float32)
    copy_tokenizer(options.target, options.run / "first")


def _medusa(options: argparse.Namespace) -> None:
    _heads(options, MedusaTrainingConfig(steps=options.steps, seed=SEED, device=options.device))


def _redrafter(options: argparse.Namespace) -> None:
    _heads(options, RedrafterTrainingConfig(steps=options.steps, seed=SEED, device=options.device))


def _pack(options: argparse.Namespace) -> None:
    """The draft as a GGUF file of 4 bits, beside the record that says whose draft it is."""
    folder: Path = options.run / "packed" / "draft"
    folder.mkdir(parents=True, exist_ok=True)
    kind = GGMLQuantizationType.Q4_0
    write_gguf(read_draft(options.run / "draft"), options.gguf, folder / f"draft-{kind.name}.gguf", kind)
    record = json.loads((options.run / "draft" / RECORD).read_text())
    config = json.loads((options.run / "draft" / "config.json").read_text())
    (folder / RECORD).write_text(json.dumps(record | {"vocab_size": config["vocab_size"]}, indent=1) + "\n")


def _ids(options: argparse.Namespace) -> None:
    """Records with the packed draft the ids that the answers' distributions make likeliest, which it guesses among."""
    weight = load_causal_lm(options.target).get_output_embeddings().weight.detach().to(options.device).float()
    text = read_answers(options.run, TRAIN_TEXT, weight.shape[1])
    mass = torch.zeros(len(weight), dtype=torch.float64, device=options.device)
    for first in range(0, len(text.bits), 512):
        mass += torch.softmax(text.hidden(slice(first, first + 512)).to(weight) @ weight.T, -1).sum(0)
    likeliest = mass.argsort(descending=True, stable=True)[: DraftConfig().draft_vocab]
    write_draft_ids(PACKED, likeliest.tolist())
    say(f"{len(likeliest):,} ids have {float(mass[likeliest].sum() / mass.sum()):.4f} of the mass")


def _heads(options: argparse.Namespace, config: HeadTrainingConfig) -> None:
    out = options.run / config.head.kind
    width = AutoConfig.from_pretrained(options.target).hidden_size
    abouts = {name: json.loads((options.run / f"{name}.json").read_text()) for name in (TRAIN_TEXT, TREE_TEXT)}
    train, tree = (AnswerFiles(options.run, name, width, about).read() for name, about in abouts.items())
    test = json.loads((options.run / "test.json").read_text())
    kept = [record.prompt for record in train.records]
    sets = PromptSets(
        kept, [r.prompt for r in tree.records], test, np.zeros(0, np.uint32), source="chats that it was not trained on"
    )
    job = HeadJob(str(options.target), sets, config, told(), TimeBudget(options.minutes), "its own answers to chats")
    (out / WORK).mkdir(parents=True, exist_ok=True)
    job = forecast(job, out / WORK)
    text = TargetText(train, tree, abouts[TRAIN_TEXT]["target"])
    result = HeadResult(out, *train_stage_1(job, text, out, out / WORK))
    write_head_card(result, config.head.kind, str(options.target), job.data, config.device)
    say(json.dumps(result.report.as_dict()))


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


def write_gguf(draft: LlamaForCausalLM, target: Path, out: Path, kind: GGMLQuantizationType) -> None:
    """Quantise the matrices of a draft and write them, for us and for other engines.

    Args:
        draft: with tied embeddings.
        target: the GGUF file whose tokenizer the draft has.
        out: the file to write.
        kind: of the matrices; norms stay float32.
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
    for name, weight in draft.model.state_dict().items():
        stored = _stored_name(name)
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


def _stored_name(name: str) -> str:
    if not name.startswith("layers."):
        return {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}[name]
    _, number, part = name.removesuffix(".weight").split(".", 2)
    return f"blk.{number}.{_NAMES[part]}.weight"


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


def read_draft(folder: Path) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    return model


STAGES = {
    "prompts": _prompts,
    "write": _write,
    "unpack": _unpack,
    "draft": _draft,
    "medusa": _medusa,
    "redrafter": _redrafter,
    "pack": _pack,
    "ids": _ids,
}


if __name__ == "__main__":
    sys.exit(main())
