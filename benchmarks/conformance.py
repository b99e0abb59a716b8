"""Every family of text models that the installed transformers has, small, with random weights: `make conformance`.

    python benchmarks/conformance.py [--families NAME ...] [--full] [--minutes 60] [--out FILE] [--page]
    python benchmarks/conformance.py --report

A family is built from `conformance_shapes.json`, written to a folder and loaded as a user loads it, once for each
dtype. Then drafters, rules and ways of sampling are run over it, alone and in a ragged batch of eight: pairwise, or
with --full all of them. Greedy and seeded answers are held to plain decoding, and where they part the place is traced
to a near tie or a fault, as by `truedraft certify`; greedy ones in float32 to transformers' own as well. Of sampled
ones every token's logarithm of probability is held to that of transformers' own forward over the whole text, which may
differ by what rounding moves it there. Every outcome is a line of JSON, and a rerun goes on behind them.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from common import RESULTS, Lines, note
from truedraft import SamplingParams, load_model
from truedraft.certify.checks import Context, Stack
from truedraft.certify.equality import divergence_point
from truedraft.drafters import Drafter, DraftModel, NoDrafter, PromptLookup
from truedraft.engine import Answer
from truedraft.errors import TruedraftError, UnsupportedModelError
from truedraft.models import HuggingFaceModel
from truedraft.models.loading import quiet_transformers
from truedraft.verification.specs import rule_from_spec as rule_of

SHAPES = Path(__file__).with_name("conformance_shapes.json")
OUT, PAGE = RESULTS / "conformance.jsonl", RESULTS / "conformance.md"
DTYPES = ("float32", "bfloat16")
COUNT = 16
NOISE = 0.05  # on the draft's weights, of their spread
# Two logits of transformers' that are nearer than this nearly tie in float32.
NEAR = 2e-3
# So many times what rounding moves transformers' own logarithm of a probability may another be off.
ROUNDINGS = 4.0
OWN = "its own"
"""Leaves a size as the family has it."""
# Of the tokens of a cell in bfloat16 at most so many may be further off than that.
MOST_FAR = 0.1
APART = 0.01
EXPLAINED = ("near tie", "rounding")
BESIDE = ", encoder-decoder"
"""Behind the names of those families that are built as such."""
PROMPTS = [[(7 * place * place + 3 * place + 5 * row) % 89 + 5 for place in range(4 + 5 * row)] for row in range(8)]


@dataclass(frozen=True)
class Cell:
    drafter: str
    rule: str
    way: str
    batch: int

    @property
    def name(self) -> str:
        return f"{self.drafter}, {self.rule}, {self.way}, {self.batch}"

    @property
    def prompts(self) -> list[list[int]]:
        return PROMPTS if self.batch > 1 else PROMPTS[3:4]


DRAFTERS = ("none", "prompt-lookup", "draft", "draft tree")
WAYS = ("greedy", "sampled", "seeded")
EVERY = [
    Cell(drafter, rule, way, batch)
    for drafter in DRAFTERS
    for rule in ("speculative", "block")
    for way in WAYS
    for batch in (1, 8)
    if drafter != "none" or rule == "speculative"
    if not (rule == "block" and drafter == "draft tree")  # block verification judges chains
]
# Every two values of two of the four columns meet in a row.
PAIRWISE = [
    Cell("none", "speculative", "greedy", 8),
    Cell("none", "speculative", "sampled", 1),
    Cell("none", "speculative", "seeded", 8),
    Cell("prompt-lookup", "speculative", "greedy", 8),
    Cell("prompt-lookup", "block", "sampled", 8),
    Cell("prompt-lookup", "block", "seeded", 1),
    Cell("draft", "block", "greedy", 1),
    Cell("draft", "speculative", "sampled", 8),
    Cell("draft", "block", "seeded", 8),
    Cell("draft tree", "speculative", "greedy", 8),
    Cell("draft tree", "speculative", "sampled", 1),
    Cell("draft tree", "speculative", "seeded", 8),
]

# One family of each way to run, which runs all cells also in the short form.
FULLY = ("llama", "mistral", "olmoe", "qwen3_next", "gpt_neo", "inkling2_text", "openai-gpt", "t5, encoder-decoder")


def families() -> list[str]:
    causal = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return [*causal, *(f"{name}{BESIDE}" for name in sorted(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES))]


def small_config(family: str, known: Mapping[str, Any]) -> PretrainedConfig:
    """A small configuration of a family: of the common sizes those that it has, then its own."""
    kind = family.removesuffix(BESIDE)
    own = known["families"].get(family, known["families"].get(kind, {}))
    return AutoConfig.for_model(
        kind, **_over(_common(CONFIG_MAPPING[kind], known, encoder=family.endswith(BESIDE)), own)
    )


def _over(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes with a family's own over them, those of its parts one by one."""
    parts = {name: _over(common[name], value) for name, value in own.items() if isinstance(common.get(name), dict)}
    return {name: value for name, value in {**common, **own, **parts}.items() if value != OWN}


