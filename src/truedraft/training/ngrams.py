"""Tables of n-grams for a target, counted in texts or in its own answers to prompts cut from them, and measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from truedraft.drafters.ngram.drafter import NgramDrafter
from truedraft.drafters.ngram.table import MOST_ORDER
from truedraft.drafters.registry import TABLE, write_record
from truedraft.errors import DataError, ModelError, OptionError, UnsupportedModelError
from truedraft.machine import describe_machine, in_bytes
from truedraft.measure import TREE_TEMPERATURES
from truedraft.models.embedded import FOR_TABLES, refuse_no_text
from truedraft.models.loading import load_model, quiet_transformers
from truedraft.options import check_whole, read_bytes
from truedraft.training.evaluate import EngineEvaluation, EngineRound, measure_in_engine
from truedraft.training.loop import Callbacks
from truedraft.training.ngram_counts import count_ngrams
from truedraft.training.options import NgramSizeOptions, TextOptions
from truedraft.training.processes import Processes
from truedraft.training.report import base_name, evaluation_facts, write_card
from truedraft.training.texts.answer_writer import WritingConfig
from truedraft.training.texts.answered import Source, Writing, names_of
from truedraft.training.texts.data import read_texts
from truedraft.training.texts.prompts import cut_prompts, keep_back, standard_library_texts
from truedraft.training.texts.tokenizer import load_tokenizer
from truedraft.training.workspace import WORK, TimeBudget, duration, exclusive_access, writing

if TYPE_CHECKING:
    from truedraft.drafters.ngram.table import NgramTable
    from truedraft.models.base import LanguageModel
    from truedraft.training.texts.data import Encoder
    from truedraft.training.texts.self_distillation import WrittenAnswer

_HELD_OUT = 0.05  # share of the text, where no other is given
_TEST_PROMPTS, _TEST_TOKENS = 32, 64
_PIECE = 1 << 18  # characters encoded at once


@dataclass(frozen=True)
class NgramConfig(NgramSizeOptions, TextOptions):
    """What decides a table in addition to the target and the data.

    Attributes:
        answers: how the target writes the answers to count; None counts the data.
        seed: of the order of prompts where time is limited.

    Raises:
        OptionError: a value out of its range.
    """

    answers: WritingConfig | None = None
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("order", "min_count", "max_text_tokens", "tokens", "prompt_tokens"):
            check_whole(name, getattr(self, name), 1)
        if self.order > MOST_ORDER:
            raise OptionError(f"must be 1 or more and at most {MOST_ORDER}, got {self.order}", field="order")
        read_bytes("max_bytes", self.max_bytes)


@dataclass(frozen=True)
class NgramResult:
    """A counted table.

    Attributes:
        source: a description of the counted text.
        elapsed_s: seconds from the first token read to the table on disk.
        evaluations: in the engine, on held-out text; empty where there is none.
    """

    folder: Path
    table: NgramTable
    bytes: int
    source: str
    elapsed_s: float
    evaluations: Sequence[EngineEvaluation] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        facts = self.table.facts
        return {
            "order": self.table.order,
            "ngrams": list(self.table.ngrams),
            "bytes": self.bytes,
            "counted_tokens": facts.counted_tokens,
            "min_count": facts.min_count,
            "elapsed_s": self.elapsed_s,
            "served": [each.as_dict() for each in self.evaluations],
        }


def train_ngrams(
    target: str | Path,
    data: Sequence[Path],
    out: Path,
    config: NgramConfig | None = None,
    *,
    held_out: Sequence[Path] = (),
    callbacks: Callbacks | None = None,
    budget: TimeBudget | None = None,
) -> NgramResult:
    """Count a table for the target into the folder `out`, replacing an existing one, and measure it in the engine.

    An interrupted run resumes after the written answers when it is called again; texts are counted anew.

    Args:
        target: an embedded name, a folder, or a name on the Hugging Face hub.
        data: files of texts or chats and, with `answers`, of prompts, as `Source.read` reads them. No files mean the
            standard library of the running interpreter, for the embedded target only.
        held_out: files to measure on; without them the last twentieth of the data is held out.
        budget: the time for everything, measuring included; None sets no limit.

    Raises:
        ModelError: the target cannot be loaded or has no tokenizer.
        DataError: the data cannot be read or is too short, or no table of the allowed size can be made of it.
        OptionError: a size is out of range, `out` holds answers of another configuration, or another process is
            counting there.
        TrainingError: the target failed, or files cannot be written.
    """
    config, hooks, budget = config or NgramConfig(), callbacks or Callbacks(), budget or TimeBudget()
    Processes.here().refuse_several("a table is counted")
    refuse_no_text(str(target), data, FOR_TABLES)
    tokenizer = load_tokenizer(target)
    source, words = _source(data, held_out, tokenizer)
    if source.has_prompts and config.answers is None:
        raise DataError("the data holds prompts, which the target answers first: add --answers, or give texts alone")
    tests = cut_prompts(source.held_out, tokenizer, _TEST_PROMPTS, _TEST_TOKENS)
    with exclusive_access(out / WORK):
        model, began = load_model(target, device=config.device), time.perf_counter()
        budget.loaded()
        if config.answers is None:
            documents = _encoded(source.texts, tokenizer, model.vocab_size, config.max_text_tokens, hooks)
        else:
            pen = Writing(config.tokens, config.answers, out / WORK, hooks, budget)
            records = _answered(model, source, tokenizer, pen, config)
            if not tests:  # without texts some of the prompts are held out
                kept = min(_TEST_PROMPTS, int(_HELD_OUT * len(records)))
                records, tests = records[kept:], [record.prompt for record in records[:kept]]
            documents = [np.array(record.answer, np.int32) for record in records]
            words = f"what the target answers to prompts from {words}"
        table = _counted(documents, model, config, hooks)
        with writing(out / TABLE):
            out.mkdir(parents=True, exist_ok=True)
            table.write(out / TABLE)
        took = time.perf_counter() - began
        result = NgramResult(out, table, (out / TABLE).stat().st_size, words, took, [])
        _write_record(result, target, model, hooks)  # before measuring, which may be interrupted
        result = replace(result, evaluations=_measured(table, model, tests, hooks, budget))
        _write_record(result, target, model, hooks)
        facts = {
            "n-grams of 1, 2, ... tokens": ", ".join(f"{number:,}" for number in table.ngrams),
            "counted tokens": f"{table.facts.counted_tokens:,}",
            "data": words,
            "file": in_bytes(result.bytes),
            "counting": f"{duration(took)} on {describe_machine(config.device)}",
        }
        write_card(
            out,
            str(target),
            "A table of n-grams",
            f"Proposes tokens that {base_name(str(target))} verifies (speculative decoding): `--drafter ngram:FOLDER`. "
            "Counted with truedraft.",
            facts,
            evaluation_facts(result.evaluations),
            "ngram",
        )
    return result


def _write_record(result: NgramResult, target: object, model: LanguageModel, callbacks: Callbacks) -> None:
    try:
        write_record(result.folder, "ngram", str(target), model.fingerprint, result.as_dict(), model.sample)
    except (ModelError, UnsupportedModelError) as error:
        callbacks.on_note(f"the table does not say which target it is for: {error}")


def _source(data: Sequence[Path], held_out: Sequence[Path], tokenizer: Encoder) -> tuple[Source, str]:
    """The data to count and to measure on, and a description of the former."""
    if not data:
        texts, pieces = standard_library_texts()
        others = read_texts(held_out, tokenizer) if held_out else pieces
        return Source(texts, (), others, asks=False), "the standard library of Python"
    found = Source.read(data, held_out, tokenizer)
    if not held_out:
        texts, others = keep_back(found.texts, _HELD_OUT)
        found = replace(found, texts=texts, held_out=others)
    return found, names_of(data)


def _encoded(
    texts: Sequence[str], tokenizer: Encoder, vocab_size: int, most: int, callbacks: Callbacks
) -> list[NDArray[np.int32]]:
    """Each text's token ids, with the id that ends it; cut after `most` tokens, which is reported."""
    documents: list[NDArray[np.int32]] = []
    characters, done, kept, left_out = sum(map(len, texts)), 0, 0, False
    with quiet_transformers():  # it warns of texts longer than the context
        for text in texts:
            parts: list[NDArray[np.int32]] = []
            for piece in _pieces(text):
                callbacks.on_progress("reading text", done, characters, f"{kept:,} tokens")
                ids = tokenizer.encode(piece, add_special_tokens=False)
                parts.append(np.array(ids[: most - kept], np.int32))
                left_out, kept = len(parts[-1]) < len(ids), kept + len(parts[-1])
                done += round(len(piece) * len(parts[-1]) / len(ids)) if left_out else len(piece)
                if kept >= most:
                    break
            documents.append(np.concatenate([*parts, np.array([tokenizer.eos_token_id], np.int32)]))
            if kept >= most:
                break
    callbacks.on_progress("reading text", characters, characters, f"{kept:,} tokens")
    if left_out or done < characters:
        share = min(done / characters, 0.99)  # also where only its last token is left out
        callbacks.on_note(f"the first {kept:,} tokens of the text are counted, {share:.0%} of it")
    largest = max((int(document.max()) for document in documents), default=-1)
    if largest >= vocab_size:
        raise DataError(
            f"the text has the token id {largest}, and the target has {vocab_size} ids; leave out what writes it"
        )
    return documents


