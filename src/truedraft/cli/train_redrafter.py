"""`truedraft train redrafter`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from truedraft.cli import head_options as heads_opt
from truedraft.cli import options as opt
from truedraft.cli import train_job as job_opt
from truedraft.cli.train_heads import naming_options, run
from truedraft.cli.train_job import WORK, Job, check_folder, clean_folder, time_budget

if TYPE_CHECKING:
    from truedraft.training.redrafter import RedrafterTrainingConfig

_OWN = {
    "length": "--length",
    "state": "--state",
    "exit_width": "--exit-width",
    "rnn": "--recurrent",
    "loss": "--loss",
    "laws": "--laws",
    "self_fed": "--self-fed",
}
_TYPED = heads_opt.TYPED | _OWN
_NAMED = heads_opt.NAMED | _OWN

_Length = Annotated[
    int, opt.option("--length", "How many tokens after the next are guessed in training.", heads_opt.HEADS, "T")
]
_State = Annotated[
    int | None,
    opt.option("--state", "Entries of the recurrent state.", heads_opt.HEADS, "N", show_default="the target's width"),
]
_ExitWidth = Annotated[
    int | None,
    opt.option(
        "--exit-width",
        "Entries of what enters the blocks and the output; others than the target's width only with --free.",
        heads_opt.HEADS,
        "N",
        show_default="the target's width",
    ),
]
_Tied = Annotated[
    bool,
    opt.flag("--tied/--free", "The head ends in the target's LM head, or in an output of its own.", heads_opt.HEADS),
]
_Recurrent = Annotated[
    bool,
    opt.flag(
        "--recurrent/--summed", "The state is recurrent, or the plain sum of the embeddings so far.", heads_opt.HEADS
    ),
]
_StartFrom = Annotated[Path | None, opt.option("--start-from", "A head to train further.", heads_opt.HEADS, "DIR")]
_Loss = Annotated[
    str,
    opt.option(
        "--loss",
        "kl, reverse-kl, tv or jsd learn the target's laws, ce its tokens alone; or a mixture: kl=0.5,tv=0.5.",
        heads_opt.RUN,
        "LOSS",
    ),
]
_Laws = Annotated[
    str,
    opt.option(
        "--laws",
        "computed: whole, by the LM head at each step. stored: once, as the 64 likeliest tokens and the mass of the "
        "rest, for large vocabularies.",
        heads_opt.RUN,
        "KIND",
    ),
]
_SelfFed = Annotated[
    float,
    opt.option(
        "--self-fed",
        "At this share of the positions the head reads its own guesses; 0 reads the text's tokens alone.",
        heads_opt.RUN,
        "SHARE",
    ),
]


def redrafter(
    *,
    model: heads_opt.Model = "embedded:target",
    data: heads_opt.Data = None,
    held_out: heads_opt.HeldOut = None,
    out: heads_opt.Out,
    resume: heads_opt.Resume = False,
    clean: job_opt.Clean = False,
    tokens: heads_opt.Tokens = 400_000,
    prompt_tokens: heads_opt.PromptTokens = 64,
    answer_tokens: heads_opt.AnswerTokens = 192,
    temperature: heads_opt.Temperature = None,
    length: _Length = 5,
    state: _State = None,
    layers: heads_opt.Layers = 2,
    tied: _Tied = True,
    exit_width: _ExitWidth = None,
    recurrent: _Recurrent = True,
    start_from: _StartFrom = None,
    epochs: heads_opt.Epochs = 2.5,
    steps: heads_opt.Steps = None,
    learning_rate: heads_opt.Rate = 0.01,
    loss: _Loss = "kl",
    laws: _Laws = "computed",
    self_fed: _SelfFed = 0.0,
    place_decay: heads_opt.PlaceDecay = 0.8,
    seed: heads_opt.Seed = 0,
    minutes: job_opt.Minutes = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    json: opt.Json = False,
) -> int:
    """Train a recurrent head (ReDrafter) on what the target itself writes; measures what it brings.

    The target stays as it is: training it together with its heads is `truedraft train medusa --stage 2` alone.
    """
    from truedraft.cli.session import set_threads

    if clean:
        return clean_folder(out, json)
    budget = time_budget(minutes)
    check_folder(out, resume, out / WORK)
    plain = {
        "length": length, "state": state, "layers": layers, "tied": tied, "exit_width": exit_width, "rnn": recurrent,
        "tokens": tokens, "prompt_tokens": prompt_tokens, "loss": loss, "laws": laws, "self_fed": self_fed,
        "place_decay": place_decay, "epochs": epochs, "steps": steps, "start_from": start_from, "seed": seed,
    }  # fmt: skip
    set_threads(threads)
    common = heads_opt.Common(plain, answer_tokens, temperature, learning_rate, device)
    with naming_options(_NAMED):
        config = _config(common)
    return _train(Job(model, list(data or ()), list(held_out or ()), out, resume, budget), config, json)


def _config(common: heads_opt.Common) -> RedrafterTrainingConfig:
    from truedraft.training.redrafter import RedrafterTrainingConfig

    return RedrafterTrainingConfig(**common.fields())


def _train(job: Job, config: RedrafterTrainingConfig, json: bool) -> int:
    from truedraft.cli.redrafter_report import print_result, record_of
    from truedraft.training.heads import train_heads

    return run(job, config, train_heads, print_result, record_of, _TYPED, json)
