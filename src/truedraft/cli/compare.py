"""`generate --compare`: speculation against plain decoding, on this machine, with these prompts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from truedraft.cli.differences import find_difference
from truedraft.cli.failures import DONE, FAILED, INTERRUPTED, describe, say
from truedraft.cli.measure import Comparison, Pair, measure, warm_up
from truedraft.cli.painting import writer
from truedraft.cli.streaming import stream_answer
from truedraft.core.sampling import SamplingParams
from truedraft.errors import TruedraftError

if TYPE_CHECKING:
    from truedraft.cli.prompts import Asked, NamedPrompt
    from truedraft.cli.terminal import Terminal
    from truedraft.engine import Engine

_RUNS_OF_ONE_PROMPT = 3
_ECHOED_CHARACTERS = 400


@dataclass(slots=True)
class Measured:
    """What a comparison brought.

    Attributes:
        pairs: prompts that were decoded both ways.
        runs: how often each way.
        prompts: how many there were.
        failures: for each prompt that could not be answered, which and why.
        interrupted: whether Ctrl-C ended it.
    """

    prompts: int
    runs: int
    pairs: list[Pair] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    interrupted: bool = False

    def status(self, comparison: Comparison | None) -> int:
        """The exit status."""
        if self.interrupted:
            return INTERRUPTED
        parted = any(pair.difference is not None for pair in self.pairs)
        sound = comparison is not None and comparison.identical is not False and not parted and not self.failures
        return DONE if sound else FAILED

    @property
    def outcome(self) -> str:
        """Why there is nothing to compare, in a sentence."""
        return "interrupted" if self.interrupted else "no prompt could be answered"


def compare_one(engine: Engine, asked: Asked, terminal: Terminal, show_drafts: bool) -> Measured:
    """Stream the speculative answer, then measure both ways in turns, several runs each.

    Raises:
        TruedraftError: the prompt cannot be answered.
    """
    prompt, params = asked
    measured = Measured(prompts=1, runs=_RUNS_OF_ONE_PROMPT)
    _echo(prompt, terminal)
    try:
        answer = stream_answer(engine, prompt.prompt, params, writer(engine.target.tokenizer, terminal, show_drafts))
    finally:
        terminal.end_line()
    measured.interrupted = answer.finish_reason == "cancelled"
    if measured.interrupted:
        return measured
    plain = _plain(engine)
    try:
        warm_up((plain,), prompt.prompt, params)
        measured.pairs.append(_measure(plain, engine, prompt, params, [run % 2 == 0 for run in range(measured.runs)]))
    except KeyboardInterrupt:
        measured.interrupted = True
    return measured


def compare_many(engine: Engine, prompts: Sequence[Asked], terminal: Terminal) -> Measured:
    """Decode each prompt once each way; the two ways take turns in going first. A prompt that fails is left out."""
    measured = Measured(prompts=len(prompts), runs=1)
    plain = _plain(engine)
    try:
        with terminal.progress("plain and speculative", len(prompts)) as progress:
            with contextlib.suppress(TruedraftError):  # it is told below
                warm_up((plain, engine), prompts[0][0].prompt, prompts[0][1])
            for number, (prompt, params) in enumerate(prompts):
                try:
                    measured.pairs.append(_measure(plain, engine, prompt, params, [number % 2 == 0]))
                except TruedraftError as error:
                    measured.failures.append(f"prompt {prompt.name}: {describe(error)}")
                progress(number + 1, f"{measured.pairs[-1].speedup:.2f}x" if measured.pairs else "")
    except KeyboardInterrupt:
        measured.interrupted = True
    for failure in measured.failures:
        say(f"error: {failure}")
    return measured


def _plain(engine: Engine) -> Engine:
    """Plain decoding is the same engine without a drafter."""
    from truedraft.engine import Engine

    return Engine(engine.target)


def _measure(
    plain: Engine, engine: Engine, prompt: NamedPrompt, params: SamplingParams, orders: Sequence[bool]
) -> Pair:
    pair = Pair(prompt.name, *measure(plain, engine, prompt.prompt, params, orders), params=params)
    if pair.same_tokens or not must_agree(engine, params):
        return pair
    first = pair.plain.token_ids
    runs = (*pair.speculative.answers, *pair.plain.answers)
    other = next((run.token_ids for run in runs if run.token_ids != first), first)
    return dataclasses.replace(pair, difference=find_difference(engine.target, prompt.prompt, first, other))


def must_agree(engine: Engine, params: SamplingParams) -> bool:
    """Whether plain and speculative tokens are promised to be the same."""
    return engine.rule.lossless and (params.greedy or params.coupled)


def _echo(prompt: NamedPrompt, terminal: Terminal) -> None:
    """Show what is being continued, its end if it is long."""
    text = prompt.prompt if isinstance(prompt.prompt, str) else f"{len(prompt.prompt)} token ids: "
    shown = text if len(text) <= _ECHOED_CHARACTERS else "…" + text[-_ECHOED_CHARACTERS:]
    terminal.dim(shown)