def _pieces(text: str) -> Iterator[str]:
    """A text in parts that end at line ends where possible, so that one long text is not encoded at once."""
    start = 0
    while start < len(text):
        end = min(start + _PIECE, len(text))
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def _answered(
    model: LanguageModel, source: Source, tokenizer: Encoder, pen: Writing, config: NgramConfig
) -> list[WrittenAnswer]:
    """Answers to prompts cut from texts and to those of the data, half of each where there are both."""
    count = -(-config.tokens // pen.how.answer_tokens)
    cut = cut_prompts(source.texts, tokenizer, count // 2 if source.has_prompts else count, config.prompt_tokens)
    if not cut and not source.has_prompts:
        raise DataError("there is no text to cut prompts from: give more text")
    return pen.answers(model, [*cut, *source.prompts], source.asks)


def _counted(
    documents: Sequence[NDArray[np.int32]], model: LanguageModel, config: NgramConfig, callbacks: Callbacks
) -> NgramTable:
    longest = max(map(len, documents), default=0)
    if longest < config.order or longest < 2:
        raise DataError(
            f"the longest text has {longest} tokens, its end included, and n-grams of {config.order} are asked for; "
            "give more text, or a smaller --order"
        )
    most, vocabulary = read_bytes("max_bytes", config.max_bytes), model.tokenizer
    table = count_ngrams(
        documents,
        model.vocab_size,
        config.order,
        min_count=config.min_count,
        max_bytes=most,
        tokenizer="" if vocabulary is None else vocabulary.fingerprint,
        on_progress=lambda done, total: callbacks.on_progress("counting", done, total, "passes over the n-grams"),
    )
    if table.facts.min_count > config.min_count:
        callbacks.on_note(
            f"n-grams of three tokens and more that occur less than {table.facts.min_count} times are left out, so "
            f"that the table takes no more than {in_bytes(most)}"
        )
    return table


def _measured(
    table: NgramTable, model: LanguageModel, prompts: Sequence[Sequence[int]], callbacks: Callbacks, budget: TimeBudget
) -> list[EngineEvaluation]:
    if not prompts:
        callbacks.on_note("the text is too short to keep some of it back, so what the table brings was not measured")
        return []
    drafter = NgramDrafter(table)
    about = {"num_speculative_tokens": drafter.limits.depth, "nodes": drafter.limits.nodes}
    new: Callable[[], NgramDrafter] = lambda: drafter  # noqa: E731
    rounds = [EngineRound(temperature, new, about) for temperature in TREE_TEMPERATURES.values()]
    return measure_in_engine(
        model,
        rounds,
        prompts,
        on_progress=lambda done, total: callbacks.on_progress("measuring", done, total, "rounds over held-out prompts"),
        budget=budget,
    )
