"""Every family of causal models that the installed transformers has, small and with random weights: `make conformance`.

    python benchmarks/conformance.py [--families NAME ...] [--full] [--minutes 60] [--out FILE]
    python benchmarks/conformance.py --report

A family is built from `conformance_shapes.json`, written to a folder and loaded as a user loads it, once for each
dtype. Then drafters, rules and ways of sampling are run over it, alone and in a ragged batch of eight: pairwise, or
with --full all of them. Greedy answers are held to transformers' own in float32 and to plain decoding of this package
in bfloat16; coupled ones to plain decoding; of sampled ones every token's logarithm of probability is held to that of
transformers' own forward over the whole text. Every family's outcome is a line of JSON, and a rerun goes on behind
them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from truedraft import Engine, SamplingParams, load_model
from truedraft.drafters import Drafter, DraftModel, PromptLookup
from truedraft.errors import TruedraftError, UnsupportedModelError
from truedraft.models import HuggingFaceModel
from truedraft.models.loading import quiet_transformers

HERE = Path(__file__).parent
SHAPES = HERE / "conformance_shapes.json"
OUT = HERE / "results" / "conformance.jsonl"
DTYPES = ("float32", "bfloat16")
COUNT = 24
NOISE = 0.05
# In float32 a greedy token may differ where the likeliest two are nearer than rounding moves them.
NEAR = 2e-3
PROMPTS = [[(7 * place * place + 3 * place + 5 * row) % 89 + 3 for place in range(4 + 5 * row)] for row in range(8)]


@dataclass(frozen=True)
class Cell:
    """What is run over a family.

    Attributes:
        drafter: of `DRAFTERS`.
        rule: lossless ones.
        way: "greedy", "sampled" or "coupled".
        batch: requests at once.
    """

    drafter: str
    rule: str
    way: str
    batch: int


DRAFTERS = ("none", "prompt-lookup", "draft", "draft tree")
WAYS = ("greedy", "sampled", "coupled")
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
    Cell("none", "speculative", "coupled", 8),
    Cell("prompt-lookup", "speculative", "greedy", 8),
    Cell("prompt-lookup", "block", "sampled", 8),
    Cell("prompt-lookup", "block", "coupled", 1),
    Cell("draft", "block", "greedy", 1),
    Cell("draft", "speculative", "sampled", 8),
    Cell("draft", "block", "coupled", 8),
    Cell("draft tree", "speculative", "greedy", 8),
    Cell("draft tree", "speculative", "sampled", 1),
    Cell("draft tree", "speculative", "coupled", 8),
]


def shapes() -> dict[str, Any]:
    """The sizes of small models: `sizes` of all, `families` of single ones."""
    found: dict[str, Any] = json.loads(SHAPES.read_text())
    return found


def small_config(family: str, known: Mapping[str, Any]) -> PretrainedConfig:
    """A small configuration of a family: of the common sizes those that it has, then its own."""
    kind = CONFIG_MAPPING[family]
    own = dict(known["families"].get(family, {}))
    alone = own.pop("alone", False)  # the common sizes do not fit it
    given: dict[str, Any] = {}
    if not alone:
        names = getattr(kind, "attribute_map", {})
        whole = kind()
        for name, value in known["sizes"].items():
            if getattr(whole, name, None) is not None or name.endswith("_token_id"):
                given[names.get(name, name)] = value
        kinds = getattr(whole, "layer_types", None)
        if kinds:
            each = list(dict.fromkeys(kinds))
            given["layer_types"] = (each * 2)[: max(2, len(each))]
            given[names.get("num_hidden_layers", "num_hidden_layers")] = len(given["layer_types"])
    return AutoConfig.for_model(family, **given | own)


def random_model(config: PretrainedConfig, spread: float, noise: float = 0.0) -> PreTrainedModel:
    """With weights wide enough for answers to wander; with noise on them, a draft that often agrees."""
    config.initializer_range = spread
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.data += 0.1 * torch.randn_like(weight)
        for weight in model.parameters():
            if noise and weight.is_floating_point():
                weight.data += noise * weight.std(unbiased=False) * torch.randn_like(weight)
    return model.eval()


@torch.inference_mode()
def by_transformers(model: PreTrainedModel) -> tuple[list[list[int]], list[float]]:
    """Its greedy answers, and of each the smallest lead of a chosen token over the next."""
    answers, leads = [], []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        answers.append(found.sequences[0, len(prompt) :].tolist())
        top = torch.cat(found.logits).float().topk(2, dim=-1).values
        leads.append(float((top[:, 0] - top[:, 1]).min()))
    return answers, leads


@torch.inference_mode()
def logits_of(model: PreTrainedModel, tokens: Sequence[int], start: int) -> Tensor:
    """Of transformers' own forward over a whole text, behind each token from `start` on, in float32."""
    ids = torch.tensor([list(tokens)])
    logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, start:]
    return logits.float()


