"""From the command line's values to an engine."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from truedraft.cli.failures import warn
from truedraft.cli.prompts import NamedPrompt, PromptOptions, PromptRequest
from truedraft.cli.terminal import say
from truedraft.core.params import SamplingParams
from truedraft.drafters.specs import from_spec
from truedraft.engine.policy.specs import controller_from_spec, controller_help
from truedraft.errors import OptionError, PromptError, TruedraftError, errors_about
from truedraft.files import SMOLLM2, named_adapter, user_path
from truedraft.models import embedded
from truedraft.options import UNNAMED, MachineOptions, ModelOptions, flag, option, read_bytes
from truedraft.progress import STAGES
from truedraft.verification.specs import rule_from_spec

if TYPE_CHECKING:
    from rich.console import Console

    from truedraft.engine import Engine
    from truedraft.engine.policy.sizes import NodeBudget
    from truedraft.measure import Plan
    from truedraft.measure.bench import Failure, Group
    from truedraft.models.base import LanguageModel

DRAFTER_HELP = (
    "What guesses, as auto, none, prompt-lookup, draft:FOLDER or KIND:FOLDER; `truedraft drafters` lists all, with "
    "their options."
)
MEASURING = "measuring what steps take on this machine"
_MOST_THREADS = 64
_PATIENCE_S = 2.0


@dataclass(frozen=True)
class StackOptions(ModelOptions):
    """Target, drafter and rule."""

    tensor_parallel: int = option(
        1,
        "Processes of this machine that run the model together, each with a part of its weights; 1 is only this one.",
        "N",
        least=1,
    )
    merge_adapter: Path | None = option(None, "An adapter that peft wrote, merged into the model's weights.", "DIR")
    adapters: tuple[str, ...] = option(
        (), "A LoRA adapter under a name, for requests that name it; may be repeated.", "NAME=DIR"
    )
    drafter: str = option("auto", DRAFTER_HELP, "D")
    drafters_dir: tuple[Path, ...] = option(
        (), "A folder of trained drafters where auto, and kinds without a path, look, too; may be repeated.", "DIR"
    )
    rule: str = option(
        "speculative",
        "speculative and block keep the distribution of the target's answers exactly; block judges a drafted chain as "
        "a whole. Lossy ones, by name: speculative,lenience=L with L below 1, or typical,epsilon=.09,delta=.3.",
        "R",
    )
    controller: str = option(
        "goodput", f"What decides which drafter drafts how much; one of these.\n\n{controller_help()}", "C"
    )
    plan: Path | None = option(
        None, "Draft as this file of `truedraft plan --out` recommends, in place of --drafter.", "FILE"
    )
    max_cache_bytes: str | None = option(
        None,
        "Most memory for keys and values of target and drafters, as 300M or 1.5G; where it is short drafters give "
        "theirs back, and requests wait.",
        "SIZE",
        shown_default="no limit; serve: 3/4 of what is free",
    )
    gpu_memory_utilization: float = option(
        0.9, "On a GPU, without --max-cache-bytes: share of its memory that may be in use, weights included.", "SHARE"
    )


@dataclass(frozen=True)
class ReportOptions:
    """Output of a command."""

    json: bool = flag("End standard output with one line, a JSON object.")


@dataclass(frozen=True)
class RunOptions:
    """How prompts are measured."""

    limit: int | None = option(None, "Only so many prompts, evenly over the set.", "N", shown_default="all", least=1)
    batch: int = option(1, "Requests that are answered together.", "N", least=1)
    runs: int = option(1, "How often each way answers each prompt.", "N", least=1)
    refresh_costs: bool = flag("Measure cost curves again, also where kept ones would do.")


Named = TypeVar("Named", bound=ModelOptions)


def with_model(options: Named) -> Named:
    """The options with the model of `named_model`."""
    return replace(options, model=named_model(options.model))


def named_model(typed: str) -> str:
    """The named model; by default `smollm2` if it is installed, else the embedded target, with a line that names it."""
    if typed != UNNAMED:
        return typed
    if (missing := embedded.smollm2_missing()) is None:
        say(f"no --model is named: {SMOLLM2}, which is installed, is taken")
        return SMOLLM2
    say(f"no --model is named: embedded:target, a fixture of tests, is taken; for {SMOLLM2} run {missing}")
    return "embedded:target"


def sampling_of_each(prompts: Sequence[PromptRequest]) -> list[PromptRequest]:
    """Each prompt with the command's sampling options, overridden by its own."""
    return [(prompt, replace(params, **dict(prompt.options))) for prompt, params in prompts]


def derived_seed(base: int, number: int) -> int:
    """The seed of one of many prompts: the first 48 bits of the SHA-256 hash of "BASE/NUMBER", both in decimal."""
    return int.from_bytes(hashlib.sha256(f"{base}/{number}".encode()).digest()[:6], "big")


def check_rule(spec: str, params: SamplingParams, field: str = "seed") -> None:
    """Refuse guarantees that the rule cannot keep, before anything is loaded; `field` is the option with the seed.

    Raises OptionError if there is no such rule, or a seed is given with a lossy one.
    """
    rule = rule_from_spec(spec)
    if params.seeded:
        rule.check_seed(field)


