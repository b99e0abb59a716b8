"""`truedraft certify engine` and `truedraft certify compare`: engines that are tested as black boxes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from truedraft.cli.certify import UNTYPED, CertifyReport, PromptOptions
from truedraft.cli.session import StackOptions
from truedraft.core.params import SamplingParams
from truedraft.errors import OptionError, errors_about
from truedraft.options import NEEDED, MachineOptions, flag, group, option

if TYPE_CHECKING:
    from truedraft.models.base import LanguageModel

_OURS = (
    "adapters",
    "drafter",
    "drafters_dir",
    "rule",
    "controller",
    "plan",
    "max_cache_bytes",
    "gpu_memory_utilization",
)
# The tests choose the lengths of answers, and request logprobs where the engine has them.
_UNASKED = (*UNTYPED, "max_tokens", "logprobs", "logprobs_mode")


@dataclass(frozen=True)
class ServerOptions:
    """How servers are reached."""

    served_model: str | None = option(None, "The model's name at the server.", "NAME", shown_default="its first")
    api_key_env: str | None = option(None, "The environment variable that holds the server's key.", "NAME")
    timeout: float = option(120.0, "Seconds that a server may take for one answer.", "S")


@dataclass(frozen=True)
class AskOptions(PromptOptions):
    """The requests to engines, and the time."""

    seed_per_request: bool = flag("Send each request a seed of its own, where the server takes seeds.")
    seed: int | None = option(None, "With --seed-per-request: the first seed.", "S", shown_default="0", least=0)
    tokens: int = option(8000, "Sampled tokens that are asked for.", "N", least=1)
    transcript: Path | None = option(
        None, "Keep questions and answers in this file, and go on from it after an interruption.", "FILE"
    )

    @property
    def first_seed(self) -> int | None:
        """The seed of the first request, by default 0, so that a rerun sends the same requests; None sends no seeds.

        Raises:
            OptionError: a seed was given, and none are sent.
        """
        if self.seed is not None and not self.seed_per_request:
            raise OptionError("is for --seed-per-request alone; give that, too", field="seed")
        return self.seed or 0 if self.seed_per_request else None


@dataclass(frozen=True)
class AskedOptions:
    """Options that `certify engine` and `certify compare` share."""

    stack: StackOptions = group(
        "Model", without=(*_OURS, "pad_to", "weights", "merge_adapter", "tensor_parallel"), model=NEEDED
    )
    server: ServerOptions = group("Server")
    ask: AskOptions = group("Run")
    sampling: SamplingParams = group("Answer", without=_UNASKED, temperature=1.0)
    report: CertifyReport = group("Report")


@dataclass(frozen=True)
class EngineOptions(AskedOptions):
    """Options of `truedraft certify engine`."""

    stack: StackOptions = group("Model", without=_OURS, model=NEEDED)
    machine: MachineOptions = group("Machine")
    endpoint: str | None = option(
        None,
        "A server with OpenAI's completions, or llama.cpp's own, that is said to run --model: its answers are scored "
        "under the model's own forward. docs/certify_engines.md says what is sent and tested.",
        "URL",
        name="URL",
    )
    process: str | None = option(
        None,
        "A Python function from token ids to new token ids, in place of a server; it is given those of max_tokens, "
        "temperature, top_p, top_k, min_p, seed and stop that it names.",
        "MODULE:FUNCTION",
    )
    draft_model: str | None = option(
        None,
        "The draft model that the engine uses, so that faults of judging its drafts are named.",
        "M",
        heading="Model",
    )
    allowance: float | None = option(
        None,
        "How far its log-probabilities may lie from the model's.",
        "X",
        heading="Model",
        shown_default="measured",
    )
    no_float32: bool = flag("Leave out float32, for a model that is too large to load again.", heading="Model")


@dataclass(frozen=True)
class CompareOptions(AskedOptions):
    """Options of `truedraft certify compare`."""

    endpoint: str = option(meaning="A server with OpenAI's completions, or llama.cpp's own.", metavar="URL", name="URL")
    against: str = option(meaning="A second server.", metavar="OTHER_URL", name="OTHER_URL")


def engine(options: EngineOptions) -> int:
    """Ask an engine for answers, and say whether they are those of the model that it is said to run.

    Exit status 0 if no deviation was found, 1 if it deviates, 3 if there was not enough evidence or something broke.
    """
    from truedraft.certify import Part
    from truedraft.certify.engines import certify_engine
    from truedraft.cli.engine_options import asking
    from truedraft.cli.session import set_threads, waiting

    _check_one(options)
    with asking("engine", options) as session:
        set_threads(options.machine.threads)
        if options.process is not None:
            session.add_function(options.process)
        else:
            session.add_servers(endpoint=options.endpoint)
        with session.going_on():
            with waiting(session.terminal.err, "loading the model"):
                target, rounded = _judges(options)
                drafts = _drafts(options)
            run = partial(certify_engine, rounded=rounded, drafts=drafts, allowance=options.allowance)
            report = session.report(run, [Part.GREEDY, Part.SAMPLED, Part.BEHAVIOUR], judge=[target])
        return session.told(report)


def compare(options: CompareOptions) -> int:
    """Ask two servers the same, and say whether they answer alike; no model's weights are needed.

    Exit status 0 if no deviation was found, 1 if they deviate, 3 if there was not enough evidence or something broke.
    """
    from truedraft.certify import Part
    from truedraft.certify.engines import compare_engines
    from truedraft.cli.engine_options import asking

    with asking("compare", options) as session:
        session.add_servers(endpoint=options.endpoint, against=options.against)
        with session.going_on():
            report = session.report(compare_engines, [Part.GREEDY, Part.AGAINST, Part.BEHAVIOUR])
        return session.told(report)


def _check_one(options: EngineOptions) -> None:
    """Refuse two engines, no engine, and server options without a server."""
    endpoint, process = options.endpoint, options.process
    if endpoint is not None and process is not None:
        raise OptionError("and URL name two things to certify; leave one of them out", field="process")
    if endpoint is None and process is None:
        raise OptionError("names what is certified, or --process MODULE:FUNCTION does; give one", field="endpoint")
    for each in fields(ServerOptions) if process is not None else ():
        if getattr(options.server, each.name) != each.default:
            raise OptionError("says nothing of a function that is asked from outside; leave it out", field=each.name)


def _judges(options: EngineOptions) -> tuple[LanguageModel, LanguageModel | None]:
    """The scoring model, in float32 if it is not too large, and the same in the engine's dtype, for rounding.

    "auto" is bfloat16 here, because the fastest dtype of this machine says nothing about the engine's.
    """
    from truedraft.cli.session import load_target

    with errors_about("model"):
        machine = options.machine
        if options.no_float32:
            return load_target(options.stack, machine), None
        coarse = replace(machine, dtype="bfloat16") if machine.dtype == "auto" else machine
        rounded = load_target(options.stack, coarse)
        return load_target(options.stack, replace(machine, dtype="float32")), rounded


def _drafts(options: EngineOptions) -> Mapping[str, LanguageModel]:
    """The engine's draft model, if it was named."""
    from truedraft.models.loading import load_model

    if options.draft_model is None:
        return {}
    with errors_about("draft_model"):
        return {"the draft model": load_model(options.draft_model, **options.machine.of_models)}
