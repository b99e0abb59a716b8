"""Tables of n-grams for a target, counted in texts or in its own answers to prompts cut from them, and measured."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truedraft.drafters.ngram.drafter import NgramDrafter
from truedraft.drafters.ngram.table import MOST_ORDER, Level, NgramTable, TableFacts, table_bytes
from truedraft.drafters.registry import TABLE, write_record
from truedraft.errors import DataError, ModelError, OptionError, UnsupportedModelError
from truedraft.machine import describe_machine, in_bytes
from truedraft.measure import TREE_TEMPERATURES
from truedraft.models.base import LanguageModel
from truedraft.models.embedded import FOR_TABLES, refuse_no_text
from truedraft.models.loading import load_model, quiet_transformers
from truedraft.options import check_whole, read_bytes
from truedraft.training.evaluate import EngineEvaluation, EngineRound, measure_in_engine
from truedraft.training.loop import Callbacks
from truedraft.training.options import NgramSizeOptions, TextOptions
from truedraft.training.processes import Processes
from truedraft.training.report import base_name, evaluation_facts, write_card
from truedraft.training.texts.answer_writer import Source, Writing, WritingConfig, names_of
from truedraft.training.texts.data import Encoder, load_tokenizer, read_texts
from truedraft.training.texts.prompts import cut_prompts, keep_back, standard_library_texts
from truedraft.training.texts.self_distillation import WrittenAnswer
from truedraft.training.workspace import WORK, TimeBudget, duration, exclusive_access, writing

_HELD_OUT = 0.05  # share of the text, where no other is given
_TEST_PROMPTS, _TEST_TOKENS = 32, 64
_PIECE = 1 << 18  # characters encoded at once
_LEAST_DISCOUNT, _MOST_DISCOUNT = 0.1, 0.9
_ALWAYS_KEPT = 2  # tokens of n-grams that are never left out, because longer n-grams need their nodes


@dataclass(frozen=True)
class NgramConfig(NgramSizeOptions, TextOptions):
    """What decides a table in addition to the target and the data; without `answers` the data is counted.

    Raises OptionError for a value out of its range.
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
    """A counted table; `elapsed_s` is from the first token read to the table on disk."""

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
    """Count a table for the target into the folder `out`, replacing an existing one, and measure it.

    An interrupted run resumes after the written answers. Arguments as in `train_draft`; no files mean the standard
    library of the running interpreter, for the embedded target only.

    Raises:
        ModelError: the target cannot be loaded or has no tokenizer.
        DataError: the data cannot be read or is too short, or no table of the allowed size can be made of it.
        OptionError: `out` holds answers of another configuration, or another process is counting there.
        TrainingError: the target failed, or files cannot be written.
    """
    config, hooks, budget = config or NgramConfig(), callbacks or Callbacks(), budget or TimeBudget()
    Processes.here().refuse_several("a table is counted")
    refuse_no_text(str(target), data, FOR_TABLES)
    tokenizer = load_tokenizer(target)
    source, words = _source(data, held_out, tokenizer)
    if source.has_prompts and config.answers is None:
        raise DataError("the data holds prompts, which the target answers first: add --answers, or give only texts")
    tests = cut_prompts(source.held_out, tokenizer, _TEST_PROMPTS, _TEST_TOKENS)
    with exclusive_access(out / WORK):
        model, began = load_model(target, device=config.device), time.perf_counter()
        budget.loaded()
        if config.answers is None:
            documents = _encoded(source.texts, tokenizer, model.vocab_size, config.max_text_tokens, hooks)
        else:
            pen = Writing(config.tokens, config.answers, out / WORK, hooks, budget)
            records = _answered(model, source, tokenizer, pen, config)
            kept = 0 if tests else min(_TEST_PROMPTS, int(_HELD_OUT * len(records)))  # answered ones to measure on
            tests = tests or [record.prompt for record in records[:kept]]
            documents = [np.array(record.answer, np.int32) for record in records[kept:]]
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
        _write_card(str(target), result, config.device)
    return result


def _write_card(target: str, result: NgramResult, device: str) -> None:
    facts = {
        "n-grams of 1, 2, ... tokens": ", ".join(f"{number:,}" for number in result.table.ngrams),
        "counted tokens": f"{result.table.facts.counted_tokens:,}",
        "data": result.source,
        "file": in_bytes(result.bytes),
        "counting": f"{duration(result.elapsed_s)} on {describe_machine(device)}",
    }
    sentence = (
        f"Proposes tokens that {base_name(target)} verifies (speculative decoding): `--drafter ngram:FOLDER`. "
        "Counted with truedraft."
    )
    measured = evaluation_facts(result.evaluations)
    write_card(result.folder, target, "A table of n-grams", sentence, facts, measured, "ngram")


