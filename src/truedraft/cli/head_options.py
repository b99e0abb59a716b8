"""The options that the commands which train heads share, with their help, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from truedraft.cli import options as opt
from truedraft.errors import OptionError

WHAT, TEXT, HEADS, RUN = "What to train, on what", "Text by the target", "Heads", "Training"
"""Headings of the help."""

_Files: TypeAlias = list[Path] | None
Model: TypeAlias = Annotated[
    str, opt.option("--model", "The target: embedded:target, a folder, or a Hugging Face name.", WHAT, "M")
]
Data: TypeAlias = Annotated[
    _Files,
    opt.option(
        "--data",
        'Text, or .jsonl with "text", that prompts are cut from; may be repeated. Without it, for embedded:target, the '
        "standard library of this Python.",
        WHAT,
        "FILE",
    ),
]
HeldOut: TypeAlias = Annotated[
    _Files,
    opt.option("--held-out", "Text to choose trees and measure on; without it, the end of the data.", WHAT, "FILE"),
]
Out: TypeAlias = Annotated[Path, opt.option("--out", "The folder to write.", WHAT, "DIR")]
Resume: TypeAlias = Annotated[bool, opt.flag("--resume", "Go on where the training in --out stopped.", WHAT)]
Tokens: TypeAlias = Annotated[
    int, opt.option("--tokens", "Tokens that the target writes to train on, about.", TEXT, "N")
]
PromptTokens: TypeAlias = Annotated[int, opt.option("--prompt-tokens", "Tokens of a prompt.", TEXT, "N")]
AnswerTokens: TypeAlias = Annotated[int, opt.option("--answer-tokens", "The most tokens of an answer.", TEXT, "N")]
Temperature: TypeAlias = Annotated[
    list[float] | None,
    opt.option(
        "--temperature",
        "Of the answers; may be repeated, then they are taken in turn.",
        TEXT,
        "T",
        show_default="0 and 1 in turn",
    ),
]
Layers: TypeAlias = Annotated[int, opt.option("--layers", "Residual blocks of a head.", HEADS, "N")]
Epochs: TypeAlias = Annotated[float, opt.option("--epochs", "Passes over what the target wrote.", RUN, "X")]
Steps: TypeAlias = Annotated[int | None, opt.option("--steps", "Updates of the heads, in place of --epochs.", RUN, "N")]
Rate: TypeAlias = Annotated[float, opt.option("--learning-rate", "The highest rate of the heads.", RUN, "RATE")]
PlaceDecay: TypeAlias = Annotated[
    float, opt.option("--place-decay", "By how much each place counts less than the one before.", RUN, "X")
]
Seed: TypeAlias = Annotated[int, opt.option("--seed", "Decides the text, the order of it, and new weights.", RUN, "S")]

# Fields of the library's configuration, as they are typed here.
TYPED = {
    "answer_tokens": "--answer-tokens",
    "temperatures": "--temperature",
    "prompts_sha256": "the prompts (--data, --held-out, --tokens, --prompt-tokens, --minutes)",
    "text_sha256": "the text that the target wrote",
    "start_from": "the heads in --start-from",
    "target": "the fingerprint of --model",
    "schedule.warmup_steps": "the warm-up of --steps",
    "schedule.stable_steps": "the steps (--steps, --epochs) before the decay",
    "schedule.decay_steps": "the steps (--steps, --epochs) of the decay",
    "optimizer.matrix_rate": "--learning-rate",
    "optimizer.vector_rate": "--learning-rate",
    "place_decay": "--place-decay",
    "layers": "--layers",
    "tied": "--tied",
    "seed": "--seed",
}
"""What a refusal to go on names."""
NAMED = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        "layers", "tokens", "prompt_tokens", "answer_tokens", "temperature", "epochs", "steps", "place_decay", "seed",
    )
}  # fmt: skip
"""What messages on unusable values begin with."""


@dataclass(frozen=True, slots=True)
class Common:
    """What was typed for the options that all kinds of heads have.

    Attributes:
        plain: those that the library's configuration has under the same names.
        answer_tokens: `--answer-tokens`.
        temperature: `--temperature`.
        learning_rate: `--learning-rate`.
        device: `--device`.
    """

    plain: dict[str, Any]
    answer_tokens: int
    temperature: list[float] | None
    learning_rate: float
    device: str

    def fields(self) -> dict[str, Any]:
        """Fields of a `HeadTrainingConfig`.

        Raises:
            OptionError: an unusable value.
        """
        from truedraft.models.dtypes import pick_device
        from truedraft.training.answer_writer import WritingConfig
        from truedraft.training.optimizer import OptimizerConfig

        check_rate("--learning-rate", self.learning_rate)
        temperatures = tuple(self.temperature) if self.temperature else (0.0, 1.0)
        return {
            **self.plain,
            "writing": WritingConfig(self.answer_tokens, temperatures, seed=max(0, self.plain["seed"])),
            "optimizer": OptimizerConfig(self.learning_rate, self.learning_rate),
            "device": str(pick_device(self.device)),
        }


def check_rate(name: str, rate: float) -> None:
    """Refuse a learning rate that moves nothing.

    Raises:
        OptionError: names it.
    """
    if not 0.0 < rate < float("inf"):
        raise OptionError(f"{name} must be a number above 0, got {rate}")
