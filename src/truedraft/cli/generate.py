"""`truedraft generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from truedraft.cli import options as opt
from truedraft.cli.failures import INTERRUPTED, say
from truedraft.cli.prompts import NamedPrompt, read_prompts
from truedraft.core.sampling import SamplingParams

if TYPE_CHECKING:
    from truedraft.cli.session import Setup
    from truedraft.cli.terminal import Terminal
    from truedraft.engine import Answer, Engine


@dataclass(frozen=True, slots=True)
class _Wishes:
    """What to show of the answers."""

    compare: bool
    show_drafts: bool
    chat: bool
    json: bool


def generate(
    prompt: opt.PromptText = None,
    prompts: opt.PromptsFile = None,
    model: opt.Model = "embedded:target",
    pad_to: opt.PadTo = None,
    drafter: opt.Drafter = "auto",
    rule: opt.RuleWord = "speculative",
    max_tokens: opt.MaxTokens = 128,
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = 1.0,
    top_k: opt.TopK = 0,
    min_p: opt.MinP = 0.0,
    seed: opt.Seed = None,
    coupled: opt.Coupled = False,
    stop: opt.Stop = None,
    stop_token_id: opt.StopTokenId = None,
    ignore_eos: opt.IgnoreEos = False,
    chat: opt.Chat = False,
    compare: opt.Compare = False,
    show_drafts: opt.ShowDrafts = False,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    no_fast_paths: opt.NoFastPaths = False,
    json: opt.Json = False,
) -> int:
    """Answer a prompt by speculation; --compare shows what it gains over plain decoding."""
    from truedraft.cli.session import Setup, sampling

    params = sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        coupled=coupled,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
    )
    questions = read_prompts(prompt, prompts)
    setup = Setup(model, drafter, rule, dtype, device, threads, pad_to, not no_fast_paths)
    return _run(setup, questions, params, _Wishes(compare, show_drafts, chat, json))


def _run(setup: Setup, prompts: Sequence[NamedPrompt], params: SamplingParams, wishes: _Wishes) -> int:
    from truedraft.cli.answering import BATCH
    from truedraft.cli.lossy import check_rule
    from truedraft.cli.session import as_chat, load_engine
    from truedraft.cli.terminal import Terminal

    check_rule(setup.rule, params)
    terminal = Terminal()
    together = 1 if wishes.compare else min(len(prompts), BATCH)
    engine = load_engine(setup, terminal.err, params, together)
    if wishes.chat:
        prompts = as_chat(engine.target, prompts)
    run = _compare if wishes.compare else _answer
    return run(engine, setup, prompts, params, wishes, terminal)


def _answer(
    engine: Engine,
    setup: Setup,
    prompts: Sequence[NamedPrompt],
    params: SamplingParams,
    wishes: _Wishes,
    terminal: Terminal,
) -> int:
    from truedraft.cli.answering import answer_many, answer_one
    from truedraft.cli.report import answers_record, circumstances_record, stats_line

    if len(prompts) == 1:
        answered = answer_one(engine, prompts[0], params, terminal, wishes.show_drafts)
    else:
        answered = answer_many(engine, prompts, params, terminal, wishes.show_drafts)
    _remarks(answered.answers, wishes, terminal)
    if answered.answers:
        terminal.note(stats_line(answered.answers, answered.elapsed_s, params))
        note = engine.target.note
        if note is not None:
            terminal.note(note)
    if wishes.json:
        record = answers_record(answered.names, answered.answers, answered.elapsed_s)
        terminal.json({"command": "generate"} | record | circumstances_record(engine, setup, params))
    return answered.status


def _compare(
    engine: Engine,
    setup: Setup,
    prompts: Sequence[NamedPrompt],
    params: SamplingParams,
    wishes: _Wishes,
    terminal: Terminal,
) -> int:
    from truedraft.cli.compare import compare_many, compare_one, must_agree
    from truedraft.cli.measure import Comparison
    from truedraft.cli.report import circumstances_record, comparison_record, print_comparison

    if len(prompts) == 1:
        measured = compare_one(engine, prompts[0], params, terminal, wishes.show_drafts)
    else:
        measured = compare_many(engine, prompts, params, terminal)
    comparison = None
    if measured.pairs:
        comparison = Comparison(measured.pairs, must_agree(engine, params), engine.rule.lossless)
    _remarks([pair.speculative.answers[0] for pair in measured.pairs], wishes, terminal)
    status = measured.status(comparison)
    if status == INTERRUPTED:
        terminal.end_line()
        say(f"interrupted after {len(measured.pairs)} of {len(prompts)} prompts")
    if comparison is not None:
        print_comparison(comparison, engine, setup, params, measured.runs, terminal)
        if wishes.json:
            record = comparison_record(comparison, measured.runs) | {"failed_prompts": len(measured.failures)}
            terminal.json({"command": "generate"} | record | circumstances_record(engine, setup, params))
    return status


def _remarks(answers: Sequence[Answer], wishes: _Wishes, terminal: Terminal) -> None:
    """What the marks mean, and what went wrong without ending the answer."""
    from truedraft.cli.painting import legend

    if wishes.show_drafts:
        terminal.note(legend(terminal.colour))
    for warning in dict.fromkeys(warning for answer in answers for warning in answer.warnings):
        say(f"warning: {warning}")