def planned_drafter(plan: Path, drafters: Sequence[str], params: SamplingParams) -> str:
    """The specification of a plan's recommended drafter; warns if the sampling options differ from the plan's.

    Raises OptionError if a drafter was named as well, DataError if the file is not a plan.
    """
    if list(drafters) != ["auto"]:
        raise OptionError(
            f"names the drafter, and --drafter {drafters[0]} names one as well; leave one of them out", field="plan"
        )
    found = _read_plan(plan)
    names = ("temperature", "top_k", "top_p", "min_p")
    pairs = [(f"{name} {found.sampling.get(name)}", f"{name} {getattr(params, name)}") for name in names]
    with_seed = bool(found.sampling.get("temperature")) and found.sampling.get("seed") is not None
    pairs.append(("a seed" if with_seed else "no seed", "a seed" if params.seeded else "no seed"))
    for kept, here in pairs:
        if kept != here:
            warn(f"the plan was made with {kept}, and this has {here}; its recommendation may not be the best here")
    return found.recommended()


def plan_for(file: Path | None, target: LanguageModel) -> Plan | None:
    """The plan in a file, if there is one; CompositionError says for which other model, machine or version it is."""
    return None if file is None else _read_plan(file, target)


def _read_plan(file: Path, target: LanguageModel | None = None) -> Plan:
    from truedraft.measure import read_plan

    with errors_about("plan"):
        plan = read_plan(file)
        if target is not None:
            plan.check(target)
    return plan


def load_engine(
    stack: StackOptions,
    machine: MachineOptions,
    console: Console,
    params: SamplingParams | None = None,
    requests: int = 1,
    *,
    own_drafts: bool = False,
    cache_share: float | None = None,
    **more: Any,
) -> Engine:
    """Load the target and compose it with drafter, rule and controller.

    If the controller neither weighs costs nor tries all sizes, a drafter without a given number of nodes gets the best
    one for this machine, and the console shows it.

    `params` are of the requests to come, by default greedy. With `own_drafts` requests may have their own: predictions,
    and grammars of their answers. `cache_share` limits the KV cache on a CPU to a share of free memory if no bytes were
    given. Raises TruedraftError if something does not exist, cannot be loaded, or does not fit.
    """
    most = None if stack.max_cache_bytes is None else read_bytes("max_cache_bytes", stack.max_cache_bytes)
    with waiting(console, f"loading {stack.model}") as update:
        rule, controller = rule_from_spec(stack.rule), controller_from_spec(stack.controller)
        from truedraft.drafters.prediction import with_own_drafts
        from truedraft.engine import Engine
        from truedraft.engine.policy.sizes import sized

        with quiet_hub(), errors_about("model"):
            target = load_target(stack, machine)
            plan = plan_for(stack.plan, target)
            drafter = from_spec(stack.drafter, target, stack.drafters_dir, tell=warn)
        budgets: Mapping[str, NodeBudget] = {}
        if not (controller.weighs_costs or controller.takes_all_sizes):
            update(MEASURING)
            drafter, budgets = sized(drafter, target, params, requests=requests, least=1)
        if plan is not None:
            controller.expect(plan.survival)
        drafter = with_own_drafts(drafter) if own_drafts else drafter
        from truedraft.machine import free_memory

        on_gpu = target.device.type == "cuda"
        if most is None and cache_share and not on_gpu and (free := free_memory(target.device)) is not None:
            most = max(int(cache_share * free), 1)
        more |= {"max_cache_bytes": most, "gpu_memory_utilization": stack.gpu_memory_utilization}
        engine = Engine(target, drafter, rule, controller, **more)
    _print_sizes(engine, budgets, console)
    return engine


def load_target(stack: StackOptions, machine: MachineOptions) -> LanguageModel:
    """The target only, on the requested number of threads."""
    adapters: dict[str, Path] = {}
    for name, folder in map(named_adapter, stack.adapters):
        if name in adapters:
            raise OptionError(f"names {name!r} twice; give each adapter a name of its own", field="adapters")
        adapters[name] = folder
    set_threads(machine.threads)
    from truedraft.models.loading import load_model

    return load_model(
        stack.model,
        adapter=stack.merge_adapter,
        adapters=adapters,
        tensor_parallel=stack.tensor_parallel,
        **stack.of_target,
        **machine.of_models,
    )


def load_alone(model: ModelOptions, machine: MachineOptions, console: Console) -> LanguageModel:
    """The target of a command that has neither adapters nor parallel processes; TruedraftError as of `load_target`."""
    set_threads(machine.threads)
    with loading(console, model.model):
        from truedraft.models.loading import load_model

        return load_model(model.model, **model.of_target, **machine.of_models)


def _print_sizes(engine: Engine, budgets: Mapping[str, NodeBudget], console: Console) -> None:
    """Print the chosen sizes by member, and start the check of the costs that chose them."""
    if not budgets:
        return
    budget = next(iter(budgets.values()))
    if (check := budget.costs.check()) is not None:  # all sizes have the same costs
        engine.listeners.append(check)
    for warning in budget.costs.warnings:
        warn(warning)
    line = f"{engine.drafter.name}: {budget.describe()}"
    if len(engine.drafter.members) > 1:
        line = "sizes by the cost curve: " + ", ".join(f"{name} {each.sizes}" for name, each in budgets.items())
    console.print(line, style="dim", soft_wrap=True)


