"""`truedraft generate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from truedraft.cli import options as opt
from truedraft.cli.failures import INTERRUPTED, say, warn
from truedraft.cli.prompts import Asked, NamedPrompt, read_prompts
from truedraft.cli.visible import from_escapes, typed_text
from truedraft.core.sampling import SamplingParams

if TYPE_CHECKING:
    from truedraft.cli.session import Setup
    from truedraft.cli.terminal import Terminal
    from truedraft.engine import Answer, Engine


@dataclass(frozen=True, slots=True)
class _Wishes:
    """What to show of the answers, and whether each prompt gets a seed made from the one that was drawn."""

    compare: bool
    show_drafts: bool
    chat: bool
    json: bool
    derive_seeds: bool


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
        stop=tuple(from_escapes(typed_text(text), "--stop") for text in stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
    )
    questions = read_prompts(prompt, prompts, own_options=True)
    setup = Setup(model, drafter, rule, dtype, device, threads, pad_to, not no_fast_paths)
    wishes = _Wishes(compare, show_drafts, chat, json, seed is None and len(questions) > 1)
    return _run(setup, questions, params, wishes)


def _run(setup: Setup, prompts: Sequence[NamedPrompt], params: SamplingParams, wishes: _Wishes) -> int:
    from truedraft.cli.answering import BATCH
    from truedraft.cli.lossy import check_rule
    from truedraft.cli.session import as_chat, load_engine, sampling_of_each
    from truedraft.cli.terminal import Terminal

    each = sampling_of_each(params, prompts, derive_seeds=wishes.derive_seeds)
    for its in each:
        check_rule(setup.rule, its)
    terminal = Terminal()
    together = 1 if wishes.compare else min(len(prompts), BATCH)
    engine = load_engine(setup, terminal.err, each[0], together)
    if wishes.chat:
        prompts = as_chat(engine.target, prompts)
    run = _compare if wishes.compare else _answer
    circumstances = _circumstances(engine, setup, params, wishes)
    return run(engine, setup, list(zip(prompts, each, strict=True)), circumstances, wishes, terminal)


def _circumstances(engine: Engine, setup: Setup, params: SamplingParams, wishes: _Wishes) -> dict[str, Any]:
    """The part of the JSON record that says what was run; where seeds were derived, no seed but what they are from."""
    from truedraft.cli.report import circumstances_record

    if not wishes.derive_seeds:
        return circumstances_record(engine, setup, params)
    return circumstances_record(engine, setup, dataclasses.replace(params, seed=None)) | {"base_seed": params.seed}


def _answer(
    engine: Engine,
    setup: Setup,
    prompts: Sequence[Asked],
    circumstances: dict[str, Any],
    wishes: _Wishes,
    terminal: Terminal,
) -> int:
    from truedraft.cli.answering import answer_many, answer_one
    from truedraft.cli.report import answers_record, stats_line

    if len(prompts) == 1:
        answered = answer_one(engine, prompts[0], terminal, wishes.show_drafts)
    else:
        answered = answer_many(engine, prompts, terminal, wishes.show_drafts)
    _remarks(answered.answers, wishes, terminal)
    if answered.answers:
        terminal.note(stats_line(answered.answers, answered.elapsed_s, answered.params))
        note = engine.target.note
        if note is not None:
            terminal.note(note)
    if wishes.json:
        record = answers_record(answered.names, answered.answers, answered.params, answered.elapsed_s)
        terminal.json({"command": "generate", "status": answered.status} | record | circumstances)
    return answered.status


def _compare(
    engine: Engine,
    setup: Setup,
    prompts: Sequence[Asked],
    circumstances: dict[str, Any],
    wishes: _Wishes,
    terminal: Terminal,
) -> int:
    from truedraft.cli.compare import compare_many, compare_one, must_agree
    from truedraft.cli.measure import Comparison
    from truedraft.cli.report import comparison_record, print_comparison

    if len(prompts) == 1:
        measured = compare_one(engine, prompts[0], terminal, wishes.show_drafts)
    else:
        measured = compare_many(engine, prompts, terminal)
    comparison = None
    if measured.pairs:
        promised = all(must_agree(engine, params) for _, params in prompts)
        comparison = Comparison(measured.pairs, promised, engine.rule.lossless)
    _remarks([pair.speculative.answers[0] for pair in measured.pairs], wishes, terminal)
    status = measured.status(comparison)
    if status == INTERRUPTED:
        terminal.end_line()
        say(f"interrupted after {len(measured.pairs)} of {len(prompts)} prompts")
    if comparison is not None:
        print_comparison(comparison, engine, setup, measured.runs, terminal)
    if wishes.json:
        failed = {"status": status, "failed_prompts": len(measured.failures), "errors": measured.failures}
        record = {"error": measured.outcome} if comparison is None else comparison_record(comparison, measured.runs)
        terminal.json({"command": "generate"} | failed | record | circumstances)
    return status


def _remarks(answers: Sequence[Answer], wishes: _Wishes, terminal: Terminal) -> None:
    """What the marks mean, and what went wrong without ending the answer."""
    from truedraft.cli.painting import legend

    if wishes.show_drafts:
        terminal.err.print(legend(terminal.colour), style="dim", soft_wrap=True)
    for warning in dict.fromkeys(warning for answer in answers for warning in answer.warnings):
        warn(warning)
