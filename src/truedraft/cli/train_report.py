"""What `truedraft train` says when it is done: what was trained, how often it is right, and what it brings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from truedraft.cli.failures import DONE, FAILED
from truedraft.machine import in_bytes, machine_facts
from truedraft.training.report import size_of
from truedraft.training.workspace import duration, log_of

if TYPE_CHECKING:
    from truedraft.cli.terminal import Terminal
    from truedraft.training.drafts import DraftResult
    from truedraft.training.evaluate import EngineEvaluation
    from truedraft.training.ngrams import NgramResult
    from truedraft.training.report import Effort, HeadReport, HeadResult

_KINDS = {"greedy": "at temperature 0", "sampled": "at temperature 1"}
_TREES = {"likeliest": "chosen at each step", "counted": "counted, one for all"}


def record_of(kind: str, model: str, result: DraftResult | HeadResult | NgramResult) -> dict[str, Any]:
    """For JSON."""
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


def _medusa(terminal: Terminal, model: str, result: HeadResult) -> None:
    _effort(terminal, result.effort, log_of(result.folder))
    _heads(terminal, result.report)
    if result.joint is not None:
        joint = result.joint
        model = str(joint.target)
        trained = f"LoRA of rank {joint.lora_rank}, merged" if joint.lora_rank else "all weights"
        _say(
            terminal,
            f"the target was trained too ({trained}): on {joint.loss_tokens:,} held-out tokens its own loss was "
            f"{joint.loss_before:.4f} nats per token, and is {joint.loss_after:.4f}",
        )
        _say(terminal, "before, with the target as it was:")
        _heads(terminal, joint.before)
    _try_it(terminal, model, f"medusa:{result.folder}", result.report.evaluations)


def _heads(terminal: Terminal, heads: HeadReport) -> None:
    """How often the heads are right, and the mean acceptance lengths."""
    trees = heads.facts["trees"]
    for kind, counted in trees.items():
        shares = ", ".join(f"{ranks[0]:.2f} / {sum(ranks[:5]):.2f}" for ranks in counted["rank_accuracy"])
        _say(terminal, f"heads right {_KINDS[kind]} with their first guess / one of five: {shares}")
    _say(
        terminal,
        "tokens per target call: measured in the engine, promised by the trees, and as if heads erred independently",
    )
    _say(terminal, f"promised and independent: on {heads.promised_on}; other text brings more or less")
    columns = ("temperature", "nodes", "trees", "measured", "promised", "independent")
    table = Table(*columns, box=None, pad_edge=False)
    for each in heads.evaluations:
        counted, about = trees["sampled" if each.temperature else "greedy"], each.about
        products = {promise["nodes"]: f"{promise['product']:.2f}" for promise in counted["promises"]}
        table.add_row(
            f"{each.temperature:g}",
            str(about["nodes"]),
            _TREES[about["trees"]],
            f"{each.stats.mean_acceptance_length:.2f}",
            f"{about['promised']:.2f}",
            products.get(about["nodes"], "") if about["trees"] == "counted" else "",
        )
    terminal.out.print(table)
    for kind, counted in trees.items():
        if counted["chosen"] == "counted":
            _say(
                terminal,
                f"{_KINDS[kind]} the counted tree is used: on text that neither was fitted to it brought more",
            )


def _redrafter(terminal: Terminal, model: str, result: HeadResult) -> None:
    head = result.report
    _effort(terminal, result.effort, log_of(result.folder))
    shares = iter(head.facts["accuracy"].values())
    pairs = ", ".join(f"{first:.2f} / {five:.2f}" for first, five in zip(shares, shares, strict=True))
    _say(terminal, f"right at each place, given the tokens before it, with the first guess / one of five: {pairs}")
    _say(terminal, f"promised: on {head.promised_on}; other text brings more or less")
    table = Table("temperature", "nodes", "beams", "tokens per target call", "promised", box=None, pad_edge=False)
    for each in head.evaluations:
        about = each.about
        promised = "-" if about["promised"] is None else f"{about['promised']:.2f}"
        found = f"{each.stats.mean_acceptance_length:.2f}", promised
        table.add_row(f"{each.temperature:g}", str(about["nodes"]), f"{about['beams']} of {about['length']}", *found)
    terminal.out.print(table)
    _try_it(terminal, model, f"redrafter:{result.folder}", head.evaluations)


def _chains(kind: str, terminal: Terminal, model: str, result: HeadResult) -> None:
    head = result.report
    _effort(terminal, result.effort, log_of(result.folder))
    shares = " / ".join(f"{share:.2f}" for share in head.facts["accuracy"].values())
    _say(terminal, f"right at each step, given the tokens before it: {shares}")
    _say(terminal, f"promised: on {head.promised_on}; other text brings more or less")
    table = Table("temperature", "drafts", "tokens per target call", "promised", box=None, pad_edge=False)
    for each in head.evaluations:
        promised = each.about["promised"]
        found = f"{each.stats.mean_acceptance_length:.2f}", "-" if promised is None else f"{promised:.2f}"
        table.add_row(f"{each.temperature:g}", size_of(each.about), *found)
    terminal.out.print(table)
    _try_it(terminal, model, f"{kind}:{result.folder}", head.evaluations)


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


def _effort(terminal: Terminal, effort: Effort, log: Path) -> None:
    _say(
        terminal,
        f"trained {effort.steps:,} steps in {duration(effort.elapsed_s)}, on {effort.written_tokens:,} tokens that "
        f"the target wrote; log: {log}",
    )


def _try_it(terminal: Terminal, model: str, drafter: str, evaluations: Sequence[EngineEvaluation]) -> None:
    from truedraft.drafters.registry import too_few

    best = max((each.stats.mean_acceptance_length for each in evaluations), default=None)
    if best is not None and too_few(drafter.partition(":")[0], best):
        _say(
            terminal,
            f"it brings nothing: {best:.2f} tokens for each call of the target at best, where plain decoding has 1 and "
            "a draft is not free; train for longer, or on more text like what it is used for",
        )
        return
    _say(terminal, f'try it: truedraft generate "PROMPT" --model {model} --drafter {drafter} --compare')


def kept_promise(terminal: Terminal, kind: str, model: str, result: Any) -> int:
    """The exit status: of a failure where heads serve other than was promised, which is said with what to do."""
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
    """A line of standard output that a terminal may wrap."""
    terminal.out.print(line, soft_wrap=True)


PRINT: Mapping[str, Callable[[Terminal, str, Any], None]] = {
    "draft": _draft,
    "medusa": _medusa,
    "redrafter": _redrafter,
    "eagle": partial(_chains, "eagle"),
    "p-eagle": partial(_chains, "p-eagle"),
    "dflash": partial(_chains, "dflash"),
    "dspark": partial(_chains, "dspark"),
    "ngram": _ngram,
}
"""What prints the result of each kind, for a model of this name."""
