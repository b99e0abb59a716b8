"""Fields of configurations that are also options of `truedraft train`. Needs no torch, so a command can read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from truedraft.options import option


@dataclass(frozen=True)
class DraftSizeOptions:
    """How large a draft model is."""

    start_from: Path | None = option(None, "A draft to train further; it keeps its size.", "DIR")
    layers: int = option(2, "Layers.", "N", least=1)
    width: int = option(128, "Width of a layer.", "N", least=1)
    heads: int = option(2, "Query heads.", "N", least=1)
    kv_heads: int = option(1, "Key and value heads.", "N", least=1)
    intermediate: int = option(512, "Width inside the MLP.", "N", least=1)


@dataclass(frozen=True)
class TextOptions:
    """How much the target writes for heads to learn from."""

    tokens: int = option(400_000, "Tokens that the target writes to train on, about.", "N")
    prompt_tokens: int = option(64, "Tokens of a prompt.", "N")


@dataclass(frozen=True)
class WritingOptions:
    """How it writes them."""

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
class MedusaRunOptions(HeadRunOptions):
    """The same for Medusa heads."""

    law_share: float = option(
        1.0, "1 learns the target's distributions, 0 its tokens alone, in between a mixture.", "X"
    )


@dataclass(frozen=True)
class RedrafterRunOptions(HeadRunOptions):
    """The same for a recurrent head."""

    loss: str = option(
        "kl",
        "kl, reverse-kl, tv, jsd, lk or lk-adaptive learn the target's distributions, ce its tokens alone; or a "
        "mixture: kl=0.5,tv=0.5.",
        "LOSS",
    )
    laws: str = option(
        "computed",
        "computed: whole, by the LM head at each step. stored: once, as the 64 likeliest tokens and the mass of the "
        "rest, for large vocabularies.",
        "KIND",
    )
    self_fed: float = option(
        0.0,
        "At this share of the positions the head reads its own guesses; 0 reads the text's tokens alone.",
        "SHARE",
    )


@dataclass(frozen=True)
class HeadSizeOptions:
    """What heads of any kind are."""

    tied: bool = option(
        True, "Heads end in the target's LM head, or in outputs of their own.", "", name="--tied/--free"
    )
    start_from: Path | None = option(None, "Heads for this target to train further.", "DIR")


@dataclass(frozen=True)
class MedusaSizeOptions(HeadSizeOptions):
    """What Medusa heads are."""

    heads: int = option(4, "How many tokens after the next are guessed.", "N")
    layers: int = option(1, "Residual blocks of a head.", "N")
    reads_token: bool = option(
        True,
        "Heads also read the token that was drawn from their vector, or the vector alone, as Medusa's own.",
        "",
        name="--reads-token/--vector-only",
    )


@dataclass(frozen=True)
class RedrafterSizeOptions(HeadSizeOptions):
    """What a recurrent head is."""

    length: int = option(5, "How many tokens after the next are guessed in training.", "T")
    state: int | None = option(None, "Entries of the recurrent state.", "N", shown_default="the target's width")
    layers: int = option(2, "Residual blocks of a head.", "N")
    exit_width: int | None = option(
        None,
        "Entries of what enters the blocks and the output; others than the target's width only with --free.",
        "N",
        shown_default="the target's width",
    )
    rnn: bool = option(
        True,
        "The state is recurrent, or the plain sum of the embeddings so far.",
        "",
        name="--recurrent/--summed",
    )


@dataclass(frozen=True)
class LayerHeadOptions(HeadSizeOptions):
    """What heads on vectors of several layers are."""

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


@dataclass(frozen=True)
class ChainRunOptions(HeadRunOptions):
    """How they are trained."""

    loss: str = option("kl", "kl, reverse-kl, tv, jsd, lk or lk-adaptive; or a mixture: kl=0.5,tv=0.5.", "LOSS")
    by_acceptance: bool = option(
        False,
        "Weigh each guessed token by the probability that those before it are accepted, or by --place-decay.",
        "",
        name="--by-acceptance/--by-place",
    )


@dataclass(frozen=True)
class Eagle3SizeOptions(LayerHeadOptions):
    """What an EAGLE-3 head is."""

    fc_norm: bool = option(
        True, "Norm each layer's vectors before they are merged (EAGLE-3.1).", "", name="--fc-norm/--no-fc-norm"
    )
    norm_output: bool = option(
        True, "Norm what goes into the next step (EAGLE-3.1).", "", name="--norm-output/--no-norm-output"
    )


@dataclass(frozen=True)
class PEagleSizeOptions(LayerHeadOptions):
    """What a P-EAGLE head is."""

    length: int = option(8, "How many tokens are guessed at once.", "T")
    depth: int = option(4, "Decoder layers of the head.", "N")
    own_embedding: bool = option(
        False,
        "An embedding of its own, which begins as the target's and learns, or the target's.",
        "",
        name="--own-embedding/--targets-embedding",
    )


@dataclass(frozen=True)
class PEagleRunOptions(ChainRunOptions):
    """How it is trained."""

    kept: float = option(
        0.7, "Share of the places with one more mask at each token further ahead, at random; a fifth remain.", "SHARE"
    )


@dataclass(frozen=True)
class BlockSizeOptions(LayerHeadOptions):
    """What a block drafter is."""

    length: int = option(7, "How many tokens are guessed at once.", "T")
    layers: tuple[int, ...] = option(
        (),
        "A layer of the target whose output is read, 0 the first; may be repeated.",
        "N",
        name="--layer",
        shown_default="five, evenly from the second to the third last",
    )
    depth: int = option(2, "Decoder layers of the head.", "N")


@dataclass(frozen=True)
class BlockRunOptions(ChainRunOptions):
    """How it is trained."""

    anchors: int = option(64, "Places of an answer, at random, from which blocks are guessed in each pass.", "N")


@dataclass(frozen=True)
class DSparkSizeOptions(BlockSizeOptions):
    """What a DSpark head has beside."""

    markov: int = option(128, "Entries of the Markov head.", "N")
    markov_kind: str = option("vanilla", "vanilla, gated, or rnn, which carries a state along the block.", "KIND")


@dataclass(frozen=True)
class DSparkRunOptions(BlockRunOptions):
    """How it is trained."""

    loss: str = option(
        "kl=0.1,tv=1.8", "kl, reverse-kl, tv, jsd, lk or lk-adaptive; or a mixture, as the one that DSpark has.", "LOSS"
    )


@dataclass(frozen=True)
class NgramSizeOptions:
    """How large a table of n-grams is."""

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
