"""Heads of several kinds for SmolLM2 on equal terms, in minutes on one GPU: `python -m recipes.smollm2.heads`.

The model asks itself questions and answers them, as for `truedraft train --data self`, but by a plain decoder that
takes thousands of rows at once. Each kind of heads then learns from the same answers, by the library's own trainings,
and sees as many positions as every other. What differs from `truedraft train`: the target's vectors come of one padded
forward, which a GPU runs faster than packed ones, and the engine measures nothing here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer

from recipes.common import ROOT, command, say
from recipes.smollm2.writer import Writer, turned
from truedraft.drafters import kinds
from truedraft.drafters.heads.head import HeadRecord
from truedraft.drafters.kinds import dotted
from truedraft.measure import TREE_TEMPERATURES
from truedraft.models.architecture import load_causal_lm
from truedraft.models.base import ForwardOutput, Segment
from truedraft.models.checkpoint import fingerprint_of
from truedraft.models.lm_head import LmHead
from truedraft.training import chains
from truedraft.training.head_config import HeadTrainingConfig
from truedraft.training.loop import TrainingLoop
from truedraft.training.texts.self_distillation import SelfDistillationData, WrittenAnswer
from truedraft.training.workspace import LOG

SEED = 7
TEMPERATURES = (0.0, 1.0)  # of answers, in turn
TREE_PROMPTS, TEST_PROMPTS = 64, 64
PROBED_STEPS = 30
TEXTS = "texts.npz"
_READ = 64  # texts that are read together
_IDS = {"draft_vocab": 16_384}  # 96 in 100 tokens at temperature 1; 8,192 are 92
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {}),
    "redrafter": ("redrafter", {}),
    "eagle-all": ("eagle", {"draft_vocab": 0}),
    "eagle": ("eagle", _IDS),
    "eagle-lk": ("eagle", {"loss": "lk-adaptive", "by_acceptance": True, **_IDS}),
    "p-eagle": ("p-eagle", {"draft_vocab": 0}),
    "dflash": ("dflash", _IDS),
    "dflash-all": ("dflash", {"draft_vocab": 0}),
    "dflash2": ("dflash2", _IDS),
    "dflash2-all": ("dflash2", {"draft_vocab": 0}),
    "dspark": ("dspark", _IDS),
}
"""The kind of drafter, and options of its training."""
_RATE = 0.01
_READ_ALONE = frozenset({"medusa", "redrafter"})  # learn from kept vectors; the others let the target read its answers


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="the model's folder")
    parser.add_argument("--name", default="SmolLM2-135M-Instruct", help="what cards and records call it")
    parser.add_argument("--prompts", type=Path, required=True, help='lines of {"prompt": ...}, of build.py')
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "smollm2", help="answers, heads, logs")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=2048, help="answers written at once")
    parser.add_argument("--answers", type=int, default=20_480)
    parser.add_argument("--questions", type=int, default=10_240, help="that the model asks itself")
    parser.add_argument("--tokens", type=int, default=256, help="the most of an answer")
    parser.add_argument("--positions-per-step", type=int, default=4096)
    parser.add_argument("--minutes", type=float, default=8.0, help="for all of it")
    parser.add_argument("--positions", type=int, help="that each kind sees, in place of what there is time for")
    parser.add_argument("--epochs", type=float, default=6.0, help="the most passes over the answers")
    return command(parser, _all, arguments)


def _all(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    torch.set_float32_matmul_precision("high")
    model = load_causal_lm(options.target, dtype=torch.bfloat16, device=options.device).eval()
    options.run.mkdir(parents=True, exist_ok=True)
    train, tree = _texts(options, model)
    say(f"{len(train.tokens):,} tokens of {len(train.records):,} answers")
    target, lm_head, fingerprint = PaddedTarget(model), LmHead.of(model), fingerprint_of(model)
    chains.load_model = lambda *_, **__: target  # type: ignore[assignment, return-value]  # in place of the packed forward
    jobs = []
    for kind in options.kinds:
        word, others = KINDS[kind]
        config: HeadTrainingConfig = dotted(kinds.KINDS[word].training)(
            seed=SEED,
            device=options.device,
            positions_per_step=options.positions_per_step,
            learning_rate=_RATE,
            **others,
        )
        jobs.append(_Job(kind, config, lm_head, (train, tree), fingerprint))
    positions = options.positions
    if positions is None:
        jobs = [job for job in jobs if _tried(job.probe)]
        left_s = 60 * options.minutes - (time.perf_counter() - began)
        each = left_s / sum(job.position_s for job in jobs)
        positions = min(each, options.epochs * len(train.tokens))
    say(f"{positions:,.0f} positions for each kind")
    for job in jobs:
        _tried(lambda job=job: job.train(int(positions), options.run / job.kind, options.name))  # type: ignore[misc]


def _tried(work: Any) -> bool:
    """Whether work that may fail did not, so that other kinds are trained all the same."""
    try:
        work()
    except Exception:
        traceback.print_exc()
        return False
    return True


@dataclass
class _Job:
    kind: str
    config: HeadTrainingConfig
    lm_head: LmHead
    texts: tuple[SelfDistillationData, SelfDistillationData]
    fingerprint: str
    position_s: float = 0.0

    def loop(self, config: HeadTrainingConfig, folder: Path) -> TrainingLoop:
        head = config.new_head(self.lm_head)
        return config.loop(head, self.lm_head, "", self.texts, self.fingerprint, folder, lambda what, done, total: None)

    def probe(self) -> None:
        """Measure how long a position takes, by a short training."""
        losses: list[float] = []
        config = replace(self.config, steps=PROBED_STEPS, evaluate_every=1 << 30)
        with tempfile.TemporaryDirectory() as folder:
            done = self.loop(config, Path(folder)).run(on_step=lambda record: losses.append(record.values["loss"]))
        self.position_s = done.elapsed_s / done.tokens
        say(f"{self.kind}: loss {np.mean(losses[-20:]):.4f}, {1 / self.position_s:,.0f} positions/s")

    def train(self, positions: int, folder: Path, name: str) -> None:
        per_step = self.loop(replace(self.config, steps=1), folder / "sizes").phases[0].tokens_per_step
        config = replace(self.config, steps=max(1, positions // per_step), evaluate_every=200)
        loop = self.loop(config, folder / "work")
        head: Any = loop.model

        def told(record: Any) -> None:
            if record.step % 100 == 99:
                values = " ".join(f"{key} {value:.3f}" for key, value in record.values.items())
                say(f"{self.kind}: step {record.step + 1}/{loop.total_steps} {record.elapsed_s:.0f} s {values}")

        done = loop.run(on_step=told)
        facts = {"positions": done.tokens, "steps": done.step, "elapsed_s": done.elapsed_s}
        facts |= {"written_tokens": len(self.texts[0].tokens), "learning_rate": config.learning_rate}
        head.eval().requires_grad_(False).to(torch.bfloat16)
        head.save(folder, HeadRecord(name, self.fingerprint, facts=facts))
        lines = (folder / "work" / LOG).read_text().splitlines()
        (folder / LOG).write_text("\n".join(lines[49::50] + lines[-1:]) + "\n")
        say(f"{self.kind}: {json.dumps(facts)}")


class PaddedTarget:
    """A Llama that shows its layers along whole texts, by one padded forward of few kernels."""

    def __init__(self, model: Any) -> None:
        self._model, self.device = model, model.device
        self.shown_layers = len(model.model.layers)
        self._head = model.config.head_dim

    def new_cache(self) -> None: ...

    def release_cache(self, cache: None) -> None: ...

    @torch.inference_mode()
    def forward_showing(self, segments: Sequence[Segment], layers: Sequence[int]) -> ForwardOutput:
        texts = [segment.tokens.to(self.device) for segment in segments]
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        lengths = torch.tensor([len(text) for text in texts], device=self.device)
        inside = (torch.arange(ids.shape[1], device=self.device) < lengths[:, None]).flatten()
        last, shown = self.read(ids, layers)
        last, *chosen = (each.flatten(0, 1)[inside] for each in (last, *shown))
        return ForwardOutput(self._model.lm_head(last), last, tuple(chosen))

    def read(self, ids: Tensor, layers: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        inner, shown = self._model.model, {}
        x = inner.embed_tokens(ids)
        cos, sin = (each[:, None] for each in inner.rotary_emb(x, torch.arange(ids.shape[1], device=ids.device)[None]))
        for number, layer in enumerate(inner.layers):
            attention, mlp = layer.self_attn, layer.mlp
            y = _normed(layer.input_layernorm, x)
            query, key, value = (
                part(y).unflatten(-1, (-1, self._head)).transpose(1, 2)
                for part in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            mixed = functional.scaled_dot_product_attention(
                turned(query, cos, sin), turned(key, cos, sin), value, is_causal=True, enable_gqa=True
            )
            x = x + attention.o_proj(mixed.transpose(1, 2).flatten(2))
            y = _normed(layer.post_attention_layernorm, x)
            x = x + mlp.down_proj(functional.silu(mlp.gate_proj(y)) * mlp.up_proj(y))
            shown[number] = x
        return _normed(inner.norm, x), [shown[layer] for layer in layers]


def _normed(norm: Any, x: Tensor) -> Tensor:
    return functional.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _texts(options: argparse.Namespace, model: Any) -> tuple[SelfDistillationData, SelfDistillationData]:
    kept = options.run / TEXTS
    if kept.is_file():
        train, held = read_texts(kept)
        read = _with_vectors if _READ_ALONE.intersection(options.kinds) else _without_vectors
        return read(train, options, model), read(held, options, model)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    writer, dice = Writer(model, [tokenizer.eos_token_id]), torch.Generator(options.device).manual_seed(SEED)
    asked = _asked(writer, tokenizer, options, dice)
    lines = options.prompts.read_text(encoding="utf-8").splitlines()
    prompts = [_chat(tokenizer, text) for text in dict.fromkeys([json.loads(line)["prompt"] for line in lines] + asked)]
    prompts = [prompts[place] for place in np.random.default_rng(SEED).permutation(len(prompts))]
    apart = TREE_PROMPTS + TEST_PROMPTS
    tree, test, asked_of = prompts[:TREE_PROMPTS], prompts[TREE_PROMPTS:apart], prompts[apart:]
    (options.run / "test.json").write_text(json.dumps(test))
    heats = tuple(TREE_TEMPERATURES.values())
    held = _answered(writer, [(prompt, heat) for prompt in tree for heat in heats], options, dice)
    some = list(itertools.islice(itertools.cycle(asked_of), options.answers))
    rounds = (number + number // len(asked_of) for number in range(len(some)))
    questions = list(zip(some, (TEMPERATURES[each % 2] for each in rounds), strict=True))
    train = _answered(writer, questions, options, dice)
    np.savez_compressed(kept, **{name: packed(text.records) for name, text in (("train", train), ("held", held))})
    return train, held


def packed(records: Sequence[WrittenAnswer]) -> Any:
    """Answers as one array of uint16: for each the tokens of its prompt and its own, ten times its temperature, whether
    it was stopped, and those tokens; vocabularies of up to 65,536 ids."""
    found = []
    for each in records:
        found += [len(each.prompt), len(each.answer), round(10 * each.temperature), each.stopped]
        found += [*each.prompt, *each.answer]
    return np.array(found, np.uint16)


def read_texts(path: Path) -> tuple[list[WrittenAnswer], list[WrittenAnswer]]:
    texts = []
    with np.load(path) as file:
        for name in ("train", "held"):
            numbers, at, records = file[name].tolist(), 0, []
            while at < len(numbers):
                before, behind, tenths, stopped = numbers[at : at + 4]
                start, end = at + 4 + before, at + 4 + before + behind
                records.append(WrittenAnswer(numbers[at + 4 : start], numbers[start:end], tenths / 10, bool(stopped)))
                at = end
            texts.append(records)
    return texts[0], texts[1]


@torch.inference_mode()
def _with_vectors(records: list[WrittenAnswer], options: argparse.Namespace, model: Any) -> SelfDistillationData:
    vectors = []
    for first in range(0, len(records), _READ):
        some = records[first : first + _READ]
        texts = [torch.tensor([*each.prompt, *each.answer], device=options.device) for each in some]
        hidden, _ = PaddedTarget(model).read(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True))
        own = [
            hidden[row, len(each.prompt) - 1 : len(each.prompt) + len(each.answer) - 1] for row, each in enumerate(some)
        ]
        vectors.append(torch.cat(own).to(torch.bfloat16).cpu())
    return SelfDistillationData(records, torch.cat(vectors).view(torch.int16).numpy().view(np.uint16))


def _without_vectors(records: list[WrittenAnswer], options: argparse.Namespace, model: Any) -> SelfDistillationData:
    tokens = sum(len(each.answer) for each in records)
    return SelfDistillationData(records, np.zeros((tokens, model.config.hidden_size), np.uint16))


def _chat(tokenizer: Any, text: str) -> list[int]:
    message = [{"role": "user", "content": text}]
    return list(map(int, tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)))


def _asked(writer: Writer, tokenizer: Any, options: argparse.Namespace, dice: torch.Generator) -> list[str]:
    """What the model writes in a user's place, and only there (2406.08464); each once."""
    mark = "\N{REPLACEMENT CHARACTER}"
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    before = tokenizer.encode(text[: text.index(mark)], add_special_tokens=False)
    found: dict[str, None] = {}
    for first in range(0, options.questions, options.rows):
        count = min(options.rows, options.questions - first)
        for answer in writer.write([before] * count, [1.0] * count, 160, dice):
            question = tokenizer.decode(answer.tokens[:-1], skip_special_tokens=True).strip()
            if answer.stopped and len(question) > 8:
                found[question] = None
    say(f"the model asked {len(found):,} questions")
    return list(found)


def _answered(
    writer: Writer, questions: Sequence[tuple[list[int], float]], options: argparse.Namespace, dice: torch.Generator
) -> SelfDistillationData:
    """Answers with their vectors, neighbours in length written together, so that little of a batch is padding."""
    order = sorted(range(len(questions)), key=lambda number: len(questions[number][0]))
    records: list[WrittenAnswer] = []
    vectors: list[Tensor] = []
    for first in range(0, len(order), options.rows):
        drawn: list[Tensor] = []
        prompts, heats = zip(*(questions[number] for number in order[first : first + options.rows]), strict=True)
        for answer in writer.write(prompts, heats, options.tokens, dice):
            heat, tokens = float(heats[answer.number]), answer.tokens.tolist()
            records.append(WrittenAnswer(list(prompts[answer.number]), tokens, heat, answer.stopped))
            drawn.append(answer.hidden)
        vectors.append(torch.cat(drawn).cpu())
        say(f"{len(records):,} answers")
    bits = torch.cat(vectors).contiguous().view(torch.int16).numpy().view(np.uint16)
    return SelfDistillationData(records, bits)


if __name__ == "__main__":
    sys.exit(main())
