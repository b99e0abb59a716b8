"""Make drafters for SmolLM2-135M-Instruct: `python -m recipes.smollm2.build STAGE`, from the root; see README.md."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from recipes.common import ROOT, command, say
from recipes.smollm2.pack import read_draft, write_gguf
from recipes.smollm2.prompts import written_prompts
from recipes.smollm2.writer import Writer
from truedraft.bench.prompts import read_questions
from truedraft.drafters.registry import RECORD
from truedraft.models.architecture import LlamaShape, load_causal_lm, new_llama, save_llama
from truedraft.models.huggingface import fingerprint_of
from truedraft.planning import TREE_TEMPERATURES
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
from truedraft.training.loop import Callbacks
from truedraft.training.medusa import MedusaTrainingConfig
from truedraft.training.optimizer import OptimizerConfig, WarmupStableDecay
from truedraft.training.redrafter import RedrafterTrainingConfig
from truedraft.training.report import HeadResult, write_head_card
from truedraft.training.texts.data import Curriculum
from truedraft.training.texts.prompts import PromptSets
from truedraft.training.texts.self_distillation import AnswerFiles, WrittenAnswer
from truedraft.training.texts.tokenizer import copy_tokenizer
from truedraft.training.workspace import WORK, TimeBudget

SEED = 7
TEMPERATURES = (0.0, 0.8, 0.0, 1.0)  # of answers, in turn
TREE_PROMPTS, TEST_PROMPTS = 64, 32
SHAPE: dict[str, Any] = {"width": 256, "layers": 6, "heads": 4, "kv_heads": 2, "intermediate": 768}
START_SPREAD = 0.02  # standard deviation of the first embedding


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
    parser.add_argument("--rows", type=int, default=2048, help="stage 'write': answers written at once")
    parser.add_argument("--answers", type=int, default=24_000, help="stage 'write': how many")
    parser.add_argument("--questions", type=int, default=8_192, help="stage 'write': that the model asks itself")
    parser.add_argument("--tokens", type=int, default=256, help="stage 'write': the most of an answer")
    parser.add_argument("--kept", type=int, default=1_500_000, help="stage 'write': tokens whose vectors are kept")
    parser.add_argument("--steps", type=int, default=4_000, help="of a training")
    parser.add_argument("--tokens-per-step", type=int, default=16_384, help="stage 'draft'")
    return command(parser, lambda options: STAGES[options.stage](options), arguments)


def _prompts(options: argparse.Namespace) -> None:
    """Questions of ours, as ids behind the chat template."""
    data = options.data
    sets = ("gsm8k", "mt_bench", "spec_bench", "humaneval")
    held_out = [question.text for name in sets for question in read_questions(data / "prompts" / name)[1]]
    prose = [data / "text" / name for name in ("darwin.txt", "bronte.txt")]
    texts = written_prompts(
        data / "prompts/gsm8k/train.jsonl", data / "text/thealgorithms_python.jsonl", prose, held_out, SEED
    )
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    ids = [_chat(tokenizer, text) for text in texts]
    options.run.mkdir(parents=True, exist_ok=True)
    (options.run / "prompts.json").write_text(json.dumps(ids))
    say(f"{len(ids):,} prompts, {sum(map(len, ids)):,} tokens")


def _chat(tokenizer: Any, text: str) -> list[int]:
    found = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )
    return list(map(int, found))


def _write(options: argparse.Namespace) -> None:
    """The model's own questions, answers to all, and the vectors of some of them."""
    run = options.run
    model = load_causal_lm(options.target, dtype=torch.bfloat16, device=options.device).eval()
    assert isinstance(model, LlamaForCausalLM), "the writer knows Llama"
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    writer = Writer(model, [tokenizer.eos_token_id])
    dice = torch.Generator(options.device).manual_seed(SEED)
    asked = _asked(writer, tokenizer, options, dice)
    prompts: list[list[int]] = json.loads((run / "prompts.json").read_text()) + asked
    order = np.random.default_rng(SEED).permutation(len(prompts))
    prompts = [prompts[place] for place in order]
    held, prompts = prompts[: TREE_PROMPTS + TEST_PROMPTS], prompts[TREE_PROMPTS + TEST_PROMPTS :]
    tree, test = held[:TREE_PROMPTS], held[TREE_PROMPTS:]
    (run / "test.json").write_text(json.dumps(test))
    fingerprint = fingerprint_of(model)
    pairs = [(prompt, heat) for prompt in tree for heat in TREE_TEMPERATURES.values()]
    _answer(
        writer, pairs, AnswerFiles(run, TREE_TEXT, model.config.hidden_size, {"target": fingerprint}), options, dice
    )
    questions = list(itertools.islice(itertools.cycle(prompts), options.answers))
    rounds = (number + number // len(prompts) for number in range(len(questions)))
    heats = [TEMPERATURES[each % len(TEMPERATURES)] for each in rounds]
    files = AnswerFiles(run, TRAIN_TEXT, model.config.hidden_size, {"target": fingerprint})
    _answer(writer, list(zip(questions, heats, strict=True)), files, options, dice, tokenizer)


def _asked(writer: Writer, tokenizer: Any, options: argparse.Namespace, dice: torch.Generator) -> list[list[int]]:
    """What the model writes in a user's place, and only there (2406.08464); each once."""
    mark = "\N{REPLACEMENT CHARACTER}"
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    before = tokenizer.encode(text[: text.index(mark)], add_special_tokens=False)
    ids = [before] * options.questions
    found: dict[str, None] = {}
    for first in range(0, len(ids), options.rows):
        some = ids[first : first + options.rows]
        for answer in writer.write(some, [1.0] * len(some), 160, dice):
            question = tokenizer.decode(answer.tokens[:-1], skip_special_tokens=True).strip()
            if answer.stopped and len(question) > 8:
                found[question] = None
    say(f"the model asked {len(found):,} questions")
    return [_chat(tokenizer, question) for question in found]


def _answer(
    writer: Writer,
    questions: Sequence[tuple[list[int], float]],
    files: AnswerFiles,
    options: argparse.Namespace,
    dice: torch.Generator,
    tokenizer: Any = None,
) -> None:
    """Answers with their vectors into `files`; from `kept` tokens on as texts alone, beside them."""
    began, tokens = time.perf_counter(), 0
    texts = (options.run / "answers.jsonl").open("w") if tokenizer is not None else None
    # Neighbours in length share a batch, so that little of it is padding; the batches come in a random order.
    order = sorted(range(len(questions)), key=lambda number: len(questions[number][0]))
    batches = [order[first : first + options.rows] for first in range(0, len(order), options.rows)]
    np.random.default_rng(SEED).shuffle(batches)  # type: ignore[arg-type]
    for batch in batches:
        prompts, heats = zip(*(questions[number] for number in batch), strict=True)
        for answer in writer.write(prompts, heats, options.tokens, dice):
            prompt, ids = prompts[answer.number], answer.tokens.tolist()
            if texts is not None:
                texts.write(json.dumps({"text": tokenizer.decode([*prompt, *ids])}) + "\n")
            if texts is None or (tokens < options.kept and answer.number % 3 == 0):
                files.append(WrittenAnswer(prompt, ids, float(heats[answer.number]), answer.stopped), answer.hidden)
            tokens += len(ids) if texts is None or answer.number % 3 == 0 else 0
        say(f"{len(files.records):,} answers with vectors after {time.perf_counter() - began:.0f} s")
        if options.minutes and time.perf_counter() - began > 60 * options.minutes:
            break
    if texts is not None:
        texts.close()


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
    """The draft model, distilled on the answers."""
    size = options.tokens_per_step
    config = DraftConfig(
        start_from=options.start_from or _start(options),
        schedule=WarmupStableDecay.of(options.steps, 0.3),
        optimizer=OptimizerConfig(3e-3, 3e-3),
        curriculum=Curriculum(512, min(2048, size), size, size),
        seed=SEED,
        device=options.device,
    )
    result = train_draft(
        options.target,
        [options.run / "answers.jsonl"],
        options.run / "draft",
        config,
        callbacks=_told(),
        budget=TimeBudget(options.minutes),
    )
    say(json.dumps(result.as_dict()))


def _medusa(options: argparse.Namespace) -> None:
    """Medusa heads."""
    _heads(options, MedusaTrainingConfig(steps=options.steps, seed=SEED, device=options.device))


def _redrafter(options: argparse.Namespace) -> None:
    """A recurrent head."""
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


def _heads(options: argparse.Namespace, config: HeadTrainingConfig) -> None:
    """Heads of one kind, trained on the kept vectors."""
    out = options.run / config.head.kind
    fingerprint = json.loads((options.run / f"{TRAIN_TEXT}.json").read_text())["target"]
    width = AutoConfig.from_pretrained(options.target).hidden_size
    about = {"target": fingerprint}
    train, tree = (AnswerFiles(options.run, name, width, about).read() for name in (TRAIN_TEXT, TREE_TEXT))
    test = json.loads((options.run / "test.json").read_text())
    kept = [record.prompt for record in train.records]
    sets = PromptSets(
        kept, [r.prompt for r in tree.records], test, np.zeros(0, np.uint32), source="chats that it was not trained on"
    )
    job = HeadJob(str(options.target), sets, config, _told(), TimeBudget(options.minutes), "its own answers to chats")
    (out / WORK).mkdir(parents=True, exist_ok=True)
    job = forecast(job, out / WORK)
    text = TargetText(train, tree, fingerprint)
    result = HeadResult(out, *train_stage_1(job, text, out, out / WORK))
    write_head_card(result, config.head.kind, str(options.target), job.data, config.device)
    say(json.dumps(result.report.as_dict()))


def _told() -> Callbacks:
    """Lines now and then."""
    last = [0.0]

    def progress(what: str, done: int, total: int, remark: str) -> None:
        if time.monotonic() - last[0] > 10.0 or done == total:
            last[0] = time.monotonic()
            say(f"{what}: {done:,} of {total:,} {remark}")

    return Callbacks(on_progress=progress, on_note=say, on_plan=say)


STAGES = {
    "prompts": _prompts,
    "write": _write,
    "draft": _draft,
    "medusa": _medusa,
    "redrafter": _redrafter,
    "pack": _pack,
}


if __name__ == "__main__":
    sys.exit(main())
