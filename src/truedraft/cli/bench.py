"""`truedraft bench`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from truedraft.cli import session
from truedraft.cli.failures import DONE, FAILED, INTERRUPTED, warn
from truedraft.cli.prompts import HELDOUT, NamedPrompt, PromptOptions, read_prompts
from truedraft.cli.terminal import Terminal, say
from truedraft.core.params import TEXT_OPTIONS, SamplingParams
from truedraft.engine.policy.specs import controller_from_spec
from truedraft.errors import DataError, PromptError, errors_about
from truedraft.files import user_path
from truedraft.options import MachineOptions, ModelOptions, group, option

if TYPE_CHECKING:
    from truedraft.measure.bench import Circumstances, Group, MachineCosts, OutputFolder, Results, Suite, Summary

_SHOWN_DIFFERENCES = 5
_DISTURBED = 0.1
_NOT_MEASURED = (
    "drafter", "tensor_parallel", "merge_adapter", "adapters", "max_cache_bytes", "gpu_memory_utilization"
)  # fmt: skip
"""Options of a stack that a benchmark does not have; it has several drafters."""


@dataclass(frozen=True)
class SuiteOptions:
    """What is measured."""

    drafter: tuple[str, ...] = option(("auto",), f"{session.DRAFTER_HELP} May be repeated.", "D", shown_default="auto")
    peer: tuple[str, ...] = option((), "transformers: its own ways of generating; may be repeated.", "PEER")
    prompts: str = option(
        HELDOUT,
        "heldout: those that ship; a .jsonl, .json or .txt file; or a folder with HumanEval, GSM8K, MT-bench or "
        "Spec-Bench.",
        "SET",
    )


@dataclass(frozen=True)
class BenchReport(session.ReportOptions):
    """Output of `truedraft bench`."""

    out: Path | None = option(None, "Write report, plots, record and rows into this folder.", "DIR")


@dataclass(frozen=True)
class BenchOptions:
    """Options of `truedraft bench`."""

    stack: session.StackOptions = group("Model and drafter", without=_NOT_MEASURED)
    what: SuiteOptions = group("What to measure")
    prompt: PromptOptions = group("Prompt", without=("prompt", "prompts", "image"))
    runs: session.RunOptions = group("Runs")
    sampling: SamplingParams = group("Answer", without=("stop", "stop_token_ids", *TEXT_OPTIONS))
    report: BenchReport = group("Report")
    machine: MachineOptions = group("Machine")


def bench(options: BenchOptions) -> int:
    """Measure plain decoding, drafters and other libraries against each other, in alternation, on the same prompts."""
    from truedraft.measure.bench import OutputFolder, check_peers, load_suite

    check_peers(options.what.peer)
    params, out = options.sampling, options.report.out
    out = None if out is None else user_path(str(out))
    session.check_rule(options.stack.rule, params)
    controller_from_spec(options.stack.controller)  # invalid words are refused before anything is loaded
    if options.stack.plan is not None:
        drafter = session.planned_drafter(options.stack.plan, options.what.drafter, params)
        options = dataclasses.replace(options, what=dataclasses.replace(options.what, drafter=(drafter,)))
    terminal = Terminal()
    with errors_about("prompts"):
        set_name, prompts = _prompts(options)
    requests = [(each, params) for each in prompts]
    options = dataclasses.replace(options, stack=session.with_model(options.stack))
    session.set_threads(options.machine.threads)
    with contextlib.ExitStack() as stack:
        folder = None if out is None else stack.enter_context(OutputFolder(out))
        with session.loading(terminal.err, options.stack.model):
            suite = load_suite(
                options.stack,
                options.machine,
                tuple(dict.fromkeys(options.what.drafter)),
                drafters_dir=options.stack.drafters_dir,
                peers=tuple(dict.fromkeys(options.what.peer)),
                rule=options.stack.rule,
                controller=options.stack.controller,
                batch=options.runs.batch,
            )
        plan = session.plan_for(options.stack.plan, suite.target)
        if plan is not None:
            for each in suite.ours:
                each.engine.controller.expect(plan.survival)
        requests = session.prepare_prompts(suite.target, requests, options.prompt)
        groups, failures = session.encoded(suite.target, requests, options.runs.batch)
        if not groups:
            raise PromptError(f"none of the prompts can be answered; {failures[0].describe()}")
        measured = _costs(suite, params, options.runs.refresh_costs, terminal)
        circumstances = _circumstances(options, suite, measured, params, (set_name, len(prompts)))
        run = _Run(suite, measured, groups, circumstances)
        results = _measure(run, folder, terminal)
        results.failures[:0] = failures
        return _report(run, results, options.report.json, folder, terminal)


@dataclass(frozen=True, slots=True)
class _Run:
    suite: Suite
    measured: MachineCosts
    groups: Sequence[Group]
    circumstances: Circumstances

    @property
    def turns(self) -> int:
        return len(self.suite.systems) * len(self.groups) * self.circumstances.runs


def _prompts(options: BenchOptions) -> tuple[str, list[NamedPrompt]]:
    """The name of the set, and the requested number of its prompts."""
    from truedraft.measure.bench import is_question_file, read_questions, spread

    typed, limit = options.what.prompts, options.runs.limit
    path = user_path(typed)
    if typed != HELDOUT and (path.is_dir() or is_question_file(path)):
        name, questions = read_questions(path)
        return name, [NamedPrompt(each.name, each.text) for each in spread(questions, limit)]
    if typed != HELDOUT and not path.suffix and not path.exists():
        raise DataError(
            f"there is no prompt set {typed!r}; give {HELDOUT}, a .jsonl, .json or .txt file, or a folder with "
            "questions of HumanEval, GSM8K, MT-bench or Spec-Bench"
        )
    return HELDOUT if typed == HELDOUT else path.name, spread(read_prompts(None, typed), limit)


def _costs(suite: Suite, params: SamplingParams, refresh: bool, terminal: Terminal) -> MachineCosts:
    from truedraft.measure.bench import PARTS, measure_costs

    with terminal.progress("cost curves", PARTS * len(suite.ours)) as progress:
        measured = measure_costs(suite, params, progress, refresh=refresh)
    for warning in measured.warnings:
        warn(warning)
    return measured


def _measure(run: _Run, folder: OutputFolder | None, terminal: Terminal) -> Results:
    from truedraft.measure.bench import run_all

    about = run.circumstances.of_a_row()
    with terminal.progress("benchmark", run.turns) as progress:
        return run_all(
            run.suite.systems,
            run.groups,
            runs=run.circumstances.runs,
            context_length=run.suite.target.context_length,
            costs=run.measured.by_name,
            keep=(lambda row: None) if folder is None else (lambda row: folder.keep(row, about)),
            progress=progress,
        )


def _circumstances(
    options: BenchOptions, suite: Suite, measured: MachineCosts, params: SamplingParams, prompts: tuple[str, int]
) -> Circumstances:
    """The circumstances of this run; `prompts` is the set's name and size."""
    from truedraft.machine import dtype_name, machine_facts
    from truedraft.measure.bench import Circumstances

    machine, target = machine_facts(), suite.target
    return Circumstances(
        **{each.name: getattr(options.stack, each.name) for each in dataclasses.fields(ModelOptions)},
        note=target.note,
        drafters=tuple(suite.our_names[1:]),
        peers=tuple(dict.fromkeys(options.what.peer)),
        rule=options.stack.rule,
        dtype=dtype_name(target.dtype),
        device=str(target.device),
        threads=machine["threads"],
        fast_paths=target.fast_paths,
        batch=options.runs.batch,
        prompt_set=prompts[0],
        prompts=prompts[1],
        runs=options.runs.runs,
        sampling=dataclasses.asdict(params),
        must_agree=suite.must_agree(params),
        costs_kept=measured.kept,
        bandwidth=measured.bandwidth,
        weight_bytes=target.weight_bytes or None,
        machine=machine,
        lossless=suite.lossless,
        controller=options.stack.controller,
    )


