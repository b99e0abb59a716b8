"""`truedraft train draft`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from truedraft.cli import options as opt
from truedraft.cli.failures import DONE
from truedraft.errors import DataError, ModelNotFoundError, OptionError

if TYPE_CHECKING:
    from truedraft.cli.terminal import Terminal
    from truedraft.training.distill import DraftConfig, DraftResult
    from truedraft.training.loop import StepRecord

_CHECKPOINT = Path("work") / "checkpoint.pt"
_DECAY_SHARE = 0.2
_WARMUP_STEPS = 20
_SIZE, _RUN = "Size of the draft", "Training"

Files = list[Path] | None


def train_app() -> typer.Typer:
    """The commands that train drafters."""
    app = typer.Typer(name="train", help="Train a drafter for a target.")
    app.callback()(_group)  # keeps `draft` a command of its own while it is the only one
    app.command()(draft)
    return app


def _group() -> None:
    """Train a drafter for a target."""


def draft(
    out: opt.OutFolder,
    model: opt.Model = "embedded:target",
    data: Annotated[Files, opt.option("--data", "Text or .jsonl to train on; may be repeated.", _RUN, "FILE")] = None,
    held_out: Annotated[
        Files, opt.option("--held-out", "Text to measure on; without it, 5 % of the data.", _RUN, "FILE")
    ] = None,
    steps: Annotated[int, opt.option("--steps", "Updates; the rate decays in the last fifth.", _RUN, "N")] = 1000,
    tokens_per_step: Annotated[int, opt.option("--tokens-per-step", "Tokens of one update.", _RUN, "N")] = 4096,
    length: Annotated[int, opt.option("--length", "Tokens of a sequence.", _RUN, "N")] = 512,
    decay_length: Annotated[int, opt.option("--decay-length", "The same, while the rate decays.", _RUN, "N")] = 2048,
    learning_rate: Annotated[float, opt.option("--learning-rate", "Its peak.", _RUN, "RATE")] = 2e-3,
    seed: Annotated[int, opt.option("--seed", "Of weights and of the order of the data.", _RUN, "S")] = 0,
    resume: Annotated[bool, opt.option("--resume", "Go on where the folder's training stopped.", _RUN)] = False,
    start_from: Annotated[
        Path | None, opt.option("--start-from", "A draft to train on; then its size stays.", _SIZE, "DIR")
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
    """Distil a small draft model from a target's distributions."""
    sizes = {
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": kv_heads,
        "intermediate": intermediate,
        "start_from": start_from,
    }
    run = {"steps": steps, "tokens_per_step": tokens_per_step, "length": length, "decay_length": decay_length}
    _check(sizes | run, out, data, resume)
    config = _config(sizes, run, learning_rate, seed, device)
    return _train(model, list(data or ()), list(held_out or ()), out, config, threads, json)


def _check(numbers: dict[str, Any], out: Path, data: Files, resume: bool) -> None:
    """Refuse what cannot work before anything is loaded or written.

    Raises:
        OptionError: an unusable number or folder.
        DataError: nothing to train on.
    """
    for name, value in numbers.items():
        if isinstance(value, int) and value < 1:
            raise OptionError(f"--{name.replace('_', '-')} must be 1 or more, got {value}")
    if not data:
        raise DataError("there is nothing to train on; name at least one text file with --data FILE")
    if out.exists() and not out.is_dir():
        raise OptionError(f"--out {str(out)!r} is a file; name a folder")
    started = (out / _CHECKPOINT).is_file()
    if started and not resume:
        raise OptionError(f"--out {str(out)!r} holds a training; add --resume to go on with it, or name a new folder")
    if resume and not started:
        raise OptionError(f"--out {str(out)!r} holds no training to go on with; leave --resume out")
    if (out / "config.json").is_file() and not started:
        raise OptionError(f"--out {str(out)!r} holds a model, which would be overwritten; name a new folder")


def _config(sizes: dict[str, Any], run: dict[str, int], rate: float, seed: int, device: str) -> DraftConfig:
    from truedraft.models.dtypes import pick_device
    from truedraft.training.curriculum import Curriculum
    from truedraft.training.distill import DraftConfig
    from truedraft.training.optimizer import OptimizerConfig
    from truedraft.training.schedule import WarmupStableDecay

    steps = run["steps"]
    decay = round(steps * _DECAY_SHARE)
    for name in ("length", "decay_length"):
        if run["tokens_per_step"] % run[name]:
            raise OptionError(
                f"--tokens-per-step must be a multiple of --{name.replace('_', '-')}, "
                f"got {run['tokens_per_step']} and {run[name]}"
            )
    return DraftConfig(
        **sizes,
        schedule=WarmupStableDecay(min(_WARMUP_STEPS, steps - decay), steps - decay, decay),
        optimizer=OptimizerConfig(rate, rate),
        curriculum=Curriculum(run["length"], run["decay_length"], run["tokens_per_step"], run["tokens_per_step"]),
        seed=seed,
        device=str(pick_device(device)),
    )


def _train(
    model: str, data: list[Path], held_out: list[Path], out: Path, config: DraftConfig, threads: int | None, json: bool
) -> int:
    from truedraft.cli.session import quiet_hub, set_threads
    from truedraft.cli.terminal import Terminal
    from truedraft.training.distill import train_draft

    terminal = Terminal()
    set_threads(threads)
    target = _folder(model)
    try:
        with quiet_hub(), terminal.progress("training", config.schedule.total_steps) as progress:
            result = train_draft(target, data, out, config, held_out=held_out, on_step=_follow(progress))
    except OSError as error:
        if error.errno is not None:
            raise
        raise ModelNotFoundError(f"found no model {model!r} ({str(error).splitlines()[0].rstrip('.')})") from error
    except KeyboardInterrupt:
        terminal.note("stopped; the same command with --resume goes on from the last checkpoint")
        raise
    _report(terminal, result)
    if json:
        terminal.json(_record(model, result))
    return DONE


def _folder(model: str) -> str:
    """Where a model lies, embedded ones by their names."""
    from truedraft.embedded import embedded_folder

    if model.startswith("embedded:"):
        return str(embedded_folder(model.removeprefix("embedded:")))
    path = Path(model).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelNotFoundError(f"{model!r} is a folder without config.json, so it is not a model; name its folder")
    return str(path) if path.is_dir() else model


def _follow(progress: Callable[[int, str], None]) -> Callable[[StepRecord], None]:
    def show(record: StepRecord) -> None:
        progress(record.step + 1, ", ".join(f"{name} {value:.3f}" for name, value in record.values.items()))

    return show


def _report(terminal: Terminal, result: DraftResult) -> None:
    report = result.report
    terminal.out.print(
        f"{result.folder}: {result.steps:,} steps, {result.tokens:,} tokens in {result.elapsed_s / 60:.1f} minutes",
        soft_wrap=True,
    )
    terminal.out.print(
        f"on {report.tokens:,} held-out tokens: alpha {report.alpha:.3f} at temperature 1, greedy agreement "
        f"{report.greedy_agreement:.3f}, loss {report.draft_loss:.3f} nats per token",
        soft_wrap=True,
    )


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
        "machine": machine_facts(),
    }
