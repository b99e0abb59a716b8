"""Reports of answers: lines for people, records for programs, and the decisions of each step for `--explain`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from truedraft.cli.failures import DONE, FAILED, INTERRUPTED
from truedraft.cli.terminal import print_table, visible
from truedraft.core.params import SamplingParams
from truedraft.core.stats import PROBE, Counters
from truedraft.engine.policy.decisions import PLAIN, Decisions, StepWindow
from truedraft.machine import dtype_name, machine_facts
from truedraft.options import record_of

if TYPE_CHECKING:
    from rich.console import Console

    from truedraft.cli.session import StackOptions
    from truedraft.engine import Answer, Engine
    from truedraft.models.base import LanguageModel

_DIVERGENCES = ("mean_total_variation", "mean_kl", "mean_total_variation_greedy", "mean_kl_greedy")
_RATES = ("mean_acceptance_length", "draft_acceptance_rate", *_DIVERGENCES)
_MARKS = {PLAIN: ".", PROBE: "?"}
_LABELS = ("drafter", "drafted", "accepted")
_SPARE = "abcdefghijklmnopqrstuvwxyz"
_WIDEST = 100


@dataclass(slots=True)
class Answered:
    """The answers of a command."""

    names: list[str] = field(default_factory=list)  # of the prompts that were answered or failed
    answers: list[Answer] = field(default_factory=list)  # one per name
    params: list[SamplingParams] = field(default_factory=list)  # one per name
    elapsed_s: float = 0.0  # from the first submission to the last answer
    interrupted: bool = False

    @property
    def status(self) -> int:
        if self.interrupted:
            return INTERRUPTED
        return FAILED if any(answer.finish_reason == "error" for answer in self.answers) else DONE

    @property
    def counters(self) -> Counters:
        return sum((answer.stats for answer in self.answers), Counters())

    @property
    def tokens_per_s(self) -> float:
        return sum(map(emitted, self.answers)) / self.elapsed_s if self.elapsed_s else 0.0

    def line(self) -> str:
        stats, seeds = self.counters, {params.seed for params in self.params if params.seeded}
        tokens = sum(map(emitted, self.answers))
        parts = [f"{tokens} tokens in {self.elapsed_s:.2f} s", f"{self.tokens_per_s:.1f} tokens per second"]
        if stats.drafted_calls:
            parts.append(f"mean acceptance length {stats.mean_acceptance_length:.2f}")
            parts.append(f"acceptance rate {stats.draft_acceptance_rate:.2f}")
        if stats.listed_tokens > stats.draft_tokens:
            parts.append(f"merged paths: {stats.draft_tokens} nodes for {stats.listed_tokens} tokens")
        if stats.divergence is not None:
            parts.append(f"lossy: {divergence_words(stats)}")
        if seeds:
            parts.append(f"seed {seeds.pop()}" if len(seeds) == 1 else "several seeds, with the answers")
        if len(self.answers) == 1:
            parts.append(f"finish: {self.answers[0].finish_reason}")
        return " · ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens_per_s": self.tokens_per_s,
            "elapsed_s": self.elapsed_s,
            "stats": counts_dict(self.counters),
            "prompts": [_answer_record(*each) for each in zip(self.names, self.answers, self.params, strict=True)],
        }


def undrafted_line(engine: Engine, stats: Counters) -> str | None:
    """Why a drafter drafted in less than half of the calls, with advice; None otherwise, or without a drafter."""
    if stats.undrafted is None or stats.drafted_calls >= stats.target_calls / 2:  # only one of several answers had none
        return None
    advice = "; --controller fixed drafts always" if engine.controller.weighs_costs else ""
    share = f"drafted in {stats.drafted_calls} of {stats.target_calls} calls" if stats.drafted_calls else "not drafted"
    return f"{share}: {stats.undrafted}{advice}"


def _answer_record(name: str, answer: Answer, params: SamplingParams) -> dict[str, Any]:
    total_s, decode_s = answer.timing.total_s, answer.timing.decode_s
    return {
        "id": name,
        "prompt_tokens": answer.prompt_tokens,
        "seed": params.seed,
        "sampling": dataclasses.asdict(params),
        **record_of(answer, "text", "token_ids", "finish_reason", "error", "warnings"),
        "tokens_per_s": emitted(answer) / total_s if total_s else 0.0,  # prefill included
        "decode_tokens_per_s": answer.stats.emitted_tokens / decode_s if decode_s else 0.0,
        **record_of(answer.timing, "first_token_s", "total_s"),
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


def name_and_note(model: LanguageModel) -> str:
    """A model's name, and its remark if it has one."""
    return model.name if model.note is None else f"{model.name} ({model.note})"