class Family:
    """One family in one dtype, loaded.

    Args:
        name: of the family.
        folder: where it is written to.
        dtype: of `DTYPES`.
        known: `shapes`.
    """

    def __init__(self, name: str, folder: Path, dtype: str, known: Mapping[str, Any]) -> None:
        spread = known["spreads"].get(name, 0.25)
        self.dtype = dtype
        for part, noise in (("target", 0.0), ("draft", NOISE)):
            random_model(small_config(name, known), spread, noise).to(getattr(torch, dtype)).save_pretrained(
                folder / part
            )
        with quiet_transformers():
            self.stock = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=dtype).eval()
        self.target = load_model(folder / "target", dtype=dtype)
        self.draft = load_model(folder / "draft", dtype=dtype)
        self._plain: dict[tuple[str, int], list[Any]] = {}

    @property
    def mechanism(self) -> str:
        """What runs it, in words."""
        return mechanism_of(self.target)

    def drafter(self, name: str) -> Drafter | None:
        """One of `DRAFTERS`."""
        if name == "prompt-lookup":
            return PromptLookup(min_ngram=1)
        if name == "none":
            return None
        return DraftModel(self.draft, 4) if name == "draft" else DraftModel(self.draft, branching=(3, 2, 1))

    def answers(self, cell: Cell) -> list[Any]:
        """Of this package."""
        params = SamplingParams(
            max_tokens=COUNT, temperature=0.0 if cell.way == "greedy" else 1.0, seed=7, coupled=cell.way == "coupled",
            logprobs=0 if cell.way == "sampled" else None,
        )  # fmt: skip
        engine = Engine(self.target, self.drafter(cell.drafter), cell.rule, controller="fixed")
        prompts = PROMPTS[: cell.batch] if cell.batch > 1 else PROMPTS[3:4]
        answers = engine.generate([list(prompt) for prompt in prompts], params)
        wrong = [str(answer.error or answer.warnings) for answer in answers if answer.error or answer.warnings]
        if wrong:
            raise RuntimeError(wrong[0])
        if left := engine.check_idle():
            raise RuntimeError(f"left over: {left}")
        return answers

    def plain(self, cell: Cell) -> list[Any]:
        """Answers without a drafter."""
        key = cell.way, cell.batch
        if key not in self._plain:
            self._plain[key] = self.answers(Cell("none", "speculative", cell.way, cell.batch))
        return self._plain[key]

    def verdict(self, cell: Cell, expected: Sequence[Sequence[int]], leads: Sequence[float]) -> str:
        """Empty where the cell is exact, "near tie" where answers part at one, else what is wrong."""
        answers = self.answers(cell)
        prompts = PROMPTS[: cell.batch] if cell.batch > 1 else PROMPTS[3:4]
        if cell.way == "sampled":
            return self._law(prompts, answers)
        plain = self.plain(cell)
        ties = False
        for number, (answer, own) in enumerate(zip(answers, plain, strict=True)):
            if list(answer.token_ids) != list(own.token_ids):
                if self.target.equality == "bit for bit" or not self._nearly_tied(prompts[number], answer, own):
                    return f"request {number} differs from plain decoding"
                ties = True
            place = PROMPTS.index(prompts[number])
            if cell.way == "greedy" and self.dtype == "float32" and list(answer.token_ids) != expected[place]:
                if leads[place] > NEAR:
                    return f"request {number} differs from transformers"
                ties = True
        return "near tie" if ties else ""

    def _nearly_tied(self, prompt: Sequence[int], one: Any, other: Any) -> bool:
        """Whether two answers part where the likeliest two tokens are as near as rounding moves them."""
        pairs = zip(one.token_ids, other.token_ids, strict=False)
        place = next((number for number, (mine, its) in enumerate(pairs) if mine != its), None)
        if place is None:
            return False
        text = [*prompt, *one.token_ids[:place]]
        top = logits_of(self.stock, text, len(text) - 1)[0].topk(2).values
        return float(top[0] - top[1]) <= (NEAR if self.dtype == "float32" else 0.02 * float(top[0].abs() + 1.0))

    def _law(self, prompts: Sequence[Sequence[int]], answers: Sequence[Any]) -> str:
        """Whether tokens had the probabilities that transformers' own forward gives them."""
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            rows = logits_of(self.stock, [*prompt, *answer.token_ids], len(prompt) - 1)[: len(answer.token_ids)]
            logs = torch.log_softmax(rows, dim=-1)
            allowed = (1e-3 if self.dtype == "float32" else 0.05) * float(rows.std() + 1.0)
            for place, told in enumerate(answer.logprobs):
                apart = abs(told.logprob - float(logs[place, told.token]))
                if not apart <= allowed:
                    return f"request {number}, token {place}: its log probability is {apart:.2g} off"
        return ""