def _write_record(result: NgramResult, target: object, model: LanguageModel, callbacks: Callbacks) -> None:
    try:
        write_record(result.folder, "ngram", str(target), model.fingerprint, result.as_dict(), model.sample)
    except (ModelError, UnsupportedModelError) as error:
        callbacks.on_note(f"the table does not say which target it is for: {error}")


def _source(data: Sequence[Path], held_out: Sequence[Path], tokenizer: Encoder) -> tuple[Source, str]:
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
    """Parts of a text that end at line ends where possible, so that a long text is not encoded at once."""
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
            f"the longest text has {longest} tokens, its end included, and n-grams of {config.order} are requested; "
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
        callbacks.on_note("the text is too short to keep some of it back, so the gain of the table was not measured")
        return []
    drafter = NgramDrafter(table)
    about = {"num_speculative_tokens": drafter.limits.depth, "nodes": drafter.limits.nodes}
    rounds = [EngineRound(temperature, lambda: drafter, about) for temperature in TREE_TEMPERATURES.values()]
    return measure_in_engine(
        model,
        rounds,
        prompts,
        on_progress=lambda done, total: callbacks.on_progress("measuring", done, total, "rounds over held-out prompts"),
        budget=budget,
    )


@dataclass(frozen=True, slots=True)
class _Counted:
    """The n-grams of one length in a text, sorted by their tokens, each `[n-grams]`.

    `prefixes` and `suffixes` are the indices without the last and the first token, `weights` c of the formula.
    """

    times: NDArray[np.int64]
    tokens: NDArray[np.int64]
    prefixes: NDArray[np.int64]
    suffixes: NDArray[np.int64]
    weights: NDArray[np.int64]


