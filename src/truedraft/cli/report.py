"""Summaries of answers: a line for people and records for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from truedraft.core.params import SamplingParams
from truedraft.core.stats import Counters
from truedraft.machine import dtype_name, machine_facts

if TYPE_CHECKING:
    from truedraft.cli.session import StackOptions
    from truedraft.engine import Answer, Engine
    from truedraft.models.base import LanguageModel


def stats_line(answers: Sequence[Answer], elapsed_s: float, each: Sequence[SamplingParams]) -> str:
    """Summary of a finished command, in one line."""
    tokens = sum(map(emitted, answers))
    stats = sum((answer.stats for answer in answers), Counters())
    parts = [
        f"{tokens} tokens in {elapsed_s:.2f} s",
        f"{tokens / elapsed_s if elapsed_s else 0.0:.1f} tokens per second",
    ]
    if stats.drafted_calls:
        parts.append(f"mean acceptance length {stats.mean_acceptance_length:.2f}")
        parts.append(f"acceptance rate {stats.draft_acceptance_rate:.2f}")
    if stats.listed_tokens > stats.draft_tokens:
        parts.append(f"merged paths: {stats.draft_tokens} nodes for {stats.listed_tokens} tokens")
    if stats.divergence is not None:
        parts.append(f"lossy: {divergence_words(stats)}")
    seeds = {params.seed for params in each if params.seeded}
    if seeds:
        parts.append(f"seed {seeds.pop()}" if len(seeds) == 1 else "several seeds, beside the answers")
    if len(answers) == 1:
        parts.append(f"finish: {answers[0].finish_reason}")
    return " · ".join(parts)


def undrafted_line(engine: Engine, stats: Counters) -> str | None:
    """Why a drafter drafted in less than half of the calls, with advice; None otherwise, or without a drafter."""
    if stats.undrafted is None or stats.drafted_calls >= stats.target_calls / 2:  # only one of several answers had none
        return None
    advice = "; --controller fixed drafts always" if engine.controller.weighs_costs else ""
    share = f"drafted in {stats.drafted_calls} of {stats.target_calls} calls" if stats.drafted_calls else "not drafted"
    return f"{share}: {stats.undrafted}{advice}"


def answers_record(
    names: Sequence[str], answers: Sequence[Answer], params: Sequence[SamplingParams], elapsed_s: float
) -> dict[str, Any]:
    """The answers' part of the JSON record."""
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
    """The JSON record's part on what was run and where."""
    return target_record(engine.target, stack) | {
        "drafter_kind": engine.drafter.name,
        "drafters": list(engine.drafter.members),
        "drafter_reports": {name: dict(each.report) for name, each in engine.drafter.members.items() if each.report},
        "rule": engine.rule.spec,
        "lossless": engine.rule.lossless,
        "seed": params.seed,
        "sampling": dataclasses.asdict(params),
    }


def drafter_lines(engine: Engine) -> list[str]:
    """Remarks of drafters, a line each."""
    reports = ((name, each.report) for name, each in engine.drafter.members.items())
    return [
        f"{name}: " + " · ".join(f"{number.replace('_', ' ')} {value:.4g}" for number, value in report.items())
        for name, report in reports
        if report
    ]


def target_record(target: LanguageModel, stack: StackOptions) -> dict[str, Any]:
    """The part of `circumstances_record` that needs no engine."""
    return {
        "model": target.name,
        "pad_to": stack.pad_to,
        "weights": stack.weights,
        "tensor_parallel": stack.tensor_parallel,
        "note": target.note,
        "drafter": stack.drafter,
        "dtype": dtype_name(target.dtype),
        "device": str(target.device),
        "fast_paths": list(target.fast_paths),
        "machine": machine_facts(),
    }


def emitted(answer: Answer) -> int:
    """Number of tokens that the target emitted, including the prefill's, without stop tokens."""
    return answer.stats.emitted_tokens + answer.stats.prefill_tokens


def tokens_per_s(answer: Answer) -> float:
    """Emitted tokens per second, prefill included."""
    return emitted(answer) / answer.timing.total_s if answer.timing.total_s else 0.0


def decode_tokens_per_s(answer: Answer) -> float:
    """Tokens after the first, per second after the first."""
    return answer.stats.emitted_tokens / answer.timing.decode_s if answer.timing.decode_s else 0.0


def counts_dict(stats: Counters) -> dict[str, Any]:
    """Counts and their rates, for the JSON record; divergences are null for a lossless rule."""
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
    """Divergence of emission distributions from the target's, with greedy decoding's for comparison; "" if unknown."""
    means = stats.mean_total_variation, stats.mean_kl, stats.mean_total_variation_greedy, stats.mean_kl_greedy
    distance, kl, greedy_distance, greedy_kl = means
    if distance is None or kl is None or greedy_distance is None or greedy_kl is None:
        return ""
    return (
        f"total variation {distance:.3f}, KL {kl:.3f} nats a token "
        f"(greedy decoding there: {greedy_distance:.3f}, {greedy_kl:.3f})"
    )