def _common(kind: type[PretrainedConfig], known: Mapping[str, Any], *, encoder: bool) -> dict[str, Any]:
    """The common sizes for a class of configurations and for those that it is made of."""
    names, whole, given = getattr(kind, "attribute_map", {}), kind(), {}
    takes = inspect.signature(kind).parameters  # what it works out from these is left to it
    sizes = known["sizes"] | known["encoder_decoder" if encoder else "causal"]
    for name, value in sizes.items():
        own = None if isinstance(getattr(kind, name, None), property) else takes.get(names.get(name, name))
        if name.endswith("_token_id") or (own is not None and own.default is not None):
            given[names.get(name, name)] = value
    for part, part_kind in getattr(kind, "sub_configs", {}).items():
        found = getattr(whole, part, None)
        if isinstance(found, PretrainedConfig) and isinstance(part_kind, type):
            given[part] = _common(type(found), known, encoder=encoder)
    if "kv_lora_rank" in takes:  # latent attention has no groups of heads
        given.pop("num_key_value_heads", None)
        given |= {"num_key_value_heads": sizes["num_attention_heads"]} if "num_key_value_heads" in takes else {}
    types = names.get("layer_types", "layer_types")
    settable = types in takes and not isinstance(getattr(kind, types, None), property)
    if settable and getattr(whole, types, None):
        each = list(dict.fromkeys(getattr(whole, types)))
        given[types] = (each * 2)[: max(2, len(each))]
        given[names.get("num_hidden_layers", "num_hidden_layers")] = len(given[types])
    return given


def random_model(config: PretrainedConfig, family: str, spread: float, noise: float = 0.0) -> PreTrainedModel:
    """With weights wide enough for answers to wander; with noise on them, a draft that often agrees."""
    for name in ("initializer_range", "init_std", "initializer_factor"):
        for part in (config, config.get_text_config()):
            if hasattr(part, name):
                setattr(part, name, spread * (20.0 if name == "initializer_factor" else 1.0))
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        kind = AutoModelForSeq2SeqLM if family.endswith(BESIDE) else AutoModelForCausalLM
        model: PreTrainedModel = kind.from_config(config)
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.data += 0.1 * torch.randn_like(weight)
        for weight in model.parameters():
            if noise and weight.is_floating_point():
                weight.data += noise * weight.std(unbiased=False) * torch.randn_like(weight)
    return model.eval()


