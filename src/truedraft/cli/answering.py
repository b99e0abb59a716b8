"""`generate` without --compare: one answer as a stream, many as a batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from rich.rule import Rule as Line

from truedraft.cli.failures import DONE, FAILED, INTERRUPTED, say
from truedraft.cli.painting import writer, written
from truedraft.cli.streaming import stream_answer
from truedraft.core.sampling import SamplingParams

if TYPE_CHECKING:
    from truedraft.cli.prompts import NamedPrompt
    from truedraft.cli.terminal import Terminal
    from truedraft.engine import Answer, Engine

BATCH = 8
"""Prompts that are answered together."""


@dataclass(slots=True)
class Answered:
    """What came of the prompts.

    Attributes:
        names: of the prompts that were answered, or failed.
        answers: theirs.
        elapsed_s: from the first submission to the last answer.
        interrupted: whether Ctrl-C ended it.
    """

    names: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    elapsed_s: float = 0.0
    interrupted: bool = False

    @property
    def status(self) -> int:
        """The exit status."""
        if self.interrupted:
            return INTERRUPTED
        return FAILED if any(answer.finish_reason == "error" for answer in self.answers) else DONE


def answer_one(
    engine: Engine, prompt: NamedPrompt, params: SamplingParams, terminal: Terminal, show_drafts: bool
) -> Answered:
    """Write the answer as it comes.

    Raises:
        TruedraftError: the prompt cannot be answered.
    """
    answer = stream_answer(engine, prompt.prompt, params, writer(engine.target.tokenizer, terminal, show_drafts))
    terminal.end_line()
    return Answered([prompt.name], [answer], answer.timing.total_s, answer.finish_reason == "cancelled")


def answer_many(
    engine: Engine, prompts: Sequence[NamedPrompt], params: SamplingParams, terminal: Terminal, show_drafts: bool
) -> Answered:
    """Answer in batches; each batch is written when it is done, every answer below a line with its prompt's name."""
    answered = Answered()
    started = time.perf_counter()
    try:
        with terminal.progress("answering", len(prompts), beside_output=True) as progress:
            for first in range(0, len(prompts), BATCH):
                batch = prompts[first : first + BATCH]
                answers = engine.generate(cast("list[str]", [each.prompt for each in batch]), params)
                for prompt, answer in zip(batch, answers, strict=True):
                    answered.names.append(prompt.name)
                    answered.answers.append(answer)
                    _write(prompt.name, answer, engine, terminal, show_drafts)
                progress(first + len(batch), "")
    except KeyboardInterrupt:
        answered.interrupted = True
    answered.elapsed_s = time.perf_counter() - started
    for name, answer in zip(answered.names, answered.answers, strict=True):
        if answer.error is not None:
            say(f"error: prompt {name}: {answer.error}")
    return answered


def _write(name: str, answer: Answer, engine: Engine, terminal: Terminal, show_drafts: bool) -> None:
    terminal.end_line()
    terminal.out.print(Line(f"{name} ({answer.finish_reason})", align="left", style="dim"))
    terminal.write(written(answer, engine.target.tokenizer, terminal, show_drafts))
    terminal.end_line()