def count_ngrams(
    texts: Sequence[Sequence[int] | NDArray[np.integer[Any]]],
    vocab_size: int,
    order: int,
    *,
    min_count: int = 1,
    max_bytes: int | None = None,
    tokenizer: str = "",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> NgramTable:
    """Make a table of texts.

    Kneser and Ney 1995, in the interpolated form of Chen and Goodman 1999 with one discount D a level:

        P(w | h) = max(c(h w) - D, 0) / c(h) + backoff(h) P(w | h without its first token)

    where c counts occurrences at the longest n-grams, and below them how many different tokens preceded an n-gram (the
    start of a text is one more); D = n1 / (n1 + 2 n2) of the n-grams that were counted once and twice; and backoff(h)
    is the rest of 1 after the n-grams in the table, so that P is a distribution even if some were left out for size.

    Args:
        texts: token ids below `vocab_size`; no n-gram crosses from one into the next.
        min_count: n-grams of three or more tokens that occur less often are left out, and their mass is backed off.
        max_bytes: limit of the table's arrays; `min_count` is raised until they fit.
        tokenizer: fingerprint of the ids.

    Raises DataError for no token, or if n-grams of one and two tokens take more bytes; OptionError for another order.
    """
    if not 1 <= order <= MOST_ORDER:
        raise OptionError(f"must be 1 or more and at most {MOST_ORDER}, got {order}", field="order")
    if not any(len(text) for text in texts):
        raise DataError("the text has no token; give more text")
    passes = itertools.count(1)

    def done() -> None:
        on_progress(next(passes), 2 * order)

    counted = _count(texts, vocab_size, order, done)
    min_count = _fitting(counted, min_count, max_bytes)
    facts = TableFacts(vocab_size, tokenizer, int(counted[0].times.sum()), min_count)
    weights = counted[0].weights.astype(np.float64)
    probs = [weights / weights.sum()]
    kept = [np.ones(vocab_size, bool)]
    backoffs: list[NDArray[np.float64]] = []
    for length, (shorter, own) in enumerate(itertools.pairwise(counted), start=2):
        keep = own.times >= (1 if length <= _ALWAYS_KEPT else min_count)
        contexts = len(shorter.times)
        given = np.bincount(own.prefixes, own.weights, contexts)
        seen = np.maximum(own.weights - _discount(own.weights), 0.0) / given[own.prefixes] * keep
        backoffs.append(np.clip(1.0 - np.bincount(own.prefixes, seen, contexts), 0.0, 1.0))
        probs.append(seen + backoffs[-1][own.prefixes] * probs[-1][own.suffixes])
        kept.append(keep)
        done()
    levels = _levels(counted, probs, kept, backoffs)
    done()
    return NgramTable(facts, levels)


def _fitting(counted: Sequence[_Counted], min_count: int, max_bytes: int | None) -> int:
    if max_bytes is None:
        return min_count
    times = [np.sort(own.times) for own in counted]

    def size(least: int) -> int:
        return table_bytes(
            [
                len(own) if length <= _ALWAYS_KEPT else len(own) - int(np.searchsorted(own, least))
                for length, own in enumerate(times, start=1)
            ]
        )

    none_left = max(min_count, *(int(own[-1]) for own in times)) + 1
    if size(none_left) > max_bytes:
        raise DataError(
            f"n-grams of up to {min(_ALWAYS_KEPT, len(counted))} tokens take {size(none_left):,} bytes, and "
            f"{max_bytes:,} are allowed; allow more, or give less text"
        )
    return bisect_left(range(none_left + 1), True, lo=min_count, key=lambda least: size(least) <= max_bytes)


def _discount(weights: NDArray[np.int64]) -> float:
    once, twice = (int(np.count_nonzero(weights == times)) for times in (1, 2))
    share = once / (once + 2 * twice) if once else 0.0
    return min(max(share, _LEAST_DISCOUNT), _MOST_DISCOUNT)


def _count(
    texts: Sequence[Sequence[int] | NDArray[np.integer[Any]]], vocab_size: int, order: int, done: Callable[[], None]
) -> list[_Counted]:
    """Occurrences and weights of all n-grams; those of one token are all ids."""
    ids = np.concatenate([np.asarray(text, np.int64) for text in texts])
    depth = np.concatenate([np.arange(len(text)) for text in texts])  # tokens before each in its text
    none = np.zeros(0, np.int64)
    times = np.bincount(ids, minlength=vocab_size)
    counted = [_Counted(times, np.arange(vocab_size), none, none, times)]
    nodes = ids  # of the n-gram that ends at each place
    done()
    for length in range(2, order + 1):
        ends = np.flatnonzero(depth >= length - 1)
        keys, places, numbers, times = np.unique(
            nodes[ends - 1] * vocab_size + ids[ends], return_index=True, return_inverse=True, return_counts=True
        )
        suffixes = nodes[ends[places]]
        # Shorter n-grams are weighted by the number of different tokens before them.
        size, starts = len(counted[-1].times), nodes[depth == length - 2]
        begun = np.bincount(starts, minlength=size) > 0
        counted[-1] = replace(counted[-1], weights=np.bincount(suffixes, minlength=size) + begun)
        counted.append(_Counted(times, keys % vocab_size, keys // vocab_size, suffixes, times))
        nodes = np.full(len(ids), -1)
        nodes[ends] = numbers
        done()
    return counted


def _levels(
    counted: Sequence[_Counted],
    probs: Sequence[NDArray[np.float64]],
    kept: Sequence[NDArray[np.bool_]],
    backoffs: Sequence[NDArray[np.float64]],
) -> list[Level]:
    levels: list[Level] = []
    empty: NDArray[Any] = np.zeros(0)
    top = int(probs[0].argmax())
    best = np.array([top]), probs[0][[top]]  # after each context of the level above
    for number, own in enumerate(counted):
        keep = kept[number]
        first = tokens = backoff = found = found_probs = empty
        if number:
            above = np.cumsum(kept[number - 1]) - 1
            prefixes = above[own.prefixes[keep]]
            first = np.searchsorted(prefixes, np.arange(int(kept[number - 1].sum()) + 1))
            tokens = own.tokens[keep]
        if number + 1 < len(counted):
            suffixes = own.suffixes if number else np.zeros(len(own.times), np.int64)
            longer = counted[number + 1]
            best = _best(best, suffixes, backoffs[number], longer, probs[number + 1], kept[number + 1])
            backoff, found, found_probs = backoffs[number][keep], best[0][keep], best[1][keep]
        levels.append(
            Level(
                probs[number][keep].astype(np.float32),
                tokens.astype(np.int32),
                first.astype(np.int64),
                backoff.astype(np.float32),
                found.astype(np.int32),
                found_probs.astype(np.float32),
            )
        )
    return levels


def _best(
    shorter: tuple[NDArray[np.int64], NDArray[np.float64]],
    suffixes: NDArray[np.int64],
    backoff: NDArray[np.float64],
    longer: _Counted,
    probs: NDArray[np.float64],
    keep: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The top-1 token after each context, and its probability.

    It is the top-1 token in the table, or else that after the shorter context: if that one were in the table, too, its
    probability would be higher than what is backed off to it. `suffixes` are indices of the shorter contexts.
    """
    tokens, likely = shorter[0][suffixes], backoff * shorter[1][suffixes]
    prefixes, own_tokens, own_probs = longer.prefixes[keep], longer.tokens[keep], probs[keep]
    order = np.lexsort((own_tokens, -own_probs, prefixes))
    contexts, places = np.unique(prefixes[order], return_index=True)
    chosen = order[places]
    better = own_probs[chosen] >= likely[contexts]
    tokens[contexts[better]] = own_tokens[chosen[better]]
    likely[contexts[better]] = own_probs[chosen[better]]
    return tokens, likely
