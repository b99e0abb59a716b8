"""`truedraft train draft`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from truedraft.cli import options as opt
from truedraft.cli import train_job as job_opt
from truedraft.cli.failures import DONE, INTERRUPTED, say
from truedraft.cli.train_job import (
    WORK,
    Job,
    check_folder,
    checkpoint_lines,
    clean_folder,
    notes,
    saved_words,
    time_budget,
)
from truedraft.errors import DataError, OptionError

if TYPE_CHECKING:
    from truedraft.cli.terminal import Terminal
    from truedraft.training.drafts import DraftConfig, DraftResult
    from truedraft.training.loop import StepRecord

_CHECKPOINT = Path(WORK) / "checkpoint.pt"
_LOG = Path(WORK) / "log.jsonl"
_LENGTH, _DECAY_LENGTH = 512, 2048
_DECAY_SHARE = 0.2
_WARMUP_STEPS = 20
_WHAT, _SIZE, _RUN = "What to train, on what", "Size of the draft", "Training"

# Fields of the library's configuration, as they are typed here.
_TYPED = {
    "schedule.warmup_steps": "the warm-up of --steps",
    "schedule.stable_steps": "--steps before the decay",
    "schedule.decay_steps": "--steps of the decay",
    "optimizer.matrix_rate": "--learning-rate",
    "optimizer.vector_rate": "--learning-rate",
    "curriculum.stable_length": "--length",
    "curriculum.decay_length": "--decay-length",
    "curriculum.tokens_per_step": "--tokens-per-step",
    "curriculum.tokens_per_pass": "--tokens-per-step",
    "data_sha256": "the hash of --data",
    "start_from": "the draft in --start-from",
    "target": "the fingerprint of --model",
    **{
        name: f"--{name.replace('_', '-')}" for name in ("layers", "width", "heads", "kv_heads", "intermediate", "seed")
    },
}

_Files = list[Path] | None
_Data = Annotated[
    _Files, opt.option("--data", 'Text, or .jsonl with "text", to train on; may be repeated. Needed.', _WHAT, "FILE")
]
_HeldOut = Annotated[
    _Files, opt.option("--held-out", "Text to measure on; without it, the last 5 % of the data.", _WHAT, "FILE")
]
_Length = Annotated[int | None, opt.option("--length", "Tokens of a sequence.", _RUN, "N", show_default="512 or less")]
_DecayLength = Annotated[
    int | None, opt.option("--decay-length", "The same while the rate decays.", _RUN, "N", show_default="2048 or less")
]


def draft(
    *,
    model: Annotated[
        str, opt.option("--model", "The target: embedded:target, a folder, or a Hugging Face name.", _WHAT, "M")
    ] = "embedded:target",
    data: _Data = None,
    held_out: _HeldOut = None,
    out: Annotated[Path, opt.option("--out", "The folder to write.", _WHAT, "DIR")],
    resume: Annotated[bool, opt.flag("--resume", "Go on where the training in --out stopped.", _WHAT)] = False,
    clean: job_opt.Clean = False,
    steps: Annotated[int, opt.option("--steps", "Updates; the rate decays in the last fifth.", _RUN, "N")] = 1000,
    tokens_per_step: Annotated[int, opt.option("--tokens-per-step", "Tokens of one update.", _RUN, "N")] = 4096,
    length: _Length = None,
    decay_length: _DecayLength = None,
    learning_rate: Annotated[float, opt.option("--learning-rate", "The highest rate.", _RUN, "RATE")] = 2e-3,
    seed: Annotated[int, opt.option("--seed", "Decides the first weights and the order of the data.", _RUN, "S")] = 0,
    minutes: job_opt.Minutes = None,
    start_from: Annotated[
        Path | None, opt.option("--start-from", "A draft to train further; it keeps its size.", _SIZE, "DIR")
    ] = None,
    layers: Annotated[int, opt.option("--layers", "Layers.", _SIZE, "N")] = 2,
    width: Annotated[int, opt.option("--width", "Width of a layer.", _SIZE, "N")] = 128,
    heads: Annotated[int, opt.option("--heads", "Query heads.", _SIZE, "N")] = 2,
    kv_heads: Annotated[int, opt.option("--kv-heads", "Key and value heads.", _SIZE, "N")] = 1,
    intermediate: Annotated[int, opt.option("--intermediate", "Width inside the MLP.", _SIZE, "N")] = 512,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    json: opt.Json = False,
) -> int:
    """Train a small model to guess what a target would say; measures how often it is right."""
    from truedraft.cli.session import set_threads

    if clean:
        return clean_folder(out, json)
    budget = time_budget(minutes)
    sizes = {"layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads, "intermediate": intermediate}
    run = {
        "steps": steps,
        "tokens_per_step": tokens_per_step,
        "length": _longest(_LENGTH, tokens_per_step) if length is None else length,
        "decay_length": _longest(_DECAY_LENGTH, tokens_per_step) if decay_length is None else decay_length,
    }
    _check_numbers(sizes | run, learning_rate, seed)
    if not data:
        raise DataError("there is nothing to train on; name at least one text file with --data FILE")
    check_folder(out, resume, out / _CHECKPOINT)
    set_threads(threads)
    config = _config({**sizes, "start_from": start_from}, run, learning_rate, seed, device)
    return _train(Job(model, list(data), list(held_out or ()), out, resume, budget), config, json)


def _longest(length: int, tokens_per_step: int) -> int:
    """The length, or the longest below it of which a step holds a whole number."""
    return next((each for each in range(length, 1, -1) if tokens_per_step % each == 0), 1)


def _check_numbers(numbers: dict[str, int], learning_rate: float, seed: int) -> None:
    """Refuse what cannot work before anything is loaded or written."""
    for name, value in numbers.items():
        if value < 1:
            raise OptionError(f"--{name.replace('_', '-')} must be 1 or more, got {value}")
    if not 0.0 < learning_rate < math.inf:
        raise OptionError(f"--learning-rate must be a number above 0, got {learning_rate}")
    if seed < 0:
        raise OptionError(f"--seed must be 0 or more, got {seed}")
    for name in ("length", "decay_length"):
        if numbers["tokens_per_step"] % numbers[name]:
            raise OptionError(
                f"--tokens-per-step must be a multiple of --{name.replace('_', '-')}, "
                f"got {numbers['tokens_per_step']} and {numbers[name]}"
            )


def _config(sizes: dict[str, Any], run: dict[str, int], rate: float, seed: int, device: str) -> DraftConfig:
    from truedraft.models.dtypes import pick_device
    from truedraft.training.data import Curriculum
    from truedraft.training.drafts import DraftConfig
    from truedraft.training.optimizer import OptimizerConfig, WarmupStableDecay

    steps = run["steps"]
    decay = round(steps * _DECAY_SHARE)
    return DraftConfig(
        **sizes,
        schedule=WarmupStableDecay(min(_WARMUP_STEPS, steps - decay), steps - decay, decay),
        optimizer=OptimizerConfig(rate, rate),
        curriculum=Curriculum(run["length"], run["decay_length"], run["tokens_per_step"], run["tokens_per_step"]),
        seed=seed,
        device=str(pick_device(device)),
    )


def _train(job: Job, config: DraftConfig, json: bool) -> int:
    from truedraft.cli.session import quiet_hub
    from truedraft.cli.terminal import Terminal
    from truedraft.training.drafts import train_draft

    terminal = Terminal()
    try:
        with quiet_hub(), terminal.progress("training", config.schedule.total_steps) as progress:
            result = train_draft(
                job.model,
                job.data,
                job.out,
                config,
                held_out=job.held_out,
                on_step=lambda record: progress(record.step + 1, _remark(record)),
                on_note=notes(terminal),
                on_plan=notes(terminal),
                on_checkpoint=checkpoint_lines(terminal),
                budget=job.budget,
            )
    except OptionError as error:
        raise OptionError(_as_typed(str(error))) from error
    except KeyboardInterrupt:
        terminal.end_line()
        words = saved_words(job, [job.out / WORK])
        say(words or "interrupted before the first checkpoint; the same command begins again")
        return INTERRUPTED
    _report(terminal, job, result)
    if json:
        terminal.json(_record(job.model, result))
    return DONE


def _as_typed(message: str) -> str:
    """Name options as they are typed, where the library names fields of its configuration."""
    for field, typed in _TYPED.items():
        message = message.replace(f"{field} was ", f"{typed} was ")
    return message


def _remark(record: StepRecord) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in record.values.items())


def _report(terminal: Terminal, job: Job, result: DraftResult) -> None:
    from truedraft.training.workspace import duration

    report = result.report
    lines = (
        f"trained {result.steps:,} steps, {result.tokens:,} tokens, in {duration(result.elapsed_s)}; "
        f"log: {result.folder / _LOG}",
        f"on {report.tokens:,} held-out tokens: alpha {report.alpha:.3f} (the share of single drafted tokens that the "
        f"target accepts at temperature 1), greedy agreement {report.greedy_agreement:.3f}, "
        f"loss {report.draft_loss:.3f} nats per token",
        *(
            f"tokens per target call, measured in the engine at temperature {each.temperature:g} with "
            f"{each.about['num_speculative_tokens']} drafted tokens: {each.stats.mean_acceptance_length:.2f}"
            for each in result.served
        ),
        f'try it: truedraft generate "PROMPT" --model {job.model} --drafter draft:{result.folder} --compare',
    )
    for line in lines:
        terminal.out.print(line, soft_wrap=True)


def _record(model: str, result: DraftResult) -> dict[str, Any]:
    from truedraft.cli.machine import machine_facts

    return {
        "command": "train draft",
        "model": model,
        "out": str(result.folder),
        "steps": result.steps,
        "tokens": result.tokens,
        "elapsed_s": result.elapsed_s,
        "tokens_per_s": result.tokens / result.elapsed_s if result.elapsed_s else 0.0,
        "held_out": result.report.as_dict(),
        "served": [
            each.as_dict() | {"draft_acceptance_rate": each.stats.draft_acceptance_rate} for each in result.served
        ],
        "machine": machine_facts(),
    }