def drafter_lines(engine: Engine) -> list[str]:
    """Remarks of drafters, a line each."""
    return [
        f"{name}: " + " · ".join(f"{number.replace('_', ' ')} {value:.4g}" for number, value in each.report.items())
        for name, each in engine.drafter.members.items()
        if each.report
    ]


def target_record(target: LanguageModel, stack: StackOptions) -> dict[str, Any]:
    """The part of `circumstances_record` that needs no engine."""
    return {
        "model": target.name,
        **record_of(stack, "pad_to", "weights", "tensor_parallel"),
        "note": target.note,
        "drafter": stack.drafter,
        "dtype": dtype_name(target.dtype),
        "kv_dtype": target.kv_dtype,
        "device": str(target.device),
        "fast_paths": list(target.fast_paths),
        "machine": machine_facts(),
    }


def emitted(answer: Answer) -> int:
    """Number of tokens that the target emitted, including the prefill's, without stop tokens."""
    return answer.stats.emitted_tokens + answer.stats.prefill_tokens


def counts_dict(stats: Counters) -> dict[str, Any]:
    """Counts and their rates, for the JSON record; divergences are null for a lossless rule."""
    return dataclasses.asdict(stats) | record_of(stats, *_RATES)


def divergence_words(stats: Counters) -> str:
    """Divergence of emission distributions from the target's, with greedy decoding's for comparison; "" if unknown."""
    means = [getattr(stats, name) for name in _DIVERGENCES]
    if None in means:
        return ""
    return "total variation {:.3f}, KL {:.3f} nats a token (greedy decoding there: {:.3f}, {:.3f})".format(*means)


def explain(decisions: Decisions, has_drafter: bool, console: Console) -> None:
    """Print the decision of each step, its reason and its gain, as a table and a timeline of the answer."""
    from truedraft.measure.bench import decisions_table

    if not has_drafter:
        console.print("nothing was decided: there is no drafter, so every step was plain decoding", soft_wrap=True)
        return
    if not decisions.steps:
        console.print("nothing was decided: there was no step after the prompt", soft_wrap=True)
        return
    table = decisions_table(decisions)
    print_table(table.headings, table.rows, console)
    for line in timeline(decisions, min(console.width, _WIDEST)):
        console.print(visible(line), soft_wrap=True)
    console.print(verdict(decisions), soft_wrap=True)


def verdict(decisions: Decisions) -> str:
    """The estimated speedup in a sentence, or why there is none."""
    if not decisions.drafted:
        return "nothing was drafted: every step was plain decoding"
    speedup = decisions.speedup()
    if speedup is None:
        return "no speed-up is estimated: there are no costs, and too few plain steps to estimate their time"
    return speedup.describe()


def timeline(decisions: Decisions, width: int) -> list[str]:
    """The steps from left to right: drafter, drafted and accepted tokens; then a legend.

    There is at least one step.
    """
    marks = marks_of(list(decisions.ordered))
    widest = max(map(len, _LABELS))
    columns = decisions.timeline(max(width - widest - 1, 1))
    rows = (
        "".join(marks[max(each.decisions, key=each.decisions.__getitem__)] for each in columns),
        "".join(_digit(each.drafted, each) for each in columns),
        "".join(_digit(each.accepted, each) for each in columns),
    )
    lines = [f"{label:<{widest}} {row}" for label, row in zip(_LABELS, rows, strict=True)]
    steps = max(each.steps for each in columns)
    column = "a step" if steps == 1 else f"{steps} steps"
    meanings = " · ".join(f"{mark} {name}" for name, mark in marks.items())
    many = any(each.requests > each.steps for each in columns) or steps > 1
    numbers = "tokens, the mean of a step and request, + from ten on" if many else "tokens, + from ten on"
    return [*lines, f"{meanings} · each column is {column}, numbers are {numbers}"]


def marks_of(names: Sequence[str]) -> Mapping[str, str]:
    """A character for each name: its first letter that no other name has.

    >>> marks_of(["draft", "draft-2", "plain"])
    {'draft': 'd', 'draft-2': 'r', 'plain': '.'}
    """
    marks: dict[str, str] = {}
    for name in names:
        letters = (letter for letter in name.lower() + _SPARE if letter.isalpha() and letter not in marks.values())
        marks[name] = _MARKS[name] if name in _MARKS else next(letters, "#")
    return marks


def _digit(tokens: int, column: StepWindow) -> str:
    """Mean tokens per step and request as one character; a blank if nothing was drafted."""
    mean = tokens / column.requests
    if not tokens:
        return " " if not column.drafted else "0"
    return "+" if round(mean) > 9 else str(round(mean))
