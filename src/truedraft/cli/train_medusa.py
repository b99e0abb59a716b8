"""`truedraft train medusa`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from truedraft.cli import options as opt
from truedraft.cli.failures import DONE, INTERRUPTED, say
from truedraft.cli.train_job import Job, check_folder
from truedraft.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from truedraft.cli.terminal import Terminal
    from truedraft.training.medusa_config import MedusaTrainingConfig

_WORK = "work"
_HEADS_FILE = "heads.safetensors"
_STAGE_1 = "stage-1"  # the folder of the heads before stage 2, inside that of stage 2
_WHAT, _TEXT, _HEADS, _RUN, _SECOND = "What to train, on what", "Text by the target", "Heads", "Training", "Stage 2"

# Fields of the library's configuration, as they are typed here.
_TYPED = {
    "answer_tokens": "--answer-tokens",
    "temperatures": "--temperature",
    "prompts_sha256": "the prompts (--data, --held-out, --tokens, --prompt-tokens)",
    "text_sha256": "the text that the target wrote",
    "data_sha256": "the text that the target wrote",
    "start_from": "the heads in --start-from",
    "target": "the fingerprint of --model",
    "schedule.warmup_steps": "the warm-up of --steps",
    "schedule.stable_steps": "the steps (--steps, --epochs) before the decay",
    "schedule.decay_steps": "the steps (--steps, --epochs) of the decay",
    "joint.backbone.matrix_rate": "--backbone-rate",
    "joint.backbone.vector_rate": "--backbone-rate",
    "joint.lora_rank": "--lora-rank",
    "optimizer.matrix_rate": "--learning-rate",
    "optimizer.vector_rate": "--learning-rate",
    "law_share": "--law-share",
    "heads": "--heads",
    "layers": "--layers",
    "tied": "--tied",
    "reads_token": "--reads-token",
    "seed": "--seed",
}

# Fields as messages on unusable values begin with them.
_NAMED = {
    "joint.steps": "--joint-steps",
    "joint.lora_rank": "--lora-rank",
    **{
        name: f"--{name.replace('_', '-')}"
        for name in (
            "heads", "layers", "stage", "tokens", "prompt_tokens", "answer_tokens", "temperature", "epochs", "steps",
            "law_share", "seed",
        )
    },
}  # fmt: skip

_Files = list[Path] | None
_Model = Annotated[
    str, opt.option("--model", "The target: embedded:target, a folder, or a Hugging Face name.", _WHAT, "M")
]
_Data = Annotated[
    _Files,
    opt.option(
        "--data",
        'Text, or .jsonl with "text", that prompts are cut from; may be repeated. Without it, for embedded:target, the '
        "standard library of this Python.",
        _WHAT,
        "FILE",
    ),
]
_HeldOut = Annotated[
    _Files,
    opt.option("--held-out", "Text to choose trees and measure on; without it, the end of the data.", _WHAT, "FILE"),
]
_Out = Annotated[Path, opt.option("--out", "The folder to write.", _WHAT, "DIR")]
_Resume = Annotated[bool, opt.flag("--resume", "Go on where the training in --out stopped.", _WHAT)]
_Stage = Annotated[int, opt.option("--stage", "1: heads of a frozen target. 2: the target learns too.", _WHAT, "1|2")]
_Tokens = Annotated[int, opt.option("--tokens", "Tokens that the target writes to train on, about.", _TEXT, "N")]
_PromptTokens = Annotated[int, opt.option("--prompt-tokens", "Tokens of a prompt.", _TEXT, "N")]
_AnswerTokens = Annotated[int, opt.option("--answer-tokens", "The most tokens of an answer.", _TEXT, "N")]
_Temperature = Annotated[
    list[float] | None,
    opt.option(
        "--temperature",
        "Of the answers; may be repeated, then they are taken in turn.",
        _TEXT,
        "T",
        show_default="0 and 1 in turn",
    ),
]
_Heads = Annotated[int, opt.option("--heads", "How many tokens after the next are guessed.", _HEADS, "N")]
_Layers = Annotated[int, opt.option("--layers", "Residual blocks of a head.", _HEADS, "N")]
_Tied = Annotated[
    bool, opt.flag("--tied/--free", "Heads end in the target's LM head, or each in an output of its own.", _HEADS)
]
_ReadsToken = Annotated[
    bool,
    opt.flag(
        "--reads-token/--vector-only",
        "Heads also read the token that was drawn from their vector, or the vector alone, as Medusa's own.",
        _HEADS,
    ),
]
_StartFrom = Annotated[
    Path | None, opt.option("--start-from", "Heads to train further; in stage 2 they are warm already.", _HEADS, "DIR")
]
_Epochs = Annotated[float, opt.option("--epochs", "Passes over what the target wrote.", _RUN, "X")]
_Steps = Annotated[int | None, opt.option("--steps", "Updates of the heads, in place of --epochs.", _RUN, "N")]
_Rate = Annotated[float, opt.option("--learning-rate", "The highest rate of the heads.", _RUN, "RATE")]
_LawShare = Annotated[
    float,
    opt.option("--law-share", "1 learns the target's laws, 0 its tokens alone, in between a mixture.", _RUN, "X"),
]
_Seed = Annotated[int, opt.option("--seed", "Decides the text and the order of it.", _RUN, "S")]
_JointSteps = Annotated[int, opt.option("--joint-steps", "Updates of heads and target together.", _SECOND, "N")]
_BackboneRate = Annotated[float, opt.option("--backbone-rate", "The highest rate of the target.", _SECOND, "RATE")]
_LoraRank = Annotated[
    int | None,
    opt.option(
        "--lora-rank",
        "Rank of the target's adapters, which are merged when it is saved; 0 trains all weights.",
        _SECOND,
        "R",
        show_default="0 for small targets, else 32",
    ),
]


def medusa(
    *,
    model: _Model = "embedded:target",
    data: _Data = None,
    held_out: _HeldOut = None,
    out: _Out,
    resume: _Resume = False,
    stage: _Stage = 1,
    tokens: _Tokens = 400_000,
    prompt_tokens: _PromptTokens = 64,
    answer_tokens: _AnswerTokens = 192,
    temperature: _Temperature = None,
    heads: _Heads = 4,
    layers: _Layers = 1,
    tied: _Tied = True,
    reads_token: _ReadsToken = True,
    start_from: _StartFrom = None,
    epochs: _Epochs = 2.5,
    steps: _Steps = None,
    learning_rate: _Rate = 0.01,
    law_share: _LawShare = 1.0,
    seed: _Seed = 0,
    joint_steps: _JointSteps = 300,
    backbone_rate: _BackboneRate = 5e-4,
    lora_rank: _LoraRank = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    json: opt.Json = False,
) -> int:
    """Train heads that guess the tokens after the next, on what the target itself writes; measures what they bring."""
    from truedraft.cli.session import set_threads

    check_folder(out, resume, out / _WORK)
    _check_stage(out, resume, stage)
    numbers: dict[str, Any] = {
        "heads": heads,
        "layers": layers,
        "tied": tied,
        "reads_token": reads_token,
        "stage": stage,
        "tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "law_share": law_share,
        "epochs": epochs,
        "steps": steps,
        "start_from": start_from,
        "seed": seed,
    }
    temperatures = tuple(temperature) if temperature else (0.0, 1.0)
    second = {"steps": joint_steps, "lora_rank": lora_rank}
    set_threads(threads)
    try:
        config = _config(numbers, answer_tokens, temperatures, (learning_rate, backbone_rate), second, device)
    except OptionError as error:
        raise OptionError(_of_option(str(error))) from error
    return _train(Job(model, list(data or ()), list(held_out or ()), out, resume), config, json)


def _check_stage(out: Path, resume: bool, stage: int) -> None:
    """Refuse to go on in the folder of the other stage."""
    second = (out / _STAGE_1).is_dir()
    if resume and stage == 1 and second:
        raise OptionError(f"--out {str(out)!r} holds a training of stage 2; go on with --stage 2, or name a new folder")
    if resume and stage == 2 and not second and (out / _HEADS_FILE).is_file():
        raise OptionError(
            f"--out {str(out)!r} holds finished heads of stage 1, which stage 2 would overwrite; name a new folder, "
            f"and these heads with --start-from {out}"
        )


def _config(
    numbers: dict[str, Any],
    answer_tokens: int,
    temperatures: tuple[float, ...],
    rates: tuple[float, float],
    second: dict[str, Any],
    device: str,
) -> MedusaTrainingConfig:
    from truedraft.models.dtypes import pick_device
    from truedraft.training.medusa_config import JointConfig, MedusaTrainingConfig
    from truedraft.training.optimizer import OptimizerConfig
    from truedraft.training.self_writing import SelfTextConfig

    for name, rate in zip(("learning-rate", "backbone-rate"), rates, strict=True):
        if not 0.0 < rate < float("inf"):
            raise OptionError(f"--{name} must be a number above 0, got {rate}")
    return MedusaTrainingConfig(
        **numbers,
        writing=SelfTextConfig(answer_tokens, temperatures, seed=max(0, numbers["seed"])),
        optimizer=OptimizerConfig(rates[0], rates[0]),
        joint=JointConfig(backbone=OptimizerConfig(rates[1], rates[1], matrix_weight_decay=0.0), **second),
        device=str(pick_device(device)),
    )


def _of_option(message: str) -> str:
    """A message that begins with a field's name, with the option in its place."""
    name, _, rest = message.partition(" ")
    return f"{_NAMED[name]} {rest}" if name in _NAMED else message