def _report(run: _Run, results: Results, json: bool, folder: OutputFolder | None, terminal: Terminal) -> int:
    from truedraft.measure.bench import answers, report, summary
    from truedraft.measure.bench.runs import time_without_core

    suite, measured, circumstances = run.suite, run.measured, run.circumstances
    names = [each.name for each in suite.systems]
    summaries = summary.summarise(results.rows, names, suite.our_names, measured.memory(suite))
    differences = _differences(suite, results, run.groups, circumstances)
    lengths = {each.name: each.mean_acceptance_length for each in summaries}
    trees = summary.drafted_trees(suite, lengths, SamplingParams(**circumstances.sampling))
    answered = answers.answered_prompts(run.groups, results.rows)
    drafters = {each.name: each.engine.drafter for each in suite.ours}
    vocabularies = answers.vocabulary_costs(suite.target, drafters, answered)
    record = report.bench_record(summaries, circumstances, measured.points, results, differences, trees, vocabularies)
    failed = results.failures or record["identical"] is False
    status = INTERRUPTED if results.interrupted else FAILED if failed else DONE
    record["status"] = status
    best, notes = summary.shown(summaries, suite.best_of)
    notes = [
        *suite.notes,
        *notes,
        *summary.empty_answers(summaries),
        *summary.unsettled_steps(summaries),
        *(each.describe() for each in vocabularies),
        *differences,
    ]
    if circumstances.device.startswith("cpu") and (waited := time_without_core(results.rows)) >= _DISTURBED:
        others = "others use this machine, and times are too long"
        notes.append(f"for {waited:.2f} of the time this process had no core: {others}")
    wrong = [f"error: {failure.describe()}" for failure in results.failures]
    if results.interrupted:
        turns = f"{len(results.rows)} of {run.turns} turns"
        wrong.append(f"interrupted after {turns}; some answered one prompt more than others")
    for each in wrong:
        say(each)
    if best:
        _print_summaries(best, circumstances, [*notes, *(tree.describe() for tree in trees)], terminal)
    if folder is not None:
        path = folder.finish(best, circumstances, measured.points, [*wrong, *notes], record, trees)
        terminal.note(f"report: {path}")
    if json:
        terminal.json(record)
    return status