def mechanism_of(model: HuggingFaceModel) -> str:
    """What runs a model, in words: how its forward is computed and what its layers keep."""
    kind = type(model._backend).__name__.removesuffix("Backend").lower()
    if kind == "alone":
        return "one text at a time"
    return "packed, with carried states" if model.pool.carries else f"packed ({kind})"


def examine(family: str, cells: Sequence[Cell], known: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The outcome of a family, in each dtype."""
    for dtype in DTYPES:
        began = time.monotonic()
        line: dict[str, Any] = {"family": family, "dtype": dtype, "transformers": transformers.__version__}
        try:
            config = small_config(family, known)
            model = random_model(config, known["spreads"].get(family, 0.25)).to(getattr(torch, dtype))
        except Exception as error:  # whatever a family's own code raises is its reason
            yield line | {"outcome": "not built", "reason": _told(error)}
            continue
        try:
            expected, leads = by_transformers(model)
        except Exception as error:
            line["generate"] = _told(error)
            expected, leads = [], []
        with tempfile.TemporaryDirectory() as folder:
            yield (
                line
                | _outcome(family, Path(folder), dtype, cells, known, expected, leads)
                | {"seconds": round(time.monotonic() - began, 1)}
            )


def _outcome(
    family: str,
    folder: Path,
    dtype: str,
    cells: Sequence[Cell],
    known: Mapping[str, Any],
    expected: Sequence[Sequence[int]],
    leads: Sequence[float],
) -> dict[str, Any]:
    try:
        loaded = Family(family, folder, dtype, known)
    except UnsupportedModelError as error:
        return {"outcome": "refused", "reason": str(error)}
    except Exception as error:
        return {"outcome": "broken", "reason": _told(error)}
    found: dict[str, str] = {}
    for cell in cells:
        name = f"{cell.drafter}, {cell.rule}, {cell.way}, {cell.batch}"
        try:
            found[name] = loaded.verdict(cell, expected, leads) if expected else "not held to generate"
        except (TruedraftError, RuntimeError) as error:
            found[name] = _told(error)
    wrong = {name: said for name, said in found.items() if said not in ("", "near tie")}
    ties = sum(said == "near tie" for said in found.values())
    facts = {"mechanism": loaded.mechanism, "equality": loaded.target.equality, "cells": len(found), "near_ties": ties}
    return facts | ({"outcome": "exact"} if not wrong else {"outcome": "wrong", "wrong": wrong})


def _told(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def report(lines: Sequence[Mapping[str, Any]]) -> str:
    """The families by outcome, as a table in Markdown."""
    told = ["| family | float32 | bfloat16 |", "|---|---|---|"]
    families = dict.fromkeys(line["family"] for line in lines)
    by = {(line["family"], line["dtype"]): line for line in lines}
    told.extend(
        f"| {family} | {' | '.join(_cell(by.get((family, dtype))) for dtype in DTYPES)} |" for family in families
    )
    return "\n".join(told)


def _cell(line: Mapping[str, Any] | None) -> str:
    if line is None:
        return "not run"
    if line["outcome"] in ("exact", "wrong"):
        ties = f", {line['near_ties']} of {line['cells']} cells with near ties" if line["near_ties"] else ""
        wrong = f": {next(iter(line['wrong'].items()))}" if line["outcome"] == "wrong" else ""
        return f"{line['outcome']} ({line['mechanism']}){ties}{wrong}"
    return f"{line['outcome']}: {line['reason']}"


def main() -> int:
    """Examine, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--report", action="store_true")
    asked = parser.parse_args()
    lines = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    done = {line["family"] for line in lines}
    end = time.monotonic() + 60 * asked.minutes
    known = shapes()
    for family in () if asked.report else asked.families:
        if family in done or time.monotonic() > end:
            continue
        for line in examine(family, EVERY if asked.full else PAIRWISE, known):
            lines.append(line)
            with asked.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            sys.stderr.write(f"{family}, {line['dtype']}: {_cell(line)}\n")
    print(report(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