def _train(job: Job, config: MedusaTrainingConfig, json: bool) -> int:
    from truedraft.cli.medusa_report import print_result, record_of
    from truedraft.cli.session import quiet_hub
    from truedraft.cli.terminal import Terminal
    from truedraft.training.medusa import train_medusa

    terminal = Terminal()
    try:
        with quiet_hub(), _Bars(terminal) as bars:
            result = train_medusa(job.model, job.data, job.out, config, held_out=job.held_out, on_progress=bars.show)
    except OptionError as error:
        raise OptionError(_as_typed(str(error))) from error
    except KeyboardInterrupt:
        terminal.end_line()
        say(_how_to_go_on(job))
        return INTERRUPTED
    print_result(terminal, job.model, result)
    if json:
        terminal.json(record_of(job.model, result))
    return DONE


class _Bars:
    """One bar after another: each kind of work has its own."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._stack = contextlib.ExitStack()
        self._what: str | None = None
        self._update: Callable[[int, str], None] = lambda done, remark: None

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def show(self, what: str, done: int, total: int, remark: str) -> None:
        """How far a kind of work has come."""
        if what != self._what:
            self._stack.close()
            self._update = self._stack.enter_context(self._terminal.progress(what, total))
            self._what = what
        self._update(done, remark)


def _as_typed(message: str) -> str:
    """Name options as they are typed, where the library names fields of its configuration."""
    for field, typed in _TYPED.items():
        for before in ("(", "; "):
            message = message.replace(f"{before}{field} was ", f"{before}{typed} was ")
    return message


def _how_to_go_on(job: Job) -> str:
    if not (job.out / _WORK).is_dir():
        return "interrupted before anything was written; the same command begins again"
    how = "the same command" if job.resume else "the same command with --resume"
    return f"interrupted; {how} goes on, with the answers that are written and from the last checkpoint"
