"""Tables for people and records for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from truedraft.cli.machine import machine_facts
from truedraft.cli.visible import visible
from truedraft.core.counters import Counters
from truedraft.core.sampling import SamplingParams

if TYPE_CHECKING:
    from truedraft.cli.compare import Comparison
    from truedraft.cli.session import StackOptions
    from truedraft.cli.terminal import Terminal
    from truedraft.engine import Answer, Engine

_SHOWN_DIFFERENCES = 5


def print_comparison(comparison: Comparison, engine: Engine, stack: StackOptions, terminal: Terminal) -> None:
    """The table of `--compare`, and what stands beside it."""
    many, ratio = len(comparison.pairs) > 1, comparison.all.ratio
    terminal.out.print()
    drafter = engine.drafter.name if stack.drafter == "auto" else stack.drafter
    params = [pair.group.params for pair in comparison.pairs]
    line = _circumstances(engine, drafter, params, comparison.runs)
    terminal.out.print(line, style="dim", soft_wrap=True)
    terminal.out.print(_table(comparison))
    if many:
        faster = sum(pair.sides.ratio.mean > 1 for pair in comparison.pairs)
        terminal.out.print(
            f"speed-up: geometric mean {ratio.mean:.2f}, from {ratio.low:.2f} to {ratio.high:.2f}; "
            f"{faster} of {len(comparison.pairs)} prompts faster"
        )
    else:
        terminal.out.print(f"speed-up: {ratio.mean:.2f}")
    terminal.out.print(_verdict(comparison))
    if not comparison.lossless:
        words = divergence_words(comparison.all.speculative.counters or Counters())
        terminal.out.print(f"lossy rule {engine.rule.spec}: {words}", soft_wrap=True)
    for pair in [pair for pair in comparison.pairs if pair.difference is not None][:_SHOWN_DIFFERENCES]:
        assert pair.difference is not None
        terminal.out.print(visible(f"  prompt {pair.name} {pair.difference.describe()}"), soft_wrap=True)
    if many and not all(each.greedy for each in params):
        seeds = ", ".join(f"{pair.name}: {pair.group.params.seed}" for pair in comparison.pairs)
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
    sides = comparison.all.plain, comparison.all.speculative
    counts = [side.counters or Counters() for side in sides]
    label = "tokens per second, median" if len(comparison.pairs) > 1 else "tokens per second"
    rows = {
        label: [f"{side.tokens_per_s.median:.1f}" for side in sides],
        "target calls": [f"{each.target_calls:,}" for each in counts],
        "mean acceptance length": [f"{each.mean_acceptance_length:.2f}" for each in counts],
        "acceptance rate": [f"{each.draft_acceptance_rate:.2f}" if each.draft_tokens else "-" for each in counts],
        "tokens": [f"{each.emitted_tokens + each.prefill_tokens:,}" for each in counts],
    }
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for side in sides:
        table.add_column(side.name, justify="right")
    for name, cells in rows.items():
        table.add_row(name, *cells)
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


def circumstances_record(engine: Engine, stack: StackOptions, params: SamplingParams) -> dict[str, Any]:
    """The part of the JSON record that says what was run and where."""
    target = engine.target
    return {
        "model": target.name,
        "pad_to": stack.pad_to,
        "note": target.note,
        "drafter": stack.drafter,
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


def emitted(answer: Answer) -> int:
    """Tokens that the target emitted, the prefill's included; stop tokens are not."""
    return answer.stats.emitted_tokens + answer.stats.prefill_tokens


def tokens_per_s(answer: Answer) -> float:
    """Emitted tokens per second, prefill included."""
    return emitted(answer) / answer.timing.total_s if answer.timing.total_s else 0.0


def decode_tokens_per_s(answer: Answer) -> float:
    """Tokens after the first, per second after the first."""
    return answer.stats.emitted_tokens / answer.timing.decode_s if answer.timing.decode_s else 0.0


def counts_dict(stats: Counters) -> dict[str, Any]:
    """Counts and the rates that follow from them, for the JSON record; divergences are null after a lossless rule."""
    rates = {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "mean_total_variation": stats.mean_total_variation,
        "mean_kl": stats.mean_kl,
        "mean_total_variation_greedy": stats.mean_total_variation_greedy,
        "mean_kl_greedy": stats.mean_kl_greedy,
    }
    return dataclasses.asdict(stats) | rates


def divergence_words(stats: Counters) -> str:
    """How far emitted tokens' distributions were from the target's, beside greedy decoding; "" where they were not."""
    means = stats.mean_total_variation, stats.mean_kl, stats.mean_total_variation_greedy, stats.mean_kl_greedy
    distance, kl, greedy_distance, greedy_kl = means
    if distance is None or kl is None or greedy_distance is None or greedy_kl is None:
        return ""
    return (
        f"total variation {distance:.3f}, KL {kl:.3f} nats a token "
        f"(greedy decoding there: {greedy_distance:.3f}, {greedy_kl:.3f})"
    )
