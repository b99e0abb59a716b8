"""Fields of configurations that are also options of `truedraft train`; needs no torch, so a command can read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truedraft.options import option


@dataclass(frozen=True)
class DraftSizeOptions:
    """The sizes of a draft model."""

    start_from: Path | None = option(None, "A draft to train further; it keeps its size.", "DIR")
    layers: int = option(2, "Layers.", "N", least=1)
    width: int = option(128, "Width of a layer.", "N", least=1)
    heads: int = option(2, "Query heads.", "N", least=1)
    kv_heads: int = option(1, "Key and value heads.", "N", least=1)
    intermediate: int = option(512, "Width inside the MLP.", "N", least=1)
    draft_vocab: int = option(
        16384, "The likeliest ids of the text, among which it guesses; 0 is all of them.", "N", least=0
    )


@dataclass(frozen=True)
class TextOptions:
    """How much text the target writes for training heads."""

    tokens: int = option(400_000, "Tokens that the target writes to train on, about.", "N")
    prompt_tokens: int = option(64, "Tokens of a prompt.", "N")


@dataclass(frozen=True)
class WritingOptions:
    """How the target writes the text."""

    answer_tokens: int = option(192, "The most tokens of an answer.", "N")
    temperatures: tuple[float, ...] = option(
        (0.0, 1.0),
        "Of the answers; may be repeated, then they are taken in turn.",
        "T",
        name="--temperature",
        shown_default="0 and 1 in turn",
    )


@dataclass(frozen=True)
class HeadRunOptions:
    """How heads are trained."""

    learning_rate: float = option(0.01, "The highest rate of the heads.", "RATE")
    epochs: float = option(2.5, "Passes over what the target wrote.", "X")
    steps: int | None = option(None, "Updates of the heads, in place of --epochs.", "N")
    place_decay: float = option(0.8, "By how much each place counts less than the one before.", "X")
    seed: int = option(0, "Decides the text, the order of it, and new weights.", "S")


@dataclass(frozen=True)
class HeadSizeOptions:
    """Sizes of heads of any kind."""

    tied: bool = option(
        True, "Heads end in the target's LM head, or in outputs of their own.", "", name="--tied/--free"
    )
    start_from: Path | None = option(None, "Heads for this target to train further.", "DIR")


@dataclass(frozen=True)
class LayerHeadOptions(HeadSizeOptions):
    """Sizes of heads on vectors of several layers."""

    length: int = option(5, "Steps of training-time test: how many tokens after the next are guessed.", "T")
    layers: tuple[int, ...] = option(
        (),
        "A layer of the target whose output is read, 0 the first; may be repeated.",
        "N",
        name="--layer",
        shown_default="what enters the third, the middle one and the third last",
    )
    kv_heads: int | None = option(None, "Heads of keys and values.", "N", shown_default="as many as of queries")
    inner: int | None = option(None, "Width inside the MLP.", "N", shown_default="8/3 of the target's width")
    draft_vocab: int = option(8192, "The likeliest ids of the text, among which it guesses; 0 is all of them.", "N")
    sliding_window: int = option(0, "Tokens that its layers see, the last ones; 0 is all.", "N", name="--window")
    sink: int = option(0, "First tokens of a text that layers with --window see, too.", "N")


@dataclass(frozen=True)
class ChainRunOptions(HeadRunOptions):
    """How heads on vectors of several layers are trained."""

    loss: str = option("kl", "kl, reverse-kl, tv, jsd, lk or lk-adaptive; or a mixture: kl=0.5,tv=0.5.", "LOSS")
    by_acceptance: bool = option(
        False,
        "Weigh each guessed token by the probability that those before it are accepted, or by --place-decay.",
        "",
        name="--by-acceptance/--by-place",
    )


@dataclass(frozen=True)
class NgramSizeOptions:
    """The size of a table of n-grams."""

    order: int = option(3, "Tokens of the longest n-grams, at most 8; 2 counts pairs alone.", "N", least=1)
    min_count: int = option(
        2, "How often an n-gram of three tokens and more must occur, or it is left out.", "N", least=1
    )
    max_bytes: str = option(
        "256M", "The most bytes of the table; rare n-grams are left out until it is no larger.", "SIZE"
    )
    max_text_tokens: int = option(
        20_000_000,
        "Tokens of text that are counted at the most; each takes some 45 bytes of memory, times --order.",
        "N",
        least=1,
    )


@dataclass(frozen=True)
class Trains:
    """How `truedraft train` offers the training of a kind of heads."""

    title: str  # of the card in the output folder
    help: str  # of the command; its first sentence is in the list of commands
    size: type[HeadSizeOptions]
    learning: type[HeadRunOptions]
    more: type[Any] | None = None  # a dataclass of options for this kind only, under `heading` in the help
    heading: str = ""
