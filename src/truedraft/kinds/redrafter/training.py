"""Training of the recurrent head of ReDrafter (2403.09919): its configuration, its loss, and its beams."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from truedraft.drafters.heads.head import HeadRecord
from truedraft.errors import OptionError, UnknownOptionError
from truedraft.kinds.redrafter.drafter import Redrafter
from truedraft.kinds.redrafter.module import RedrafterConfig, RedrafterHead
from truedraft.kinds.redrafter.options import RedrafterRunOptions, RedrafterSizeOptions
from truedraft.kinds.redrafter.traced_beams import BeamTokens, ReplayedBeams, facts_of, replay_beams
from truedraft.measure import BUDGETS, TREE_TEMPERATURES
from truedraft.models.base import LanguageModel
from truedraft.models.lm_head import LmHead
from truedraft.options import check_share, check_whole
from truedraft.training.evaluate import EngineRound
from truedraft.training.head_config import Calibrated, Feed, HeadTrainingConfig, HeldOutAccuracy
from truedraft.training.losses import KEPT_BYTES, DistillationLoss, DistillationTarget, keep_target, loss_from_spec
from truedraft.training.report import HeadResult, Rows
from truedraft.training.texts.self_distillation import CollatedBatch, SelfDistillationData, text_tokens

_CHUNK = 256  # positions with logits in memory
_LAWS = ("computed", "stored")
_TEXT = "train"  # names the stored distributions, as the text next to them


@dataclass(frozen=True)
class RedrafterTrainingConfig(RedrafterSizeOptions, RedrafterRunOptions, HeadTrainingConfig):
    """Configuration of a training of a recurrent head (2403.09919), unrolled over the `length` guessed tokens.

    `self_fed` 0 is teacher forcing. Raises `OptionError` for a value out of its range.
    """

    head = RedrafterHead
    decisive = HeadTrainingConfig.decisive | {
        "length", "state", "exit_width", "layers", "rnn", "loss", "laws", "self_fed",
    }  # fmt: skip

    @classmethod
    def describe(cls, result: HeadResult) -> Iterator[str | Rows]:
        head = result.report
        shares = iter(head.facts["accuracy"].values())
        pairs = ", ".join(f"{first:.2f} / {five:.2f}" for first, five in zip(shares, shares, strict=True))
        yield f"right at each place, given the tokens before it, with the first guess / one of five: {pairs}"
        yield f"promised: on {head.promised_on}; other text gives more or less"
        rows: list[Sequence[str]] = [("temperature", "nodes", "beams", "tokens per target call", "promised")]
        for each in head.evaluations:
            about = each.about
            promised = "-" if about["promised"] is None else f"{about['promised']:.2f}"
            found = f"{each.stats.mean_acceptance_length:.2f}", promised
            rows.append(
                (f"{each.temperature:g}", str(about["nodes"]), f"{about['beams']} of {about['length']}", *found)
            )
        yield rows

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("length", self.length, 1)
        check_whole("layers", self.layers, 0)
        for name in ("state", "exit_width"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        check_share("self_fed", self.self_fed)
        if self.laws not in _LAWS:
            raise UnknownOptionError.nearest("kind of distributions", self.laws, _LAWS)
        reads_target = self.distillation_loss.reads_target  # raises for an unknown loss
        if self.laws == "stored" and not reads_target:
            raise OptionError(f"need not be stored for the loss {self.loss!r}, which reads only tokens", field="laws")

    @property
    def bytes_per_token(self) -> int:
        return KEPT_BYTES if self.laws == "stored" else 0

    @property
    def distillation_loss(self) -> DistillationLoss:
        return loss_from_spec(self.loss)

    def sizes(self, width: int, vocab_size: int) -> RedrafterConfig:
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

    def feed(self, head: RedrafterHead, lm_head: LmHead) -> Feed:
        return SelfFeeding(head, lm_head, self.self_fed, self.seed) if self.self_fed else super().feed(head, lm_head)

    def target(
        self, lm_head: LmHead, text: SelfDistillationData, folder: Path, on_progress: Callable[[str, int, int], None]
    ) -> DistillationTarget:
        if self.laws == "computed":
            return super().target(lm_head, text, folder, on_progress)
        follow = functools.partial(on_progress, "storing distributions")
        return keep_target(text, lm_head, folder, _TEXT, on_progress=follow).rows

    def calibrate(
        self,
        head: RedrafterHead,
        lm_head: LmHead,
        target: LanguageModel,
        text: SelfDistillationData,
        on_progress: Callable[[str, int, int], None],
    ) -> Calibrated:
        accuracy = HeldOutAccuracy.on(head, lm_head, text, len(text.tokens))()
        replayed = replay_beams(target, head, text, on_progress=functools.partial(on_progress, "replaying beams"))
        kept = facts_of(replayed)
        calibrated = head.with_record(HeadRecord(facts=kept))
        rounds = [
            _round(calibrated, temperature, nodes, replayed[kind])
            for (kind, temperature), nodes in itertools.product(TREE_TEMPERATURES.items(), BUDGETS)
        ]
        return Calibrated({"accuracy": dict(accuracy), **kept}, rounds)


def _round(head: RedrafterHead, temperature: float, nodes: int, replayed: ReplayedBeams) -> EngineRound:
    """As many beams as nodes, so that the tree has the likeliest nodes of all."""
    beams, length = nodes, head.reach
    promised = _promised(replayed.promises, beams, length, nodes)
    about = {"nodes": nodes, "beams": beams, "length": length, "promised": promised}
    return EngineRound(temperature, functools.partial(Redrafter, head, beams=beams, nodes=nodes, sampled=False), about)


def _promised(promises: Sequence[BeamTokens], beams: int, length: int, nodes: int) -> float | None:
    promise = next((each for each in promises if (each.beams, each.length) == (beams, length)), None)
    return None if promise is None else promise.at(nodes)


class SelfFeeding:
    """At a share of the positions the recurrence reads the head's own greedy guesses, from the second token on.

    The first token is the target's, as in decoding. The positions, of probability `share` each, depend only on the seed
    and the batch, so a resumed training draws the same.
    """

    def __init__(self, head: RedrafterHead, lm_head: LmHead, share: float, seed: int) -> None:
        self._head = head
        self._lm_head = lm_head
        self._share = share
        self._seed = seed

    def __call__(self, batch: CollatedBatch, hidden: Tensor) -> Tensor:
        """The tokens to read, `[positions, reach]`, from hidden states `[positions, width]`."""
        tokens = text_tokens(batch, self._head.reach)
        key = (self._seed, len(batch.rows), int(batch.rows[0]), int(batch.rows[-1]))
        drawn = np.random.default_rng(key).random(len(tokens))
        chosen = torch.from_numpy(np.flatnonzero(drawn < self._share)).to(tokens.device)
        for some in chosen.split(_CHUNK):
            tokens[some, 1:] = self._guesses(hidden[some], tokens[some, 0])
        return tokens

    @torch.no_grad()
    def _guesses(self, hidden: Tensor, token: Tensor) -> Tensor:
        head, lm_head = self._head, self._lm_head
        state, found = head.new_state(len(hidden)), []
        for place in range(head.reach - 1):
            state = head.advance(state, lm_head.embed(token))
            token = head.place_logits(place, head.leaving(hidden, state), lm_head).argmax(dim=-1)
            found.append(token)
        return torch.stack(found, dim=1) if found else hidden.new_zeros(len(hidden), 0, dtype=torch.int64)
