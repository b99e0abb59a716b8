"""`truedraft plan`: recommends a drafter, its number of tokens and its tree, then compares the plan with a run."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truedraft.cli import plan_report, session
from truedraft.cli.failures import DONE, FAILED, INTERRUPTED, warn
from truedraft.cli.prompts import HELDOUT, PROMPTS_HELP, PromptOptions, read_prompts
from truedraft.cli.terminal import Terminal, interval_text, say
from truedraft.core.params import TEXT_OPTIONS, SamplingParams
from truedraft.core.theory import best_gamma, expected_tokens, least_speedup, operations_factor, pays, speedup
from truedraft.errors import OptionError, errors_about
from truedraft.options import (
    MachineOptions,
    ModelOptions,
    changed_fields,
    check_not_negative,
    check_share,
    group,
    option,
)
from truedraft.training.workspace import duration

if TYPE_CHECKING:
    from truedraft.measure import Plan, Prediction
    from truedraft.measure.bench import Group, Results
    from truedraft.models.base import LanguageModel

_FILE, _WHAT_IF, _FORMULAS = "plan.json", "what_if", "formulas"
_LEAST_PROMPTS = 4  # one prompt in so many is held out to check the plan
_PARTS = 100
_NO_INTERVAL = {"low": None, "high": None}  # for a single prompt
_LONGEST = 12  # number of drafted tokens in the table of formulas
_CONTEXT = 128  # tokens, for the estimated duration
# A replay of a drafter takes about as long as the target's answers; measuring its costs takes so many seconds.
_REPLAYED, _MEASURED_S = 1.0, 3.0


@dataclass(frozen=True)
class WhatToPlan:
    """What is planned."""

    drafter: tuple[str, ...] = option(
        (),
        f"{session.DRAFTER_HELP} May be repeated. Sizes that it leaves open are tried.",
        "D",
        shown_default="all that are known to fit",
        heading="Model and drafter",
    )
    prompts: str = option(HELDOUT, PROMPTS_HELP, "FILE")


@dataclass(frozen=True)
class ClosedForms:
    """Formulas only, without a model."""

    alpha: float | None = option(None, "Acceptance rate: only formulas, no model is loaded. Needs --cost.", "A")
    cost: float | None = option(None, "Time of drafting one token over time of one target call.", "C")
    length: int | None = option(None, "Drafted tokens.", "N", shown_default="the best", least=0)


@dataclass(frozen=True)
class Simulation:
    """Another machine or drafter in place of the measured one."""

    simulate: Path | None = option(None, "A plan that --out wrote: what would it be if? No model is loaded.", "FILE")
    bandwidth: float = option(1.0, "If memory were read so many times faster.", "X")
    draft_cost: float = option(1.0, "If drafting cost so many times as much.", "X")


@dataclass(frozen=True)
class PlanReport(session.ReportOptions):
    """Output of `truedraft plan`."""

    out: Path | None = option(None, "Write plan and pictures: a folder, or a .json file.", "PATH")


@dataclass(frozen=True)
class PlanOptions:
    """Options of `truedraft plan`."""

    model: ModelOptions = group("Model and drafter")
    what: WhatToPlan = group("What to plan with")
    runs: session.RunOptions = group("What to plan with", runs=3)
    prompt: PromptOptions = group("What to plan with", without=("prompt", "prompts", "image"))
    sampling: SamplingParams = group("Answer", without=("stop", "stop_token_ids", *TEXT_OPTIONS))
    closed: ClosedForms = group("Formulas")
    what_if: Simulation = group("What if")
    load: plan_report.LoadOptions = group("Load")
    report: PlanReport = group("Report")
    machine: MachineOptions = group("Machine")


def plan(options: PlanOptions) -> int:
    """Find the drafter and its sizes for your prompts on this machine, and check by running it.

    The target answers the prompts once. Every drafter and size is replayed on its answers, and its gain compared with
    the measured cost of drafting and checking. The best one is then run on held-out prompts.
    """
    _check_ways(options)
    if options.closed.alpha is not None:
        return _closed(options)
    if options.what_if.simulate is not None:
        return _simulate(options, options.what_if.simulate)
    return _plan(options)


def _check_ways(options: PlanOptions) -> None:
    """Refuse options of two modes at once, before anything is loaded."""
    closed, what_if = options.closed, options.what_if
    if (closed.alpha is None) != (closed.cost is None):
        missing, given = ("alpha", "cost") if closed.alpha is None else ("cost", "alpha")
        raise OptionError(f"is needed with --{given}; give both, or neither", field=missing)
    if closed.alpha is None and closed.length is not None:
        raise OptionError("is for --alpha and --cost; leave it out", field="length")
    if closed.alpha is not None and what_if.simulate is not None:
        raise OptionError("and --simulate are two ways to plan; leave one of them out", field="alpha")
    if what_if.simulate is None and (changed := changed_fields(what_if)):
        raise OptionError("is for --simulate; make a plan with --out first", field=changed[0])
    options.load.check(with_curves=closed.alpha is None)


def _closed(options: PlanOptions) -> int:
    alpha, cost = options.closed.alpha or 0.0, options.closed.cost or 0.0
    check_share("alpha", alpha)
    check_not_negative("cost", cost)
    best = best_gamma(alpha, cost)
    length = best if options.closed.length is None else options.closed.length

    def gain(length: int) -> dict[str, float]:
        return {
            "length": length,
            "tokens_per_call": expected_tokens(alpha, length),
            "speedup": speedup(alpha, length, cost),
            "operations": operations_factor(alpha, length, cost),
        }

    rows = [gain(each) for each in sorted({*range(1, _LONGEST + 1), *([length] if length else [])})]
    record = {
        "command": "plan",
        "status": DONE,
        "alpha": alpha,
        "cost": cost,
        **gain(length),
        "best_length": best,
        "pays": pays(alpha, cost),
        "least_speedup": least_speedup(alpha, cost),
        "break_even_cost": alpha,
        "lengths": rows,
    }
    terminal = Terminal()
    titles = ("drafted tokens", "tokens per call", "speed-up", "operations")
    terminal.table(titles, [[f"{row['length']}", *(f"{each:.2f}" for each in list(row.values())[1:])] for row in rows])
    terminal.print(
        f"with {length} drafted tokens: {record['tokens_per_call']:.2f} tokens per call, speed-up "
        f"{record['speedup']:.2f}, {record['operations']:.2f} times the operations for a token"
    )
    said = f"no length pays: a drafted token must cost less than {alpha:g} of a target call (the break-even)"
    if record["pays"]:
        said = (
            f"best length: {best}; the best one gains {record['least_speedup']:.2f} times at least, and drafting pays "
        )
        said += f"while a drafted token costs less than {alpha:g} of a target call"
    terminal.print(said)
    output = plan_report.PlanOutput(options.report.out, f"{_FORMULAS}.json", terminal)
    output.write(record)
    names = zip(list(rows[0])[1:], titles[1:], strict=True)
    lines = {name: [(row["length"], row[key]) for row in rows] for key, name in names}
    output.draw(_FORMULAS, lines, (f"acceptance rate {alpha:g}, cost {cost:g}", "drafted tokens", ""), even=True)
    if options.report.json:
        terminal.json(record)
    return DONE


def _simulate(options: PlanOptions, file: Path) -> int:
    from truedraft.measure import WhatIf, prediction_record, read_plan

    with errors_about("simulate"):
        made = read_plan(file)
    what_if = WhatIf(options.what_if.bandwidth, options.what_if.draft_cost)
    batch = options.runs.batch
    found, now = made.best(batch, what_if), made.best()
    recommended = made.recommended(batch, what_if)
    as_made = {each.drafting.drafter: each for each in now}
    rows = [
        (
            each.option.drafter,
            f"{each.option.tokens_per_call.value:.2f}",
            f"{as_made[each.drafting.drafter].speedup.value:.2f}",
            interval_text(each.speedup),
            plan_report.break_even_text(made, each, what_if),
        )
        for each in found
    ]
    terminal = Terminal()
    then = f"memory {what_if.bandwidth:g} times as fast, batch {batch}, drafting {what_if.draft_cost:g} times as"
    terminal.print(f"{made.model.get('model')}: {then} expensive", style="dim")
    terminal.table(("drafter", "tokens per call", "as planned", "speed-up then", "no gain from batch"), rows)
    terminal.print(f"recommended then: {recommended}", style="bold")
    record = {
        "command": "plan",
        "status": DONE,
        **dataclasses.asdict(what_if),
        "batch": batch,
        "recommended": recommended,
        "recommended_as_planned": made.recommended(),
        "predicted": [prediction_record(each) for each in found],
    }
    output = plan_report.PlanOutput(options.report.out, f"{_WHAT_IF}.json", terminal)
    if output.record is not None and output.record.resolve() == file.expanduser().resolve():
        raise OptionError("would write over the plan that it reads; name another file", field="out")
    record |= plan_report.report_load(made, options.load, terminal, output, what_if)
    output.write(record)
    plan_report.draw_batches(made, found, output, _WHAT_IF, what_if)
    if options.report.json:
        terminal.json(record)
    return DONE


def _plan(options: PlanOptions) -> int:
    from truedraft.measure.bench import spread

    terminal, params = Terminal(), options.sampling
    with errors_about("prompts"):
        prompts = spread(read_prompts(None, options.what.prompts), options.runs.limit)
        if len(prompts) < (least := _LEAST_PROMPTS):
            why = f"one in {least} is kept back to check the plan"
            raise OptionError(f"must be {least} or more, for {why}; there are {len(prompts)}")
    output = plan_report.PlanOutput(options.report.out, _FILE, terminal)
    target = session.load_alone(session.with_model(options.model), options.machine, terminal.err)
    seeds = (None if params.seed is None else session.derived_seed(params.seed, n) for n in range(len(prompts)))
    requests = [(each, dataclasses.replace(params, seed=seed)) for each, seed in zip(prompts, seeds, strict=True)]
    planned, kept_back = _split(options, target, requests)
    made = _made(options, target, planned, params, terminal)
    best = made.best()
    predicted = next((each for each in best if each.option.drafter == made.recommended()), best[0])
    plan_report.print_plan(made, best, terminal)
    results = _run(target, predicted.option.drafter, kept_back, options.runs.runs, terminal)
    checked = _check(results, predicted, params)
    if checked["speedup"] is not None:
        made = dataclasses.replace(made, measured={predicted.option.drafter: checked["speedup"]["value"]})
    plan_report.print_check(checked, terminal)
    plan_report.print_recommended(made, predicted, terminal)
    for failure in results.failures:
        say(f"error: {failure.describe()}")
    record = plan_report.plan_record(made, best, checked)
    record |= plan_report.report_load(made, options.load, terminal, output)
    output.write(made.to_dict() | {key: record[key] for key in ("predicted", "check")})
    plan_report.draw_plan(made, best, output)
    failed = bool(results.failures) or checked.get("identical") is False
    status = INTERRUPTED if results.interrupted else FAILED if failed else DONE
    if options.report.json:
        terminal.json(record | {"status": status})
    return status


def _split(
    options: PlanOptions, target: LanguageModel, requests: Sequence[Any]
) -> tuple[list[tuple[str, list[int], SamplingParams]], list[Group]]:
    """Three of four prompts for the plan; the fourth to check it, in groups that are answered together."""
    from truedraft.measure.bench import grouped

    singles, failures = session.encoded(target, session.prepare_prompts(target, requests, options.prompt), 1)
    for failure in failures:
        warn(f"left out: {failure.describe()}")
    usable = [(each.names[0], list(each.prompts[0]), each.params) for each in singles]
    if len(usable) < _LEAST_PROMPTS:
        raise OptionError(f"must be {_LEAST_PROMPTS} or more that can be answered, got {len(usable)}", field="prompts")
    kept_back = usable[_LEAST_PROMPTS - 1 :: _LEAST_PROMPTS]
    planned = [each for number, each in enumerate(usable) if number % _LEAST_PROMPTS != _LEAST_PROMPTS - 1]
    return planned, grouped(kept_back, options.runs.batch)


def _made(
    options: PlanOptions,
    target: LanguageModel,
    prompts: Sequence[tuple[str, list[int], SamplingParams]],
    params: SamplingParams,
    terminal: Terminal,
) -> Plan:
    """The plan; cached costs are first checked against some steps."""
    from truedraft.engine import Engine
    from truedraft.engine.policy import StepCosts
    from truedraft.engine.policy.sizes import outdated
    from truedraft.measure import fitting_drafters, make_plan

    typed = [each for each in options.what.drafter if each != "none"] if options.what.drafter else ["auto"]
    fitting = fitting_drafters(target, warn) if "auto" in typed else {}
    drafters = list(dict.fromkeys(words for each in typed for words in (fitting if each == "auto" else (each,))))
    costs = StepCosts(target, refresh=options.runs.refresh_costs)
    with terminal.progress("plan", _PARTS) as show:
        show(0, "costs of the target")
        forwards = costs.forwards()
        if costs.measuring_s == 0.0 and (why := outdated(Engine(target), forwards)):
            warn(why)
            costs = StepCosts(target, refresh=True)
        announcement = iter([_announced(options, drafters, len(prompts), costs.forwards()(1, [_CONTEXT]))])

        def report(done: float, remark: str) -> None:
            for sentence in announcement if done else ():  # the drafters are loaded
                terminal.note(sentence)
            show(round(done * _PARTS), remark)

        made = make_plan(
            target, drafters, prompts, params, batch=options.runs.batch, made=fitting, costs=costs, progress=report
        )
    for warning in costs.warnings:
        warn(warning)
    return made


def _announced(options: PlanOptions, drafters: Sequence[str], prompts: int, step_s: float) -> str:
    checked = options.runs.runs * (prompts // (_LEAST_PROMPTS - 1)) * 2
    answers = prompts * (1 + _REPLAYED * len(drafters)) + checked
    seconds = answers * options.sampling.max_tokens * step_s + _MEASURED_S * len(drafters)
    return (
        f"{', '.join(drafters)}: tried on {prompts} prompts, and the best one run on others; about "
        f"{duration(seconds)}, more where others use this machine"
    )


def _run(target: LanguageModel, words: str, groups: Sequence[Group], runs: int, terminal: Terminal) -> Results:
    from truedraft.drafters.specs import from_spec
    from truedraft.measure.bench import PLAIN, OurEngine, run_all

    batch = max(len(group.prompts) for group in groups)
    drafted = OurEngine.of(words, target, batch, from_spec(words, target), controller="fixed")
    systems = [OurEngine.of(PLAIN, target, batch), drafted]
    with terminal.progress("checking", len(systems) * len(groups) * runs) as progress:
        return run_all(systems, groups, runs=runs, context_length=target.context_length, progress=progress)


def _check(results: Results, predicted: Prediction, params: SamplingParams) -> dict[str, Any]:
    """Predicted and measured speedup, over prompts that both answered; measured is None if none has tokens."""
    from truedraft.core.intervals import ratio_of_rates
    from truedraft.core.stats import Counters
    from truedraft.measure.bench import PLAIN, Row

    rows = defaultdict[str, defaultdict[tuple[str, ...], list[Row]]](lambda: defaultdict(list))
    for row in results.rows:
        rows[row.system][row.prompts].append(row)
    plain, drafted = rows[PLAIN], rows[predicted.option.drafter]
    both = [key for key in drafted if key in plain]
    pairs = [(_rate(drafted[key]), _rate(plain[key])) for key in both]
    pairs = [pair for pair in pairs if pair[0][0] and pair[1][0]]
    speedup = ratio_of_rates(*zip(*pairs, strict=True)) if pairs else None
    counted = [row.output.counters for key in both for row in drafted[key]]
    counters = sum((each for each in counted if each is not None), Counters())
    agree = params.greedy or params.seeded
    same = all(each.output.token_ids == plain[key][0].output.token_ids for key in both for each in drafted[key])
    factor = predicted.speedup.value / predicted.option.tokens_per_call.value
    tokens, seconds = (sum(pair[0][part] for pair in pairs) for part in range(2))
    return {
        "drafter": predicted.option.drafter,
        "prompts": sum(map(len, both)),
        "predicted_speedup": dataclasses.asdict(predicted.speedup),
        "speedup": None if speedup is None else dataclasses.asdict(speedup) | (_NO_INTERVAL if len(pairs) < 2 else {}),
        "predicted_tokens_per_call": dataclasses.asdict(predicted.option.tokens_per_call),
        "tokens_per_call": counters.mean_acceptance_length,
        "predicted_at_measured_tokens": factor * counters.mean_acceptance_length,
        "measured_over_predicted": None if speedup is None else speedup.value / predicted.speedup.value,
        "decode_tokens_per_s": tokens / seconds if seconds else 0.0,
        "identical": same if agree and both else None,
    }


def _rate(rows: Sequence[Any]) -> tuple[float, float]:
    """Tokens after the first in the run of median speed, and their seconds."""
    median = sorted(rows, key=lambda row: row.decode_tokens_per_s)[(len(rows) - 1) // 2]
    return round(median.decode_tokens_per_s * median.decode_s), median.decode_s