class Stock:
    def __init__(self, model: PreTrainedModel, exact: PreTrainedModel) -> None:
        self._models = (model, exact)
        self._encodes = bool(model.config.is_encoder_decoder)

    def greedy(self, prompt: Sequence[int]) -> tuple[list[int], float, float]:
        """Its answer, the smallest lead of a chosen token over the next, and how far its forwards lie apart there."""
        tokens, logits = self._generated(prompt)
        top = logits.topk(2, dim=-1).values
        return tokens, float((top[:, 0] - top[:, 1]).min()), self.logs(prompt, tokens)[1]

    @torch.inference_mode()
    def _generated(self, prompt: Sequence[int], answer: Sequence[int] = ()) -> tuple[list[int], Tensor]:
        """What `generate` writes, or a given answer, and its logits `[tokens, vocab]`, float32."""
        ids = torch.tensor([list(prompt)])
        first = 1 if self._encodes else len(prompt)

        def force(written: Tensor, scores: Tensor) -> Tensor:
            forced = torch.full_like(scores, -torch.inf)
            forced[0, answer[written.shape[1] - first]] = 0.0
            return forced

        found = self._models[0].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(answer) or COUNT, do_sample=False, num_beams=1,
            output_logits=True, return_dict_in_generate=True, logits_processor=[force] if answer else [],
        )  # fmt: skip
        return found.sequences[0, first:].tolist(), torch.cat(found.logits).float()

    @torch.inference_mode()
    def logs(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[Tensor, float]:
        """Logarithms of the answer's probabilities `[tokens, vocab]` by one forward in float32, and how far off others
        of transformers' own are at most: one forward in its dtype, and `generate` with its cache."""
        found = [torch.log_softmax(self._generated(prompt, answer)[1], dim=-1)]
        for model in self._models:
            if self._encodes:
                start = model.generation_config.decoder_start_token_id
                given = {"input_ids": torch.tensor([prompt]), "decoder_input_ids": torch.tensor([[start, *answer]])}
                first = 0
            else:
                ids = torch.tensor([[*prompt, *answer]])
                given, first = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, len(prompt) - 1
            rows = model(**given, use_cache=False).logits[0, first : first + len(answer)]
            found.append(torch.log_softmax(rows.float(), dim=-1))
        cached, rounded, exact = (rows[: len(found[0])] for rows in found)
        finite = cached.isfinite() & rounded.isfinite() & exact.isfinite()
        return exact, max(float((other - exact).abs()[finite].max()) for other in (cached, rounded))


class Family:
    """One family in one dtype, written to a folder and loaded."""

    def __init__(self, name: str, folder: Path, dtype: str, known: Mapping[str, Any]) -> None:
        spread = known["spreads"].get(name, known["spreads"]["all"])
        kind = getattr(torch, dtype)
        for part, noise in (("target", 0.0), ("draft", NOISE)):
            made = random_model(small_config(name, known), name, spread, noise).to(kind)
            made.save_pretrained(folder / part)
        self.target = load_model(folder / "target", dtype=dtype)
        self.draft = load_model(folder / "draft", dtype=dtype)
        # As transformers loads it: some families keep a part in float32.
        with quiet_transformers():
            stock = type(made).from_pretrained(folder / "target", dtype=kind).eval()
        self.stock = Stock(stock, random_model(small_config(name, known), name, spread).to(kind).float())
        self.is_exact = dtype == "float32"
        self._ends = [] if self.target.sources is None else [self.target.sources.end]
        self._plain: dict[tuple[str, int], list[Answer]] = {}
        self._expected: dict[int, tuple[list[int], float]] = {}
        self.apart = 0.0  # how far forwards of transformers' own lay apart, at most

    def stack(self, cell: Cell) -> Stack:
        drafters: dict[str, Drafter] = {
            "none": NoDrafter(),
            "prompt-lookup": PromptLookup(min_ngram=1),
            "draft": DraftModel(self.draft, 4),
            "draft tree": DraftModel(self.draft, branching=(3, 2, 1)),
        }
        return Stack(self.target, drafters[cell.drafter], rule_of(cell.rule), entropy=7)

    @staticmethod
    def params(cell: Cell) -> SamplingParams:
        return SamplingParams(
            max_tokens=COUNT,
            temperature=0.0 if cell.way == "greedy" else 1.0,
            seed=7 if cell.way == "seeded" else None,
            logprobs=0 if cell.way == "sampled" else None,
        )

    def prompts(self, cell: Cell) -> list[list[int]]:
        return [[*prompt, *self._ends] for prompt in cell.prompts]

    def answers(self, cell: Cell) -> list[Answer]:
        engine = self.stack(cell).engine(cell.batch)
        answers: list[Answer] = engine.generate(self.prompts(cell), self.params(cell))
        wrong = [str(answer.error or answer.warnings) for answer in answers if answer.error or answer.warnings]
        if wrong:
            raise RuntimeError(wrong[0])
        if left := engine.check_idle():
            raise RuntimeError(f"left over: {left}")
        return answers

    def plain(self, cell: Cell) -> list[Answer]:
        key = cell.way, cell.batch
        if key not in self._plain:
            self._plain[key] = self.answers(Cell("none", "speculative", *key))
        return self._plain[key]

    def expected(self, prompt: Sequence[int]) -> tuple[list[int], float]:
        """Of transformers, up to what ends it, and by how much its tokens lead beyond how far its forwards differ."""
        if len(prompt) not in self._expected:
            tokens, lead, apart = self.stock.greedy(prompt)
            self.apart = max(self.apart, apart)
            ends = [place for place, token in enumerate(tokens) if token in self.target.eos_token_ids]
            self._expected[len(prompt)] = (tokens[: ends[0]] if ends else tokens), lead - 2.0 * apart
        return self._expected[len(prompt)]

    def verdict(self, cell: Cell) -> str:
        """Empty where the cell is exact, one of `EXPLAINED`, or else what is wrong."""
        answers, prompts = self.answers(cell), self.prompts(cell)
        if cell.way == "sampled":
            return self._law(prompts, answers)
        ties = False
        for number, (prompt, answer, own) in enumerate(zip(prompts, answers, self.plain(cell), strict=True)):
            if answer.token_ids != own.token_ids:
                asked = Context(self.stack(cell), [prompt], self.params(cell), cell.batch)
                point = divergence_point(own, answer, asked, number)
                if point.fault:
                    return point.describe()
                ties = True
            if cell.way == "greedy" and self.is_exact:
                tokens, lead = self.expected(prompt)
                if answer.token_ids != tokens:
                    if lead > NEAR:
                        return f"request {number} differs from transformers (a lead of {lead:.2g} at least)"
                    ties = True
        return "near tie" if ties else ""

    def _law(self, prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> str:
        """Whether tokens had the probabilities that transformers' own forward gives them.

        In bfloat16 a few may be further off than the rounding that was met elsewhere: a router or an index that picks
        other experts or other tokens is a jump. float32 is held to all of them.
        """
        far, tokens = 0, 0
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            if not answer.token_ids:
                continue
            exact, moved = self.stock.logs(prompt, answer.token_ids)
            allowed = ROUNDINGS * moved + 1e-3 * (1.0 + float(exact[exact.isfinite()].std()))
            for place, told in enumerate(answer.logprobs or ()):
                apart = abs(told.logprob - float(exact[place, told.token]))
                tokens += 1
                if not self.is_exact and allowed < apart < torch.inf:
                    far += 1
                elif not apart <= allowed:
                    return (
                        f"request {number}, token {place}: its log probability is {apart:.2g} off, and rounding "
                        f"explains {allowed:.2g}"
                    )
        if far > MOST_FAR * tokens:
            return f"{far} of {tokens} tokens have log probabilities further off than rounding explains"
        return "rounding" if far else ""


def mechanism_of(model: HuggingFaceModel) -> str:
    if model.sources is not None:
        return "encoder-decoder, one text at a time"
    kind = type(model._backend).__name__.removesuffix("Backend")
    alone = {
        "Alone": "one text at a time",
        "Copied": "one text at a time, behind copies of its cache",
        "WholeText": "the whole text at every step",
    }
    return alone.get(kind, f"packed ({kind.lower()}{', carried states' if model.pool.carries else ''})")


def examine(
    family: str, cells: Sequence[Cell], known: Mapping[str, Any], end: float = math.inf
) -> list[dict[str, Any]]:
    """A line for each dtype; none where it is later than `end`."""
    found = []
    for dtype in DTYPES if time.monotonic() < end else ():
        began = time.monotonic()
        line: dict[str, Any] = {"family": family, "dtype": dtype, "transformers": transformers.__version__}
        with tempfile.TemporaryDirectory() as folder:
            line |= _outcome(family, Path(folder), dtype, cells, known)
        found.append(line | {"seconds": round(time.monotonic() - began, 1)})
    return found


def _outcome(family: str, folder: Path, dtype: str, cells: Sequence[Cell], known: Mapping[str, Any]) -> dict[str, Any]:
    try:
        spread = known["spreads"].get(family, known["spreads"]["all"])
        Stock(model := random_model(small_config(family, known), family, spread), model).greedy([*PROMPTS[0], 2])
    except Exception as error:  # whatever a family's own code raises is its reason
        return {"outcome": "not built", "reason": _told(error)}
    try:
        loaded = Family(family, folder, dtype, known)
    except UnsupportedModelError as error:
        return {"outcome": "refused", "reason": str(error).replace(str(folder), "")}
    except Exception as error:
        return {"outcome": "broken", "reason": _told(error)}
    found: dict[str, str] = {}
    for cell in cells:
        try:
            found[cell.name] = loaded.verdict(cell)
        except (TruedraftError, RuntimeError, LookupError, ValueError, TypeError) as error:
            found[cell.name] = _told(error)
    wrong = {name: said for name, said in found.items() if said and said not in EXPLAINED}
    facts = {
        "outcome": "wrong" if wrong else "exact",
        "mechanism": mechanism_of(loaded.target),
        "equality": loaded.target.equality,
        "cells": len(found),
        "transformers_apart": round(loaded.apart, 4),
        "explained": Counter(said for said in found.values() if said in EXPLAINED),
        "distinct": len({token for answer in loaded.plain(PAIRWISE[0]) for token in answer.token_ids}),
    }
    return facts | ({"wrong": wrong} if wrong else {})


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def report(lines: Sequence[Mapping[str, Any]]) -> str:
    by = {(line["family"], line["dtype"]): line for line in lines}
    names = list(dict.fromkeys(line["family"] for line in lines))
    counted = Counter(by[name, "float32"]["outcome"] for name in names if (name, "float32") in by)
    told = [", ".join(f"{count} {outcome}" for outcome, count in counted.most_common()), "", _share(by, names), ""]
    runs: dict[str, list[str]] = {}
    others = []
    for name in names:
        cells = [_cell(by.get((name, dtype))) for dtype in DTYPES]
        mechanism = by.get((name, "float32"), {}).get("mechanism", "")
        if set(cells) == {"exact"}:
            runs.setdefault(mechanism, []).append(name.replace(", encoder-decoder", ""))
        else:
            told_of = cells[0] if len(set(cells)) == 1 else f"float32: {cells[0]}; bfloat16: {cells[1]}"
            others.append(f"| {name} | {mechanism} | {told_of} |")
    told += ["| runs | families that are exact in both dtypes |", "|---|---|"]
    told += [f"| {mechanism} | {', '.join(dict.fromkeys(runs[mechanism]))} |" for mechanism in sorted(runs)]
    told += ["", "| other families | runs | outcome |", "|---|---|---|", *others]
    unlike = [
        f"{line['family']} ({line['transformers_apart']:.2g})"
        for line in lines
        if line["dtype"] == "float32" and line.get("transformers_apart", 0.0) > APART
    ]
    if unlike:
        told += ["", f"In float32 transformers' own forwards lie further apart than {APART} in a log probability for "]
        told[-1] += f"{', '.join(unlike)}: there `generate` is no measure, and answers are held to the forward alone."
    return "\n".join(told)


def _share(by: Mapping[tuple[str, str], Mapping[str, Any]], names: Sequence[str]) -> str:
    """How many of the families that transformers itself generates with run here, and which do not."""
    own = [name for name in names if by.get((name, "float32"), {}).get("outcome", "not built") != "not built"]
    if not own:
        return "No family was built."
    failing = [name for name in own if any(by.get((name, dtype), {}).get("outcome") != "exact" for dtype in DTYPES)]
    return (
        f"Of {len(own)} families that `generate` itself runs, {len(own) - len(failing)} are exact in both dtypes "
        f"({1 - len(failing) / len(own):.0%})" + (f"; the others: {'; '.join(failing)}." if failing else ".")
    )


INTRODUCTION = """
`make conformance` makes this page. It builds every family of text models that the installed transformers
({version}) has, small and with random weights (`benchmarks/conformance_shapes.json`), loads it as a user does, and runs
it with drafters, rules, ways of sampling and batches. One family of each way to run goes through all {every} cells, in
both dtypes: {fully}.
The others go through the {cells} cells at the end of this section, in which every two values of two of these meet
(`make conformance-full` runs the other {rest}, too). `benchmarks/results/conformance.jsonl` has all outcomes.

- *exact*: no cell failed. Greedy and seeded answers are those of plain decoding; where they part, the place is a near
  tie by the margin and the rounding measured there. Greedy answers in float32 are those of transformers' `generate`,
  wherever a token leads the next by more than transformers' own forwards (with a cache, without, in float32) differ on
  the same text. The probability of a sampled token is that of transformers' forward, up to {rounds:g} times what these
  forwards differ by.
- *near tie*, *rounding*: in how many cells there were any. In bfloat16 up to {far:.0%} of a cell's tokens may be
  further off, because a router that picks another expert jumps.
- *refused* quotes the error at load. *not built*: transformers could not build the model from these sizes, or not
  generate with it.
"""


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    ways = {line["family"]: line.get("mechanism", "not built") for line in reversed(lines)}
    told = INTRODUCTION.format(
        version=transformers.__version__, cells=len(PAIRWISE), every=len(EVERY), rounds=ROUNDINGS, far=MOST_FAR,
        fully=", ".join(f"{name} ({ways.get(name, 'not run')})" for name in FULLY), rest=len(EVERY) - len(PAIRWISE),
    )  # fmt: skip
    ran = "\n".join(f"| {' | '.join(cell.name.split(', '))} |" for cell in PAIRWISE)
    table = f"The {len(PAIRWISE)} cells:\n\n| drafter | rule | sampling | requests |\n|---|---|---|---|\n{ran}\n"
    return f"{told}\n{report(lines)}\n\n{table}\n"


def _cell(line: Mapping[str, Any] | None) -> str:
    if line is None:
        return "not run"
    if line["outcome"] == "exact":
        return "".join(["exact", *(f", {said} in {n} of {line['cells']}" for said, n in line["explained"].items())])
    if line["outcome"] == "wrong":
        name, said = next(iter(line["wrong"].items()))
        return f"wrong in {len(line['wrong'])} of {line['cells']} cells ({name}: {said})"
    return f"{line['outcome']}: {line['reason']}"


def _examined(names: Sequence[str], most_s: float, *, every: bool) -> Iterator[list[dict[str, Any]]]:
    """The outcomes of families as they come, one family to a core at a time; none is begun when the time is over."""
    end, known = time.monotonic() + most_s, json.loads(SHAPES.read_text())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count() or 1, context, torch.set_num_threads, (1,)) as pool:
        waited = [
            pool.submit(examine, family, EVERY if every or family in FULLY else PAIRWISE, known, end)
            for family in names
        ]
        yield from (each.result() for each in as_completed(waited))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=families())
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--report", action="store_true", help="examine nothing, print the tables")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    asked = parser.parse_args()
    kept = Lines(asked.out)
    done = {line["family"] for line in kept.records}
    left = [] if asked.report else [family for family in asked.families if family not in done]
    for examined in _examined(left, 60 * asked.minutes, every=asked.full):
        for line in examined:
            kept.add(line)
            note(f"{line['family']}, {line['dtype']}: {_cell(line)}")
    places = {name: place for place, name in enumerate(families())}
    lines = sorted(
        kept.records, key=lambda line: (places.get(line["family"], len(places)), DTYPES.index(line["dtype"]))
    )
    print(report(lines))
    if asked.page:
        PAGE.write_text(f"# Conformance\n\n{page(lines)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
