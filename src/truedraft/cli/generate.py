"""`truedraft generate`: streams one answer or batches several; --compare is in `compare`, --num-beams in `beams`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from truedraft.cli import session
from truedraft.cli.beams import BeamOptions, search_beams
from truedraft.cli.failures import warn
from truedraft.cli.prompts import PromptOptions, PromptRequest, read_prompts
from truedraft.cli.terminal import Terminal, from_escapes, legend, say, typed_text, writer, written
from truedraft.core.params import SamplingParams
from truedraft.errors import OptionError
from truedraft.options import MachineOptions, flag, group

if TYPE_CHECKING:
    from truedraft.cli.report import Answered
    from truedraft.engine import Answer, Engine, Piece, Request
    from truedraft.engine.policy.decisions import Decisions
    from truedraft.engine.prompts import Prompt

BATCH = 8  # prompts per batch


@dataclass(frozen=True)
class GenerateReport(session.ReportOptions):
    """Output of `truedraft generate`."""

    compare: bool = flag("Also decode plainly: the speed of both, and whether the tokens are identical.")
    show_drafts: bool = flag("Colour each token by where it came from; brackets without colours.")
    explain: bool = flag("Show what was drafted when, by which drafter and why, and the gain.")


@dataclass(frozen=True)
class GenerateOptions:
    """Options of `truedraft generate`."""

    prompts: PromptOptions = group("Prompt")
    stack: session.StackOptions = group("Model and drafter")
    sampling: SamplingParams = group("Answer")
    beams: BeamOptions = group("Beam search")
    report: GenerateReport = group("Report")
    machine: MachineOptions = group("Machine")


def generate(options: GenerateOptions) -> int:
    """Answer a prompt by speculation; --compare shows what it gains over plain decoding."""
    if options.beams != BeamOptions():
        return search_beams(options)
    stop = tuple(from_escapes(typed_text(text), "--stop") for text in options.sampling.stop)
    params = replace(options.sampling, stop=stop)
    what = options.prompts
    prompts = read_prompts(what.prompt, what.prompts, own_options=True, images=what.image)
    if options.report.compare and any(each.images for each in prompts):
        raise OptionError("needs prompts of text; leave it out where prompts have pictures", field="compare")
    return _run(options, [(each, params) for each in prompts])


def _run(options: GenerateOptions, prompts: Sequence[PromptRequest]) -> int:
    from truedraft.cli.compare import compare
    from truedraft.cli.report import circumstances_record
    from truedraft.engine.prompts import check_max_tokens

    if options.stack.plan is not None:
        drafter = session.planned_drafter(options.stack.plan, [options.stack.drafter], prompts[0][1])
        options = replace(options, stack=replace(options.stack, drafter=drafter))
    params = prompts[0][1]
    prompts = session.sampling_of_each(prompts)
    for _, each in prompts:
        session.check_rule(options.stack.rule, each)
    terminal, report = Terminal(), options.report
    options = replace(options, stack=session.with_model(options.stack))
    together = 1 if report.compare else min(len(prompts), BATCH)
    engine = session.load_engine(options.stack, options.machine, terminal.err, prompts[0][1], together)
    for _, each in prompts:
        if each.max_tokens != SamplingParams().max_tokens:  # not for the default, which the context then limits
            check_max_tokens(engine.target, each.max_tokens)
    prompts = session.prepare_prompts(engine.target, prompts, options.prompts)
    run = compare if report.compare else _answer
    status, record = run(engine, options, prompts, terminal)
    if report.json:
        circumstances = circumstances_record(engine, options.stack, params)
        terminal.json({"command": "generate", "status": status} | record | circumstances)
    return status


def _answer(
    engine: Engine, options: GenerateOptions, prompts: Sequence[PromptRequest], terminal: Terminal
) -> tuple[int, dict[str, Any]]:
    """Answer the prompts; returns the exit status and the answers' part of the record."""
    from truedraft.cli.report import Answered, drafter_lines, explain, undrafted_line

    watched = watching(engine, terminal) if options.report.explain else contextlib.nullcontext()
    show_drafts = options.report.show_drafts
    with watched as decisions:
        if len(prompts) == 1:
            answer = write_answer(engine, prompts[0], terminal, show_drafts)
            ((prompt, params),), interrupted = prompts, answer.finish_reason == "cancelled"
            answered = Answered([prompt.name], [answer], [params], answer.timing.total_s, interrupted)
        else:
            answered = _answer_many(engine, prompts, terminal, show_drafts)
    remark([warning for each in answered.answers for warning in each.warnings], options, terminal)
    if answered.answers:
        terminal.note(answered.line())
        if engine.target.note is not None:
            terminal.note(engine.target.note)
        for name, member in engine.drafter.members.items():
            if member.model is not None and member.model.note is not None:
                terminal.note(f"{name}: {member.model.note}")
        undrafted = undrafted_line(engine, answered.counters)
        for line in (*drafter_lines(engine), *([undrafted] if undrafted else [])):
            terminal.note(line)
    record = answered.as_dict()
    if decisions is not None:
        explain(decisions, not engine.drafter.limits.is_zero, terminal.err)
        record["decisions"] = decisions.as_dict()
    return answered.status, record


