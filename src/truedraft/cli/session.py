"""From the words of the command line to an engine that can answer."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from truedraft.cli.failures import warn
from truedraft.cli.prompts import NamedPrompt
from truedraft.core.sampling import SamplingParams
from truedraft.errors import OptionError, PromptError

if TYPE_CHECKING:
    from rich.console import Console

    from truedraft.engine import Engine
    from truedraft.models.base import LanguageModel

Prompt = str | list[int]
_MOST_THREADS = 64


@dataclass(frozen=True, slots=True)
class Setup:
    """What answers, as it was typed."""

    model: str
    drafter: str
    rule: str
    dtype: str
    device: str
    threads: int | None
    pad_to: str | None = None
    fast_paths: bool = True


def sampling(**options: Any) -> SamplingParams:
    """Sampling options from the command line, with a seed drawn where none was given, so that it can be reported.

    Raises:
        OptionError: an unusable value; names the option as it is typed.
    """
    if options.get("seed") is None:
        options["seed"] = secrets.randbits(31)
    try:
        return SamplingParams(**options)
    except OptionError as error:
        raise OptionError(_as_typed(str(error))) from error


def sampling_of_each(
    params: SamplingParams, prompts: Sequence[NamedPrompt], *, derive_seeds: bool
) -> list[SamplingParams]:
    """The options of each prompt: the command's, and before them those of its own line.

    Args:
        params: the command's.
        prompts: at least one.
        derive_seeds: give each prompt a seed of its own, made from the command's; equal prompts then get unlike
            answers.
    """
    seeds = [derived_seed(params.seed or 0, number) if derive_seeds else params.seed for number in range(len(prompts))]
    return [replace(params, **{"seed": seed} | dict(each.options)) for each, seed in zip(prompts, seeds, strict=True)]


def derived_seed(base: int, number: int) -> int:
    """The seed of one of many prompts: the first 48 bits of the SHA-256 hash of "BASE/NUMBER", both in decimal."""
    return int.from_bytes(hashlib.sha256(f"{base}/{number}".encode()).digest()[:6], "big")


def _as_typed(message: str) -> str:
    name, _, rest = message.partition(" ")
    known = {field.name for field in fields(SamplingParams)}
    return f"--{name.replace('_', '-')} {rest}" if name in known else message


def load_engine(setup: Setup, console: Console, params: SamplingParams | None = None, requests: int = 1) -> Engine:
    """Load the target and compose it with drafter and rule.

    A drafter with a counted tree whose number of nodes was left open gets as many as pay on this machine, and a line
    on the console says so.

    Args:
        setup: what was typed.
        console: shows what is being waited for.
        params: of the requests to come; None is greedy.
        requests: that will be answered together.

    Raises:
        TruedraftError: something does not exist, cannot be loaded, or does not fit.
    """
    from truedraft.verification.specs import rule_from_spec

    with waiting(console, f"loading {setup.model}") as tell:
        rule = rule_from_spec(setup.rule)
        set_threads(setup.threads)
        from truedraft.drafters.specs import from_spec
        from truedraft.engine import Engine
        from truedraft.models.loading import load_model
        from truedraft.planning import sized

        with quiet_hub():
            target = load_model(
                setup.model, dtype=setup.dtype, device=setup.device, pad_to=setup.pad_to, fast_paths=setup.fast_paths
            )
            drafter = from_spec(setup.drafter, target)
        tell("measuring how many drafted nodes pay on this machine")
        drafter, budget = sized(drafter, target, params, requests=requests)
        engine = Engine(target, drafter, rule)
    if budget is not None:
        if (check := budget.costs.check()) is not None:
            engine.listeners.append(check)
        for warning in budget.costs.warnings:
            warn(warning)
        console.print(f"{drafter.name}: {budget.describe()}", style="dim", soft_wrap=True)
    return engine


def set_threads(threads: int | None) -> None:
    """Let torch compute with so many CPU threads; None leaves its choice.

    Raises:
        OptionError: fewer than one, or so many that the system could not start them.
    """
    if threads is None:
        return
    most = max(_MOST_THREADS, 4 * (os.cpu_count() or 1))
    if not 1 <= threads <= most:
        raise OptionError(f"--threads must be 1 or more, got {threads}" if threads < 1 else _too_many(threads, most))
    import torch

    torch.set_num_threads(threads)


def _too_many(threads: int, most: int) -> str:
    return f"--threads must be at most {most} on this machine of {os.cpu_count()} cores, got {threads}"


def as_chat(target: LanguageModel, prompts: Sequence[NamedPrompt]) -> list[NamedPrompt]:
    """Each prompt as the one message of a user, by the model's chat template.

    Raises:
        PromptError: the model has no tokenizer or no template, or a prompt is token ids.
    """
    if target.tokenizer is None:
        raise PromptError(f"--chat needs a tokenizer with a chat template, and {target.name!r} has no tokenizer")
    chats: list[NamedPrompt] = []
    for each in prompts:
        if not isinstance(each.prompt, str):
            raise PromptError(f"--chat needs text, and prompt {each.name} is a list of token ids")
        ids = target.tokenizer.chat([{"role": "user", "content": each.prompt}])
        chats.append(replace(each, prompt=ids))
    return chats


@contextlib.contextmanager
def waiting(console: Console, message: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is being waited for; gives a function that changes the message."""
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(message) as status:
        yield status.update


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """Keep the hub's remarks on each of its attempts off standard error; what came of them is told by an error."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
