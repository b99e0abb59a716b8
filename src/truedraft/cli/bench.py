"""`truedraft bench`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from truedraft.cli import options as opt
from truedraft.cli.failures import DONE, FAILED, INTERRUPTED, describe, say, warn
from truedraft.cli.prompts import HELDOUT, NamedPrompt, read_prompts, user_path
from truedraft.core.sampling import SamplingParams
from truedraft.drafters.specs import drafter_help
from truedraft.errors import DataError, OptionError, PromptError, TruedraftError

if TYPE_CHECKING:
    from truedraft.bench.costs import MachineCosts
    from truedraft.bench.lineup import Lineup, LineupSetup
    from truedraft.bench.output import OutputFolder
    from truedraft.bench.record import Circumstances
    from truedraft.bench.run import Group, Results
    from truedraft.cli.terminal import Terminal

_WHAT, _RUN = "What to measure", "Runs"

_Drafters = Annotated[
    list[str] | None,
    opt.option(
        "--drafter",
        "What guesses, one of these; options stand behind it as ,option=value. May be repeated.\n\n" + drafter_help(),
        _WHAT,
        "D",
        show_default="auto",
    ),
]
_Peers = Annotated[
    list[str] | None, opt.option("--peer", "transformers: its own ways of generating; may be repeated.", _WHAT, "PEER")
]
_Prompts = Annotated[
    str,
    opt.option(
        "--prompts",
        "heldout: those that ship; a .jsonl or .txt file; or a folder with HumanEval, GSM8K, MT-bench or Spec-Bench.",
        _WHAT,
        "SET",
    ),
]
_Batch = Annotated[int, opt.option("--batch", "Prompts that are answered together.", _RUN, "N")]
_Runs = Annotated[int, opt.option("--runs", "How often each way answers each prompt.", _RUN, "N")]
_Limit = Annotated[
    int | None, opt.option("--limit", "Only so many prompts, evenly over the set.", _RUN, "N", show_default="all")
]
_Out = Annotated[
    Path | None,
    opt.option("--out", "Write report, plots, record and rows into this folder.", "Report", "DIR"),
]
_RefreshCosts = Annotated[
    bool, opt.flag("--refresh-costs", "Measure cost curves again, also where kept ones would do.", _RUN)
]


@dataclass(frozen=True, slots=True)
class _Task:
    """What was asked for."""

    prompt_set: str
    limit: int | None
    batch: int
    runs: int
    chat: bool
    refresh_costs: bool
    out: Path | None
    json: bool


def bench(
    model: opt.Model = "embedded:target",
    pad_to: opt.PadTo = None,
    drafter: _Drafters = None,
    rule: opt.RuleWord = "speculative",
    peer: _Peers = None,
    prompts: _Prompts = HELDOUT,
    chat: opt.Chat = False,
    limit: _Limit = None,
    batch: _Batch = 1,
    runs: _Runs = 1,
    max_tokens: opt.MaxTokens = 128,
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = 1.0,
    top_k: opt.TopK = 0,
    min_p: opt.MinP = 0.0,
    seed: opt.Seed = None,
    coupled: opt.Coupled = False,
    ignore_eos: opt.IgnoreEos = False,
    out: _Out = None,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    no_fast_paths: opt.NoFastPaths = False,
    refresh_costs: _RefreshCosts = False,
    json: opt.Json = False,
) -> int:
    """Measure plain decoding, drafters and other libraries against each other, in turns, on the same prompts."""
    from truedraft.bench.lineup import LineupSetup
    from truedraft.bench.peers import check_peer
    from truedraft.cli.session import sampling

    for name, value in (("--batch", batch), ("--runs", runs), ("--limit", limit)):
        if value is not None and value < 1:
            raise OptionError(f"{name} must be 1 or more, got {value}")
    peers = tuple(dict.fromkeys(peer or ()))
    for each in peers:
        check_peer(each)
    params = sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        coupled=coupled,
        ignore_eos=ignore_eos,
    )
    setup = LineupSetup(
        model=model,
        drafters=tuple(dict.fromkeys(drafter or ("auto",))),
        peers=peers,
        rule=rule,
        dtype=dtype,
        device=device,
        batch=batch,
        pad_to=pad_to,
        fast_paths=not no_fast_paths,
    )
    folder = None if out is None else user_path(str(out))
    return _run(setup, threads, params, _Task(prompts, limit, batch, runs, chat, refresh_costs, folder, json))


def _run(setup: LineupSetup, threads: int | None, params: SamplingParams, task: _Task) -> int:
    from truedraft.bench.output import OutputFolder
    from truedraft.cli.lossy import check_rule
    from truedraft.cli.session import as_chat, quiet_hub, set_threads
    from truedraft.cli.terminal import Terminal

    check_rule(setup.rule, params)
    terminal = Terminal()
    set_name, prompts = _prompts(task)
    set_threads(threads)
    with contextlib.ExitStack() as stack:
        folder = None if task.out is None else stack.enter_context(OutputFolder(task.out))
        with quiet_hub():
            lineup = _load(setup, terminal)
        if task.chat:
            prompts = as_chat(lineup.target, prompts)
        groups, failures = _groups(lineup, prompts, task.batch)
        measured = _costs(lineup, params, task.refresh_costs, terminal)
        circumstances = _circumstances(setup, lineup, measured, params, task, (set_name, len(prompts)))
        results = _measure(lineup, groups, params, circumstances, folder, terminal)
        results.failures[:0] = failures
        return _tell(lineup, measured, results, groups, circumstances, task, folder, terminal)


def _prompts(task: _Task) -> tuple[str, list[NamedPrompt]]:
    """The name of the set, and as many of its prompts as are wanted."""
    from truedraft.bench.prompts import is_question_file, read_questions, spread

    path = user_path(task.prompt_set)
    if task.prompt_set != HELDOUT and (path.is_dir() or is_question_file(path)):
        questions = read_questions(path)
        chosen = spread(questions.questions, task.limit)
        return questions.name, [NamedPrompt(each.name, each.text) for each in chosen]
    if task.prompt_set != HELDOUT and not path.suffix and not path.exists():
        raise DataError(
            f"there is no prompt set {task.prompt_set!r}; give {HELDOUT}, a .jsonl or .txt file, or a folder with "
            "questions of HumanEval, GSM8K, MT-bench or Spec-Bench"
        )
    name = HELDOUT if task.prompt_set == HELDOUT else path.name
    return name, spread(read_prompts(None, task.prompt_set), task.limit)


def _load(setup: LineupSetup, terminal: Terminal) -> Lineup:
    """Load what takes part; on a terminal, show what is being waited for."""
    from truedraft.bench.lineup import load_lineup

    if not terminal.err.is_terminal:
        return load_lineup(setup)
    with terminal.err.status(f"loading {setup.model}"):
        return load_lineup(setup)


def _costs(lineup: Lineup, params: SamplingParams, refresh: bool, terminal: Terminal) -> MachineCosts:
    """Cost curves of this machine, measured now or kept from an earlier run."""
    from truedraft.bench.costs import PARTS, measure_costs

    with terminal.progress("cost curves", PARTS * len(lineup.ours)) as progress:
        measured = measure_costs(lineup, params, progress, refresh=refresh)
    for warning in measured.warnings:
        warn(warning)
    for each in lineup.ours:
        each.costs = measured.by_name.get(each.name)
    return measured


def _groups(lineup: Lineup, prompts: Sequence[NamedPrompt], batch: int) -> tuple[list[Group], list[str]]:
    """Prompts as token ids, so that all contestants get the same; those that the target cannot take are told."""
    from truedraft.bench.run import grouped
    from truedraft.engine.prompts import encode_prompt

    names: list[str] = []
    ids: list[list[int]] = []
    failures: list[str] = []
    given: Counter[str] = Counter()
    for each in prompts:
        try:
            ids.append(encode_prompt(lineup.target, each.prompt))
            given[each.name] += 1  # two prompts of one id are two prompts, not two runs of one
            names.append(each.name if given[each.name] == 1 else f"{each.name} ({given[each.name]})")
        except TruedraftError as error:
            failures.append(f"prompt {each.name}: {describe(error)}")
    if not names:
        raise PromptError(f"none of the prompts can be answered; {failures[0]}")
    return grouped(names, ids, batch), failures


def _measure(
    lineup: Lineup,
    groups: Sequence[Group],
    params: SamplingParams,
    circumstances: Circumstances,
    folder: OutputFolder | None,
    terminal: Terminal,
) -> Results:
    from truedraft.bench.run import run_all

    about = circumstances.of_a_row()
    turns = len(lineup.contestants) * len(groups) * circumstances.runs
    with terminal.progress("benchmark", turns) as progress:
        return run_all(
            lineup.contestants,
            groups,
            params,
            runs=circumstances.runs,
            context_length=lineup.target.context_length,
            keep=(lambda row: None) if folder is None else (lambda row: folder.keep(row, about)),
            progress=progress,
        )


def _circumstances(
    setup: LineupSetup,
    lineup: Lineup,
    measured: MachineCosts,
    params: SamplingParams,
    task: _Task,
    prompt_set: tuple[str, int],
) -> Circumstances:
    from truedraft.bench.record import Circumstances
    from truedraft.cli.machine import machine_facts

    machine = machine_facts()
    target = lineup.target
    return Circumstances(
        model=setup.model,
        note=lineup.target.note,
        pad_to=setup.pad_to,
        drafters=tuple(each.name for each in lineup.ours[1:]),
        peers=setup.peers,
        rule=setup.rule,
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
        threads=machine["threads"],
        fast_paths=target.fast_paths,
        batch=task.batch,
        prompt_set=prompt_set[0],
        prompts=prompt_set[1],
        runs=task.runs,
        sampling=dataclasses.asdict(params),
        must_agree=lineup.lossless and (params.greedy or params.coupled),
        costs_kept=measured.kept,
        bandwidth=measured.bandwidth,
        weight_bytes=target.weight_bytes or None,
        machine=machine,
        lossless=lineup.lossless,
    )


def _tell(
    lineup: Lineup,
    measured: MachineCosts,
    results: Results,
    groups: Sequence[Group],
    circumstances: Circumstances,
    task: _Task,
    folder: OutputFolder | None,
    terminal: Terminal,
) -> int:
    """Print and write what was measured; the exit status."""
    from truedraft.bench.drafted_trees import drafted_trees
    from truedraft.bench.record import bench_record
    from truedraft.bench.summary import shown, summarise
    from truedraft.cli.bench_tables import differences, disturbance, print_summaries

    names = [each.name for each in lineup.contestants]
    ours = [each.name for each in lineup.ours]
    summaries = summarise(results.rows, names, ours, measured.memory(lineup))
    parted = differences(lineup, results, groups, circumstances)
    trees = drafted_trees(lineup, summaries, SamplingParams(**circumstances.sampling))
    record = bench_record(
        summaries, circumstances, measured.points, results.failures, results.interrupted, parted, trees
    )
    failed = results.failures or record["identical"] is False
    status = INTERRUPTED if results.interrupted else FAILED if failed else DONE
    record["status"] = status
    best, notes = shown(summaries, lineup.best_of)
    notes = [*lineup.notes, *notes, *parted, *disturbance(results, circumstances.device)]
    wrong = [f"error: {failure}" for failure in results.failures]
    if results.interrupted:
        turns = len(names) * len(groups) * task.runs
        wrong.append(
            f"interrupted after {len(results.rows)} of {turns} turns; some answered one prompt more than others"
        )
    for each in wrong:
        say(each)
    if best:
        print_summaries(best, circumstances, [*notes, *(tree.describe() for tree in trees)], terminal)
    if folder is not None:
        report = folder.finish(best, circumstances, measured.points, [*wrong, *notes], record, trees)
        terminal.note(f"report: {report}")
    if task.json:
        terminal.json(record)
    return status
