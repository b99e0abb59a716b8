"""Whether heads fit a target: their sizes, and the target that they were trained for."""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.errors import CompositionError
from truedraft.models.base import LanguageModel


@dataclass(frozen=True, slots=True)
class TrainedFor:
    """The target that heads were trained for.

    Attributes:
        what: the heads are called, for messages: "Medusa heads".
        width: entries of the vectors that they read.
        vocab_size: ids that they know; may be more than there are, as the rows of a padded embedding.
        name: of the target; empty where nobody knows.
        fingerprint: of the target; None where nobody knows, then any target of these sizes is taken.
    """

    what: str
    width: int
    vocab_size: int
    name: str
    fingerprint: str | None

    def check(self, target: LanguageModel) -> None:
        """Refuse another target.

        Raises:
            CompositionError: names both targets, or what does not fit.
            ModelError: the target's weights cannot be read again.
        """
        if target.head_width == 0:
            raise CompositionError(f"the target {target.name} has no vectors that heads could read")
        if self.width != target.head_width or self.vocab_size < target.vocab_size:
            trained_for = f" for {self.name}" if self.name else ""
            raise CompositionError(
                f"these {self.what}{trained_for} read {self.width} numbers and know {self.vocab_size} ids, but "
                f"{target.name} has {target.head_width} numbers and {target.vocab_size} ids; take heads that were "
                "trained for it"
            )
        if self.fingerprint is not None and self.fingerprint != target.fingerprint:
            raise CompositionError(
                f"these {self.what} were trained for {self.name} (fingerprint {self.fingerprint}), and the target is "
                f"{target.name} (fingerprint {target.fingerprint}); take heads that were trained for it"
            )
