"""`generate --compare`: a benchmark of plain and speculative decoding on the given prompts, with its own output."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from truedraft.cli.failures import DONE, FAILED, INTERRUPTED
from truedraft.cli.generate import GenerateOptions, remark, write_answer
from truedraft.cli.prompts import NamedPrompt, PromptRequest
from truedraft.cli.report import counts_dict, divergence_words, explain, name_and_note, undrafted_line
from truedraft.cli.session import MEASURING, StackOptions, encoded, waiting
from truedraft.cli.terminal import Terminal, say
from truedraft.core.params import SamplingParams
from truedraft.core.stats import Counters, repeated_ngrams
from truedraft.engine import Engine
from truedraft.machine import dtype_name
from truedraft.measure.bench import answers
from truedraft.measure.bench.runs import CurveCosts, Group, Results, Row, run_all
from truedraft.measure.bench.suite import PLAIN, OurEngine, Suite
from truedraft.measure.bench.summary import Ratio, Summary, differing_answers, summarise

_SPECULATIVE = "speculative"
_RUNS_OF_ONE_PROMPT = 3
_ECHOED_CHARACTERS = 600
_LITTLE = 1.1  # times plain decoding; below this the reason is printed
_SHOWN_DIFFERENCES = 5


@dataclass(frozen=True, slots=True)
class BothWays:
    """One or all prompts, decoded with and without speculation."""

    plain: Summary
    speculative: Summary

    @property
    def ratio(self) -> Ratio:
        """Tokens per second, speculative over plain; 1 if neither emitted a token."""
        return self.speculative.speedup or Ratio(1.0, 1.0, 1.0, 0.0)

    @property
    def counters(self) -> Counters:
        return self.speculative.counters or Counters()

    def of_each(self) -> dict[str, Any]:
        """Medians of speeds and sums of counts, for JSON."""
        record = {}
        for side in (self.plain, self.speculative):
            speeds = {name: getattr(side, name).median for name in ("tokens_per_s", "decode_tokens_per_s")}
            record[side.name] = speeds | counts_dict(side.counters or Counters())
        return record


def summaries(rows: Sequence[Row]) -> tuple[Summary, Summary]:
    """Of plain and of speculative decoding, from benchmark rows of both."""
    plain, speculative = summarise(rows, (PLAIN, _SPECULATIVE), (PLAIN, _SPECULATIVE), {})
    return plain, speculative


@dataclass(frozen=True, slots=True)
class Pair(BothWays):
    """One prompt, decoded both ways."""

    group: Group
    first: tuple[Row, Row]  # the first row of plain and of speculative decoding
    difference: answers.Difference | None = None  # the first one, if the tokens must be identical and are not

    @property
    def name(self) -> str:
        return self.group.names[0]

    @property
    def same_tokens(self) -> bool:
        return all(side.identical_groups == side.compared_groups for side in (self.plain, self.speculative))

    @property
    def repeated_8grams(self) -> float | None:
        return repeated_ngrams(self.first[0].output.token_ids[0])

    def as_dict(self, comparable: bool) -> dict[str, Any]:
        return {
            "id": self.name,
            "prompt_tokens": len(self.group.prompts[0]),
            "seed": self.group.params.seed,
            "sampling": dataclasses.asdict(self.group.params),
            "finish_reason": self.first[1].output.finish_reasons[0],
            "speedup": self.ratio.mean,
            "identical": self.same_tokens if comparable else None,
            "difference": None if self.difference is None else dataclasses.asdict(self.difference),
            "repeated_8grams": self.repeated_8grams,
            **self.of_each(),
        }


@dataclass(frozen=True, slots=True)
class Comparison(BothWays):
    """All prompts of a comparison."""

    pairs: Sequence[Pair]  # at least one
    runs: int  # per prompt, plain and speculative each
    must_agree: bool  # whether identical tokens are guaranteed (temperature 0 or a seed, and a lossless rule)
    lossless: bool = True

    @property
    def identical_prompts(self) -> int:
        return sum(pair.same_tokens for pair in self.pairs)

    @property
    def identical(self) -> bool | None:
        """Whether all prompts have identical tokens; None if only the distribution is guaranteed to be the same."""
        return self.identical_prompts == len(self.pairs) if self.must_agree else None

    @property
    def compares_tokens(self) -> bool:
        """Whether identical tokens are informative: they are guaranteed, or only a lossy rule can make them differ."""
        return self.must_agree or not (self.lossless or any(not pair.group.params.greedy for pair in self.pairs))

    @property
    def repeated_8grams(self) -> float | None:
        """Mean over the prompts that have it; None if none has."""
        shares = [share for pair in self.pairs if (share := pair.repeated_8grams) is not None]
        return statistics.mean(shares) if shares else None

    def as_dict(self) -> dict[str, Any]:
        comparable, sides = self.compares_tokens, self.of_each()
        return {
            "tokens_per_s": sides[_SPECULATIVE]["tokens_per_s"],
            "speedup": self.ratio.mean,
            "identical": self.identical,
            "identical_prompts": self.identical_prompts if comparable else None,
            "speedup_min": self.ratio.low,
            "speedup_max": self.ratio.high,
            "share_faster": self.ratio.share_faster,
            "repeated_8grams": self.repeated_8grams,
            "runs": self.runs,
            **sides,
            "prompts": [pair.as_dict(comparable) for pair in self.pairs],
        }


def compare(
    engine: Engine, options: GenerateOptions, prompts: Sequence[PromptRequest], terminal: Terminal
) -> tuple[int, dict[str, Any]]:
    """Measure both ways in alternation, and print; returns the exit status and the comparison's part of the record.

    A single prompt is echoed first and its speculative answer streamed. One of several prompts that fails is skipped.
    """
    single = len(prompts) == 1
    with waiting(terminal.err, MEASURING):  # otherwise the comparison would include the measurement of costs
        engine.measure(prompts[0][1])
    suite = Suite(
        engine.target, engine.rule.lossless, [OurEngine(PLAIN, Engine(engine.target)), OurEngine(_SPECULATIVE, engine)]
    )
    groups, failures = encoded(engine.target, prompts, 1)
    results, runs = Results(failures=failures), _RUNS_OF_ONE_PROMPT if single else 1
    if single:
        _echo(prompts[0][0], terminal)
        answer = write_answer(engine, prompts[0], terminal, options.report.show_drafts)
        results.interrupted = answer.finish_reason == "cancelled"
    if groups and not results.interrupted:
        forwards = engine.forwards() if options.report.explain else None
        costs = {} if forwards is None else {_SPECULATIVE: CurveCosts(forwards)}
        with terminal.progress("plain and speculative", 2 * runs * len(groups)) as progress:
            context = engine.target.context_length
            results = run_all(suite.systems, groups, runs=runs, context_length=context, costs=costs, progress=progress)
            results.failures[:0] = failures
    pairs = _pairs(suite, groups, results, runs)
    comparison = None
    if pairs:
        compared = {pair.name for pair in pairs}
        both = summaries([row for row in results.rows if row.prompts[0] in compared])
        promised = all(suite.must_agree(params) for _, params in prompts)
        comparison = Comparison(*both, pairs, runs, promised, engine.rule.lossless)
    errors = list({each.prompts: f"prompt {each.prompts[0]}: {each.reason}" for each in results.failures}.values())
    for failure in errors:
        say(f"error: {failure}")
    remark([warning for pair in pairs for warning in pair.first[1].output.warnings], options, terminal)
    if results.interrupted:
        terminal.end_line()
        say(f"interrupted after {len(pairs)} of {len(prompts)} prompts")
    status, record = _outcome(pairs, comparison, results)
    record = {"failed_prompts": len(errors), "errors": errors} | record
    if comparison is not None:
        _print(comparison, engine, options.stack, terminal)
        record |= _print_rest(comparison, engine, answers.answered_prompts(groups, results.rows), options, terminal)
    return status, record


def _print_rest(
    comparison: Comparison,
    engine: Engine,
    answered: Sequence[answers.AnsweredPrompt],
    options: GenerateOptions,
    terminal: Terminal,
) -> dict[str, Any]:
    """Print what vocabularies cost, and what was drafted when; returns both for the record."""
    vocabularies = answers.vocabulary_costs(engine.target, engine.drafter.members, answered)
    for each in vocabularies:
        terminal.print(each.describe())
    record: dict[str, Any] = {"vocabularies": [dataclasses.asdict(each) for each in vocabularies]}
    if undrafted := undrafted_line(engine, comparison.counters):
        terminal.print(undrafted)
    decisions = comparison.speculative.decisions
    if options.report.explain and decisions is not None:
        explain(decisions, not engine.drafter.limits.is_zero, terminal.out)
        record["decisions"] = decisions.as_dict()
    return record


def _pairs(suite: Suite, groups: Sequence[Group], results: Results, runs: int) -> list[Pair]:
    """The prompts with all runs of both ways."""
    differing = {name: (plain, other) for _, name, plain, other in differing_answers(results.rows, suite.our_names)}
    pairs = []
    for group in groups:
        rows = [row for row in results.rows if row.prompts == group.names]
        if len(rows) < 2 * runs:
            continue
        plain, speculative = (next(row for row in rows if row.system == name) for name in suite.our_names)
        difference = None
        if suite.must_agree(group.params) and group.names[0] in differing:
            difference = answers.find_difference(suite.target, group.prompts[0], *differing[group.names[0]])
        pairs.append(Pair(*summaries(rows), group, (plain, speculative), difference))
    return pairs


def _outcome(pairs: Sequence[Pair], comparison: Comparison | None, results: Results) -> tuple[int, dict[str, Any]]:
    if comparison is None:
        outcome = "interrupted" if results.interrupted else "no prompt could be answered"
        return INTERRUPTED if results.interrupted else FAILED, {"error": outcome}
    parted = any(pair.difference is not None for pair in pairs)
    sound = comparison.identical is not False and not parted and not results.failures
    return INTERRUPTED if results.interrupted else DONE if sound else FAILED, comparison.as_dict()


def _print(comparison: Comparison, engine: Engine, stack: StackOptions, terminal: Terminal) -> None:
    many, ratio = len(comparison.pairs) > 1, comparison.ratio
    terminal.out.print()
    drafter = f"auto: {' + '.join(engine.drafter.members)}" if stack.drafter == "auto" else stack.drafter
    params = [pair.group.params for pair in comparison.pairs]
    line = _where_and_how(engine, drafter, params, comparison.runs)
    terminal.print(line, style="dim")
    _print_table(comparison, terminal)
    if many:
        faster = sum(pair.ratio.mean > 1 for pair in comparison.pairs)
        terminal.out.print(
            f"speed-up: geometric mean {ratio.mean:.2f}, from {ratio.low:.2f} to {ratio.high:.2f}; "
            f"{faster} of {len(comparison.pairs)} prompts faster"
        )
    else:
        terminal.out.print(f"speed-up: {ratio.mean:.2f}")
    if sentence := little_gained(ratio.mean, comparison.counters):
        terminal.print(sentence)
    terminal.out.print(_verdict(comparison))
    if not comparison.lossless:
        words = divergence_words(comparison.counters)
        terminal.print(f"lossy rule {engine.rule.spec}: {words}")
    for pair in [pair for pair in comparison.pairs if pair.difference is not None][:_SHOWN_DIFFERENCES]:
        assert pair.difference is not None
        terminal.print(f"  prompt {pair.name} {pair.difference.describe()}")
    if many and any(each.seeded for each in params):
        seeds = ", ".join(f"{pair.name}: {pair.group.params.seed}" for pair in comparison.pairs)
        terminal.print(f"seeds: {seeds}", style="dim")
    if comparison.repeated_8grams is not None:
        where = "answers" if many else "answer"
        terminal.out.print(f"repeated 8-grams in the plain {where}: {comparison.repeated_8grams:.2f}")


def little_gained(speedup: float, counters: Counters) -> str | None:
    """Why drafts gained little; None if they gained enough, or there were none."""
    if speedup >= _LITTLE or not counters.drafted_calls:
        return None
    tokens = counters.mean_acceptance_length
    return (
        f"little gained: {tokens:.2f} tokens a call, which took {tokens / speedup:.2f} times a plain one here; less "
        "where reading weights is most of a step, as of larger models and on GPUs"
    )


def _where_and_how(engine: Engine, drafter: str, each: Sequence[SamplingParams], runs: int) -> str:
    target = engine.target
    device, threads = target.device.type, torch.get_num_threads()
    where = device if device != "cpu" else f"{threads} thread{'s' if threads > 1 else ''}"
    sampling = {"greedy" if params.greedy else f"temperature {params.temperature:g}" for params in each}
    seeds = {params.seed for params in each if params.seeded}
    how = sampling.pop() if len(sampling) == 1 else "each prompt by its own options"
    how += ", a seed for each prompt" if len(seeds) > 1 else "".join(f", seed {one}" for one in seeds)
    if not engine.rule.lossless:
        how = f"lossy rule {engine.rule.spec}, {how}"
    what = f"{len(each)} prompts, one run each way" if len(each) > 1 else f"medians of {runs} runs each way"
    return f"{name_and_note(target)}, drafter {drafter}, {dtype_name(target.dtype)}, {where}, {how}, {what}"


def _print_table(comparison: Comparison, terminal: Terminal) -> None:
    sides = comparison.plain, comparison.speculative
    counts = [side.counters or Counters() for side in sides]
    label = "tokens per second, median" if len(comparison.pairs) > 1 else "tokens per second"
    rows = [
        [label, *(f"{side.tokens_per_s.median:.1f}" for side in sides)],
        ["target calls", *(f"{each.target_calls:,}" for each in counts)],
        ["mean acceptance length", *(f"{each.mean_acceptance_length:.2f}" for each in counts)],
        ["acceptance rate", *(f"{each.draft_acceptance_rate:.2f}" if each.drafted_calls else "-" for each in counts)],
        ["tokens", *(f"{each.emitted_tokens + each.prefill_tokens:,}" for each in counts)],
    ]
    terminal.table(("", *(side.name for side in sides)), rows)


def _verdict(comparison: Comparison) -> str:
    if not comparison.compares_tokens:
        return "same distribution; tokens differ" if comparison.lossless else "lossy: another distribution"
    if not comparison.lossless:
        return f"lossy: {comparison.identical_prompts} of {len(comparison.pairs)} answers identical to plain decoding"
    word = "yes" if comparison.identical else "no"
    if len(comparison.pairs) == 1:
        return f"identical: {word}"
    return f"identical: {word} ({comparison.identical_prompts} of {len(comparison.pairs)})"


def _echo(prompt: NamedPrompt, terminal: Terminal) -> None:
    """Show the prompt; only its end if it is long."""
    text = prompt.prompt if isinstance(prompt.prompt, str) else f"{len(prompt.prompt)} token ids: "
    text = text if prompt.message is None else f"{prompt.message}\n\n"
    shown = text if len(text) <= _ECHOED_CHARACTERS else "…" + text[-_ECHOED_CHARACTERS:]
    terminal.dim(shown)
