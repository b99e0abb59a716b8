"""The report of `truedraft train`: what was trained, its acceptance and its gain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from truedraft.cli.failures import DONE, FAILED
from truedraft.drafters.kinds import KINDS, dotted
from truedraft.machine import in_bytes, machine_facts
from truedraft.training.workspace import duration, log_of

if TYPE_CHECKING:
    from truedraft.cli.terminal import Terminal
    from truedraft.training.drafts import DraftResult
    from truedraft.training.evaluate import EngineEvaluation
    from truedraft.training.ngrams import NgramResult
    from truedraft.training.report import HeadResult


def record_of(kind: str, model: str, result: DraftResult | HeadResult | NgramResult) -> dict[str, Any]:
    """The JSON record."""
    fixed = {"command": f"train {kind}", "model": model, "out": str(result.folder)}
    return fixed | result.as_dict() | {"machine": machine_facts()}


def _draft(terminal: Terminal, model: str, result: DraftResult) -> None:
    report = result.report
    lines = (
        f"trained {result.steps:,} steps, {result.tokens:,} tokens, in {duration(result.elapsed_s)}; "
        f"log: {log_of(result.folder)}",
        f"on {report.tokens:,} held-out tokens: alpha {report.alpha:.3f} (the share of single drafted tokens that the "
        f"target accepts at temperature 1), greedy agreement {report.greedy_agreement:.3f}, "
        f"loss {report.draft_loss:.3f} nats per token",
        *(
            f"tokens per target call, measured in the engine at temperature {each.temperature:g} with "
            f"{each.about['num_speculative_tokens']} drafted tokens: {each.stats.mean_acceptance_length:.2f}"
            for each in result.evaluations
        ),
    )
    for line in lines:
        _say(terminal, line)
    _try_it(terminal, model, f"draft:{result.folder}", result.evaluations)


def _heads(kind: str, terminal: Terminal, model: str, result: HeadResult) -> None:
    effort = result.effort
    _say(
        terminal,
        f"trained {effort.steps:,} steps in {duration(effort.elapsed_s)}, on {effort.written_tokens:,} tokens that "
        f"the target wrote; log: {log_of(result.folder)}",
    )
    for part in dotted(KINDS[kind].training).describe(result):
        if isinstance(part, str):
            _say(terminal, part)
            continue
        heading, *rows = part
        table = Table(*heading, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        terminal.out.print(table)
    target = model if result.joint is None else str(result.joint.target)
    _try_it(terminal, target, f"{kind}:{result.folder}", result.report.evaluations)


def _ngram(terminal: Terminal, model: str, result: NgramResult) -> None:
    table = result.table
    numbers = ", ".join(f"{number:,} of {length}" for length, number in enumerate(table.ngrams, start=1))
    _say(
        terminal,
        f"counted {table.facts.counted_tokens:,} tokens of {result.source} in {duration(result.elapsed_s)}: n-grams by "
        f"their tokens {numbers}; {in_bytes(result.bytes)} on disk, which are mapped and not read",
    )
    for each in result.evaluations:
        _say(
            terminal,
            f"tokens per target call, measured in the engine at temperature {each.temperature:g} with trees of "
            f"{each.about['nodes']} nodes: {each.stats.mean_acceptance_length:.2f}",
        )
    _try_it(terminal, model, f"ngram:{result.folder}", result.evaluations)


def _try_it(terminal: Terminal, model: str, drafter: str, evaluations: Sequence[EngineEvaluation]) -> None:
    from truedraft.drafters.registry import too_few

    best = max((each.stats.mean_acceptance_length for each in evaluations), default=None)
    said = f'try it: truedraft generate "PROMPT" --model {model} --drafter {drafter} --compare'
    if best is not None and too_few(drafter.partition(":")[0], best):
        said = (
            f"it brings nothing: {best:.2f} tokens for each call of the target at best, where plain decoding has 1 and "
            "a draft is not free; train for longer, or on more text like what it is used for"
        )
    _say(terminal, said)


def kept_promise(terminal: Terminal, kind: str, model: str, result: Any) -> int:
    """The exit status: 1, with advice, if measured tokens per call depart from the promised ones beyond chance."""
    departures = getattr(result.report, "departures", ()) if hasattr(result, "report") else ()
    for sentence in departures:
        _say(terminal, f"promise not kept: {sentence}, which chance among prompts does not explain")
    if departures:
        _say(
            terminal,
            f"find out why: truedraft doctor --drafter {kind}:{result.folder} --model {model}; or the prompts of the "
            "test are of another kind than the held-out ones",
        )
    return FAILED if departures else DONE


def _say(terminal: Terminal, line: str) -> None:
    terminal.out.print(line, soft_wrap=True)


def show(terminal: Terminal, kind: str, model: str, result: Any) -> None:
    """Print the result of a kind, for the target of this name."""
    if KINDS[kind].trains:
        _heads(kind, terminal, model, result)
    elif kind == "draft":
        _draft(terminal, model, result)
    else:
        _ngram(terminal, model, result)