def set_threads(threads: int | None) -> None:
    """Set the number of torch's CPU threads; None keeps its choice, OptionError refuses more than can be started."""
    if threads is None:
        return
    most = max(_MOST_THREADS, 4 * (os.cpu_count() or 1))
    if threads > most:
        raise OptionError(
            f"must be at most {most} on this machine of {os.cpu_count()} cores, got {threads}", field="threads"
        )
    import torch

    torch.set_num_threads(threads)


def prepare_prompts(
    target: LanguageModel, prompts: Sequence[PromptRequest], options: PromptOptions
) -> list[PromptRequest]:
    """The prompts for the model: pictures by its processor; with `options.chat` each is a message in its chat template.

    Raises PromptError if the model has no template, a prompt of a chat is token ids, or the model accepts no such
    pictures, ModelError without a processor, MissingExtraError without Pillow.
    """
    if options.chat and target.tokenizer is None:
        raise PromptError(f"--chat needs a tokenizer with a chat template, and {target.name!r} has no tokenizer")
    return [(_prepared(target, prompt, options), params) for prompt, params in prompts]


def _prepared(target: LanguageModel, prompt: NamedPrompt, options: PromptOptions) -> NamedPrompt:
    if prompt.images:
        with errors_about("image"):
            return _with_pictures(target, prompt, options.chat)
    if not options.chat:
        return prompt
    if not isinstance(prompt.prompt, str) or target.tokenizer is None:
        raise PromptError(f"--chat needs text, and prompt {prompt.name} is a list of token ids")
    messages = [{"role": "user", "content": prompt.prompt}]
    ids = target.tokenizer.chat(messages, trust_control_tokens=options.trust_control_tokens)
    return replace(prompt, prompt=ids, message=prompt.prompt)


def _with_pictures(target: LanguageModel, prompt: NamedPrompt, chat: bool) -> NamedPrompt:
    from truedraft.models.multimodal import read_picture

    text, processor = prompt.prompt, target.processor
    if not all(prompt.images):
        raise PromptError("names no file; give its path")
    pictures = [read_picture(user_path(each), repr(each)) for each in prompt.images]
    if not chat:
        return replace(prompt, processed=processor.prompt(str(text), pictures))
    content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
    return replace(prompt, processed=processor.chat([{"role": "user", "content": content}], pictures))


def encoded(target: LanguageModel, prompts: Sequence[PromptRequest], batch: int) -> tuple[list[Group], list[Failure]]:
    """Prompts as token ids, so that all systems get the same, in groups; and those that the target refuses."""
    from truedraft.engine.prompts import encode_prompt
    from truedraft.measure.bench import Failure, grouped

    kept: list[tuple[str, list[int], SamplingParams]] = []
    failures: list[Failure] = []
    given: Counter[str] = Counter()
    for each, params in prompts:
        try:
            ids = encode_prompt(target, each.prompt)
        except TruedraftError as error:
            failures.append(Failure("", (each.name,), str(error)))
            continue
        given[each.name] += 1  # two prompts with one id are not two runs of one prompt
        kept.append((each.name if given[each.name] == 1 else f"{each.name} ({given[each.name]})", ids, params))
    return grouped(kept, batch), failures


@contextlib.contextmanager
def waiting(console: Console, message: str) -> Iterator[Callable[[str], None]]:
    """Show a message on a terminal during the block; yields a function that changes it.

    Stages that are reported inside the block (see `log_stage`) replace the message. Without a terminal, each message
    is printed as a line once it has lasted some seconds.
    """
    with contextlib.ExitStack() as opened:
        show: Callable[[str], None]
        if console.is_terminal:
            show = opened.enter_context(console.status(message)).update
        else:
            timers: list[threading.Timer] = []
            opened.callback(lambda: timers[-1].cancel())

            def show(message: str) -> None:
                if timers and list(timers[-1].args) == [message]:  # a stage of the same name
                    return
                for each in timers[-1:]:
                    each.cancel()
                timers.append(threading.Timer(_PATIENCE_S, say, (message,)))
                timers[-1].daemon = True
                timers[-1].start()

            show(message)
        handler = logging.Handler()
        handler.emit = lambda record: show(record.getMessage())  # type: ignore[method-assign]
        STAGES.addHandler(handler)
        opened.callback(STAGES.removeHandler, handler)
        opened.callback(STAGES.setLevel, STAGES.level)
        STAGES.setLevel(logging.INFO)
        yield show


@contextlib.contextmanager
def loading(console: Console, model: str) -> Iterator[Callable[[str], None]]:
    """`waiting` for a model; errors in the block are about the option that names it."""
    with waiting(console, f"loading {model}") as show, quiet_hub(), errors_about("model"):
        yield show


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """Suppress the hub's warnings about single attempts; an error reports the result."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