def _print_summaries(
    summaries: Sequence[Summary], circumstances: Circumstances, notes: Sequence[str], terminal: Terminal
) -> None:
    from truedraft.measure.bench import all_tables

    terminal.out.print()
    terminal.print(circumstances.line(), style="dim")
    for text in all_tables(summaries, circumstances):
        terminal.table(text.headings, text.rows)
    if circumstances.costs_kept:
        notes = [*notes, "cost curves are of an earlier run; --refresh-costs measures them now"]
    for note in notes:
        terminal.print(f"note: {note}", style="dim")


def _differences(suite: Suite, results: Results, groups: Sequence[Group], circumstances: Circumstances) -> list[str]:
    """Where the engine's tokens differ from plain decoding though they must not; the first few, a sentence each."""
    from truedraft.measure.bench import differing_answers, find_difference

    if not circumstances.must_agree:
        return []
    prompts = {name: ids for group in groups for name, ids in zip(group.names, group.prompts, strict=True)}
    differing = differing_answers(results.rows, suite.our_names)
    found = (
        (system, name, find_difference(suite.target, prompts[name], list(plain), list(other)))
        for system, name, plain, other in differing[:_SHOWN_DIFFERENCES]
    )
    sentences = [f"{system}, prompt {name} {each.describe()}" for system, name, each in found if each is not None]
    rest = len(differing) - _SHOWN_DIFFERENCES
    return [*sentences, f"and {rest} more"] if rest > 0 else sentences
