"""Tables for people and records for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from truedraft.cli.lossy import divergence_words
from truedraft.cli.machine import machine_facts
from truedraft.cli.measure import Comparison, Pair, counts_dict, decode_tokens_per_s, emitted, tokens_per_s
from truedraft.cli.visible import visible
from truedraft.core.counters import Counters
from truedraft.core.sampling import SamplingParams

if TYPE_CHECKING:
    from truedraft.cli.session import Setup
    from truedraft.cli.terminal import Terminal
    from truedraft.engine import Answer, Engine

_SIDES: tuple[tuple[str, Callable[[Pair], Any]], ...] = (
    ("plain", lambda pair: pair.plain),
    ("speculative", lambda pair: pair.speculative),
)
_SHOWN_DIFFERENCES = 5


def print_comparison(comparison: Comparison, engine: Engine, setup: Setup, runs: int, terminal: Terminal) -> None:
    """The table of `--compare`, and what stands beside it."""
    many = len(comparison.pairs) > 1
    terminal.out.print()
    drafter = engine.drafter.name if setup.drafter == "auto" else setup.drafter
    params = [pair.params for pair in comparison.pairs]
    line = _circumstances(engine, drafter, params, runs)
    terminal.out.print(line, style="dim", soft_wrap=True)
    terminal.out.print(_table(comparison))
    if many:
        low, high = min(comparison.speedups), max(comparison.speedups)
        terminal.out.print(
            f"speed-up: geometric mean {comparison.speedup:.2f}, from {low:.2f} to {high:.2f}; "
            f"{sum(speedup > 1 for speedup in comparison.speedups)} of {len(comparison.pairs)} prompts faster"
        )
    else:
        terminal.out.print(f"speed-up: {comparison.speedup:.2f}")
    terminal.out.print(_verdict(comparison))
    if not comparison.lossless:
        words = divergence_words(sum((pair.speculative.stats for pair in comparison.pairs), Counters()))
        terminal.out.print(f"lossy rule {engine.rule.spec}: {words}", soft_wrap=True)
    for pair in [pair for pair in comparison.pairs if pair.difference is not None][:_SHOWN_DIFFERENCES]:
        assert pair.difference is not None
        terminal.out.print(visible(f"  prompt {pair.name} {pair.difference.describe()}"), soft_wrap=True)
    if many and not all(each.greedy for each in params):
        seeds = ", ".join(f"{pair.name}: {pair.params.seed}" for pair in comparison.pairs)
        terminal.out.print(visible(f"seeds: {seeds}"), style="dim", soft_wrap=True)
    if comparison.repeated_8grams is not None:
        where = "answers" if many else "answer"
        terminal.out.print(f"repeated 8-grams in the plain {where}: {comparison.repeated_8grams:.2f}")


def _circumstances(engine: Engine, drafter: str, each: Sequence[SamplingParams], runs: int) -> str:
    import torch

    target = engine.target
    device = target.device.type
    threads = torch.get_num_threads()
    where = device if device != "cpu" else f"{threads} thread{'s' if threads > 1 else ''}"
    how = _drawing(each)
    if not engine.rule.lossless:
        how = f"lossy rule {engine.rule.spec}, {how}"
    what = f"{len(each)} prompts, one run each way" if len(each) > 1 else f"medians of {runs} runs each way"
    dtype = str(target.dtype).removeprefix("torch.")
    note = target.note
    name = target.name if note is None else f"{target.name} ({note})"
    return f"{name}, drafter {drafter}, {dtype}, {where}, {how}, {what}"


def _drawing(each: Sequence[SamplingParams]) -> str:
    """How tokens were drawn, in words."""
    how = {
        "greedy" if params.greedy else f"temperature {params.temperature:g}" + (", coupled" if params.coupled else "")
        for params in each
    }
    seeds = {params.seed for params in each if not params.greedy}
    seed = ", a seed for each prompt" if len(seeds) > 1 else "".join(f", seed {one}" for one in seeds)
    return (how.pop() if len(how) == 1 else "each prompt by its own options") + seed


def _table(comparison: Comparison) -> Table:
    plain, speculative = (comparison.total(side) for _, side in _SIDES)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name, _ in _SIDES:
        table.add_column(name, justify="right")
    label = "tokens per second, median" if len(comparison.pairs) > 1 else "tokens per second"
    table.add_row(label, f"{plain['tokens_per_s']:.1f}", f"{speculative['tokens_per_s']:.1f}")
    table.add_row("target calls", f"{plain['target_calls']:,}", f"{speculative['target_calls']:,}")
    table.add_row(
        "mean acceptance length",
        f"{plain['mean_acceptance_length']:.2f}",
        f"{speculative['mean_acceptance_length']:.2f}",
    )
    rates = (
        "-" if not each["draft_tokens"] else f"{each['draft_acceptance_rate']:.2f}" for each in (plain, speculative)
    )
    table.add_row("acceptance rate", *rates)
    counts = (f"{each['emitted_tokens'] + each['prefill_tokens']:,}" for each in (plain, speculative))
    table.add_row("tokens", *counts)
    return table


def _verdict(comparison: Comparison) -> str:
    if not comparison.lossless:
        return f"lossy: {comparison.identical_prompts} of {len(comparison.pairs)} answers identical to plain decoding"
    if comparison.identical is None:
        return "same distribution; tokens differ"
    word = "yes" if comparison.identical else "no"
    if len(comparison.pairs) == 1:
        return f"identical: {word}"
    return f"identical: {word} ({comparison.identical_prompts} of {len(comparison.pairs)})"


def stats_line(answers: Sequence[Answer], elapsed_s: float, each: Sequence[SamplingParams]) -> str:
    """What a finished command did, in one line."""
    tokens = sum(map(emitted, answers))
    stats = sum((answer.stats for answer in answers), Counters())
    parts = [
        f"{tokens} tokens in {elapsed_s:.2f} s",
        f"{tokens / elapsed_s if elapsed_s else 0.0:.1f} tokens per second",
    ]
    if stats.draft_tokens:
        parts.append(f"mean acceptance length {stats.mean_acceptance_length:.2f}")
        parts.append(f"acceptance rate {stats.draft_acceptance_rate:.2f}")
    if stats.listed_tokens > stats.draft_tokens:
        parts.append(f"merged paths: {stats.draft_tokens} nodes for {stats.listed_tokens} tokens")
    if stats.divergence is not None:
        parts.append(f"lossy: {divergence_words(stats)}")
    seeds = {params.seed for params in each if not params.greedy}
    if seeds:
        parts.append(f"seed {seeds.pop()}" if len(seeds) == 1 else "a seed for each, beside its answer")
    if len(answers) == 1:
        parts.append(f"finish: {answers[0].finish_reason}")
    return " · ".join(parts)


def comparison_record(comparison: Comparison, runs: int) -> dict[str, Any]:
    """The part of the JSON record that a comparison brings."""
    speculative = comparison.total(lambda pair: pair.speculative)
    return {
        "tokens_per_s": speculative["tokens_per_s"],
        "speedup": comparison.speedup,
        "identical": comparison.identical,
        "identical_prompts": comparison.identical_prompts if _is_told(comparison) else None,
        "speedup_min": min(comparison.speedups),
        "speedup_max": max(comparison.speedups),
        "share_faster": comparison.share_faster,
        "repeated_8grams": comparison.repeated_8grams,
        "runs": runs,
        "plain": comparison.total(lambda pair: pair.plain),
        "speculative": speculative,
        "prompts": [_pair_record(pair, _is_told(comparison)) for pair in comparison.pairs],
    }


def _is_told(comparison: Comparison) -> bool:
    """Whether identical tokens say something: they are promised, or a lossy rule may be why they differ."""
    return comparison.must_agree or not comparison.lossless


def _pair_record(pair: Pair, tell_identical: bool) -> dict[str, Any]:
    answer = pair.speculative.answers[0]
    return {
        "id": pair.name,
        "prompt_tokens": answer.prompt_tokens,
        "seed": pair.params.seed,
        "sampling": dataclasses.asdict(pair.params),
        "finish_reason": answer.finish_reason,
        "speedup": pair.speedup,
        "identical": pair.same_tokens if tell_identical else None,
        "difference": None if pair.difference is None else pair.difference.as_dict(),
        "repeated_8grams": pair.repeated_8grams,
        "plain": pair.plain.as_dict(),
        "speculative": pair.speculative.as_dict(),
    }


def answers_record(
    names: Sequence[str], answers: Sequence[Answer], params: Sequence[SamplingParams], elapsed_s: float
) -> dict[str, Any]:
    """The part of the JSON record that answers bring."""
    tokens = sum(map(emitted, answers))
    return {
        "tokens_per_s": tokens / elapsed_s if elapsed_s else 0.0,
        "elapsed_s": elapsed_s,
        "stats": counts_dict(sum((answer.stats for answer in answers), Counters())),
        "prompts": [_answer_record(*each) for each in zip(names, answers, params, strict=True)],
    }


def _answer_record(name: str, answer: Answer, params: SamplingParams) -> dict[str, Any]:
    return {
        "id": name,
        "prompt_tokens": answer.prompt_tokens,
        "seed": params.seed,
        "sampling": dataclasses.asdict(params),
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "error": answer.error,
        "warnings": list(answer.warnings),
        "tokens_per_s": tokens_per_s(answer),
        "decode_tokens_per_s": decode_tokens_per_s(answer),
        "first_token_s": answer.timing.first_token_s,
        "total_s": answer.timing.total_s,
        "stats": counts_dict(answer.stats),
    }


def circumstances_record(engine: Engine, setup: Setup, params: SamplingParams) -> dict[str, Any]:
    """The part of the JSON record that says what was run and where."""
    target = engine.target
    return {
        "model": target.name,
        "pad_to": setup.pad_to,
        "note": target.note,
        "drafter": setup.drafter,
        "drafter_kind": engine.drafter.name,
        "rule": engine.rule.spec,
        "lossless": engine.rule.lossless,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "fast_paths": list(target.fast_paths),
        "seed": params.seed,
        "sampling": dataclasses.asdict(params),
        "machine": machine_facts(),
    }
