"""What decides the training of a recurrent head, but for the target and the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from truedraft.errors import OptionError, UnknownOptionError
from truedraft.heads.redrafter import RedrafterConfig
from truedraft.options import check_whole
from truedraft.training.head_config import HeadTrainingConfig, check_share
from truedraft.training.kept_laws import LAW_BYTES
from truedraft.training.lessons import reads_laws
from truedraft.training.losses import DistillationLoss, loss_from_spec

_LAWS = ("computed", "stored")


@dataclass(frozen=True)
class RedrafterTrainingConfig(HeadTrainingConfig):
    """All numbers of a training of a recurrent head (ReDrafter 2403.09919).

    Attributes:
        length: how many tokens after the next are guessed, over as many of which it is unrolled.
        state: entries of the recurrent state; None is the target's width.
        exit_width: entries of what enters the blocks and the output; None is the target's width, and a head that ends
            in the target's LM head has no other.
        layers: residual blocks.
        rnn: whether the state is recurrent, or the plain sum of the embeddings.
        loss: words of `loss_from_spec`: `kl`, `ce`, `reverse-kl`, `tv`, `jsd`, or a mixture as `kl=0.5,tv=0.5`.
        laws: "computed" from the stored vectors when they are needed, or "stored" as the 64 likeliest tokens and the
            mass of the rest.
        self_fed: the share of positions at which the recurrence reads the head's own guesses; 0 is teacher forcing.

    Raises:
        OptionError: a value out of its range.
    """

    decisive: ClassVar[frozenset[str]] = HeadTrainingConfig.decisive | {
        "length", "state", "exit_width", "layers", "rnn", "loss", "laws", "self_fed",
    }  # fmt: skip

    length: int = 5
    state: int | None = None
    exit_width: int | None = None
    layers: int = 2
    rnn: bool = True
    loss: str = "kl"
    laws: str = "computed"
    self_fed: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything is loaded or written."""
        super().__post_init__()
        check_whole("length", self.length, 1)
        check_whole("layers", self.layers, 0)
        for name in ("state", "exit_width"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        check_share("self_fed", self.self_fed)
        if self.laws not in _LAWS:
            raise UnknownOptionError.nearest("kind of laws", self.laws, _LAWS)
        asks = reads_laws(self.divergence)  # refuses an unknown loss
        if self.laws == "stored" and not asks:
            raise OptionError(
                f"need not be stored for the loss {self.loss!r}, which looks at tokens alone", field="laws"
            )

    @property
    def law_bytes(self) -> int:
        """See `HeadTrainingConfig`."""
        return LAW_BYTES if self.laws == "stored" else 0

    @property
    def divergence(self) -> DistillationLoss:
        """The loss as an object."""
        return loss_from_spec(self.loss)

    def sizes(self, width: int, vocab_size: int) -> RedrafterConfig:
        """Of a head for a target.

        Raises:
            OptionError: they make no head.
        """
        return RedrafterConfig(
            width=width,
            vocab_size=vocab_size,
            state=width if self.state is None else self.state,
            exit_width=width if self.exit_width is None else self.exit_width,
            layers=self.layers,
            length=self.length,
            tied=self.tied,
            rnn=self.rnn,
        )
