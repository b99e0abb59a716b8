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
from truedraft.cli.visible import visible
from truedraft.core.sampling import SamplingParams

if TYPE_CHECKING:
    from truedraft.cli.prompts import Asked
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
        params: theirs.
        elapsed_s: from the first submission to the last answer.
        interrupted: whether Ctrl-C ended it.
    """

    names: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    elapsed_s: float = 0.0
    interrupted: bool = False

    @property
    def status(self) -> int:
        """The exit status."""
        if self.interrupted:
            return INTERRUPTED
        return FAILED if any(answer.finish_reason == "error" for answer in self.answers) else DONE


def answer_one(engine: Engine, asked: Asked, terminal: Terminal, show_drafts: bool) -> Answered:
    """Write the answer as it comes.

    Raises:
        TruedraftError: the prompt cannot be answered.
    """
    prompt, params = asked
    try:
        answer = stream_answer(engine, prompt.prompt, params, writer(engine.target.tokenizer, terminal, show_drafts))
    finally:
        terminal.end_line()
    return Answered([prompt.name], [answer], [params], answer.timing.total_s, answer.finish_reason == "cancelled")


def answer_many(engine: Engine, prompts: Sequence[Asked], terminal: Terminal, show_drafts: bool) -> Answered:
    """Answer in batches; each batch is written when it is done, every answer below a line with its prompt's name."""
    answered = Answered()
    started = time.perf_counter()
    try:
        with terminal.progress("answering", len(prompts), beside_output=True) as progress:
            for first in range(0, len(prompts), BATCH):
                batch = prompts[first : first + BATCH]
                texts = cast("list[str]", [prompt.prompt for prompt, _ in batch])
                answers = engine.generate(texts, [params for _, params in batch])
                for (prompt, params), answer in zip(batch, answers, strict=True):
                    answered.names.append(prompt.name)
                    answered.answers.append(answer)
                    answered.params.append(params)
                    seed = "" if params.greedy else f", seed {params.seed}"
                    heading = f"{prompt.name} ({answer.finish_reason}{seed})"
                    _write(heading, answer, engine, terminal, show_drafts)
                progress(first + len(batch), "")
    except KeyboardInterrupt:
        answered.interrupted = True
    answered.elapsed_s = time.perf_counter() - started
    for name, answer in zip(answered.names, answered.answers, strict=True):
        if answer.error is not None:
            say(f"error: prompt {name}: {answer.error}")
    return answered


def _write(heading: str, answer: Answer, engine: Engine, terminal: Terminal, show_drafts: bool) -> None:
    terminal.end_line()
    terminal.out.print(Line(visible(heading), align="left", style="dim"))
    terminal.write(written(answer, engine.target.tokenizer, terminal, show_drafts))
    terminal.end_line()