@contextlib.contextmanager
def watching(engine: Engine, terminal: Terminal) -> Iterator[Decisions]:
    """Record the decisions of steps inside the block; the cost of a plain step may be measured first."""
    from truedraft.engine.policy.decisions import Decisions

    with session.waiting(terminal.err, session.MEASURING):
        decisions = Decisions(engine.forwards())
    engine.listeners.append(decisions)
    try:
        yield decisions
    finally:
        engine.listeners.remove(decisions)


def _answer_many(engine: Engine, prompts: Sequence[PromptRequest], terminal: Terminal, show_drafts: bool) -> Answered:
    """Answer in batches; the answers of a finished batch are written after a line with their prompt's name."""
    from truedraft.cli.report import Answered

    answered = Answered()
    started = time.perf_counter()
    try:
        with terminal.progress("answering", len(prompts), during_output=True) as progress:
            for first in range(0, len(prompts), BATCH):
                batch = prompts[first : first + BATCH]
                whole: Any = [prompt.whole for prompt, _ in batch]  # texts, ids and pictures in one list
                answers = engine.generate(whole, [params for _, params in batch])
                for (prompt, params), answer in zip(batch, answers, strict=True):
                    answered.names.append(prompt.name)
                    answered.answers.append(answer)
                    answered.params.append(params)
                    seed = f", seed {params.seed}" if params.seeded else ""
                    terminal.heading(f"{prompt.name} ({answer.finish_reason}{seed})")
                    terminal.write(written(answer, engine.target.tokenizer, terminal, show_drafts))
                    terminal.end_line()
                progress(first + len(batch), "")
    except KeyboardInterrupt:
        answered.interrupted = True
    answered.elapsed_s = time.perf_counter() - started
    for name, answer in zip(answered.names, answered.answers, strict=True):
        if answer.error is not None:
            say(f"error: prompt {name}: {answer.error}")
    return answered


def write_answer(engine: Engine, request: PromptRequest, terminal: Terminal, show_drafts: bool) -> Answer:
    """Answer a prompt and write each piece at once.

    Ctrl-C cancels the request; its answer so far is returned with the finish reason "cancelled".
    """
    prompt, params = request
    try:
        return stream_answer(engine, prompt.whole, params, writer(engine.target.tokenizer, terminal, show_drafts))
    finally:
        terminal.end_line()


def stream_answer(engine: Engine, prompt: Prompt, params: SamplingParams, show: Callable[[Piece], None]) -> Answer:
    """Answer a prompt and show each piece at once; Ctrl-C returns the answer so far."""
    request = engine.submit(prompt, params)
    try:
        while (answer := _drain(request, show)) is None:
            engine.step()
    except KeyboardInterrupt:
        engine.cancel(request)
        answer = _drain(request, show) or request.answer(request.emitted)
    finally:
        engine.cancel(request)
    if request.error is not None:
        raise request.error
    return answer


def _drain(request: Request, show: Callable[[Piece], None]) -> Answer | None:
    while request.pieces:
        piece = request.pieces.pop(0)
        show(piece)
        if piece.answer is not None:
            return piece.answer
    return None


def remark(warnings: Sequence[str], options: GenerateOptions, terminal: Terminal) -> None:
    """Print the legend of marks, and warnings."""
    if options.report.show_drafts:
        terminal.err.print(legend(terminal.colour), style="dim", soft_wrap=True)
    for warning in dict.fromkeys(warnings):
        warn(warning)
