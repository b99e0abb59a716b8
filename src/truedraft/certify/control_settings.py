"""Where planted faults are shown: the user's own drafter, or a stand-in that leaves a fault more room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from truedraft.certify import faults
from truedraft.certify.delegating import ScaledModel
from truedraft.certify.directions import Scored
from truedraft.certify.sampling_runs import scored_answers
from truedraft.certify.scoring import plain_logits
from truedraft.certify.stack import Stack
from truedraft.core.laws import law_from_logits, total_variation
from truedraft.core.sampling import SamplingParams
from truedraft.drafters import DraftModel

ROOM = 0.15
"""Tokens whose laws a fault puts off by less do not count."""
BATCH = 16
LENGTH = 40
"""Tokens of an answer: a fault is found soon, and then nothing more need be written."""
_BEGINNING = 8
_OWN_IS_BETTER = 1.2
"""The user's own drafter is taken unless a stand-in shows a fault in far fewer tokens."""
_SHARPER = 3.0
_SHARE = 0.6
"""About what a chain of one token has: each step judges one, and emits one or two."""
_WARM = 1.2
_ENTRIES = 1 << 22
_LOOKED_AT = 1 << 20
"""Entries of laws that settings are compared by."""

Emitted = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Control:
    """A fault, and how large it is.

    Attributes:
        name: what is wrong with the stack.
        plant: makes the broken stack of one that drafts one token a step.
        emitted: what it emits at a node with a draft, by (p, q), `[tokens, vocab]` each; None where that is read off
            the laws that the rule was given.
        needs_law: whether it shows only where drafts are drawn from a law.
    """

    name: str
    plant: Callable[[Stack], Stack]
    emitted: Emitted | None
    needs_law: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a fault is shown.

    Attributes:
        stack: drafts one token a step.
        params: sampling options.
        words: what is not the user's own; "" if all is.
        rooms: p and q `[tokens, vocab]` where drafts are judged, and whether they are drawn from q.
        share: of tokens, how many a draft is judged for.
    """

    stack: Stack
    params: SamplingParams
    words: str
    rooms: Sequence[tuple[Tensor, Tensor, bool]]
    share: float

    def worth(self, control: Control) -> float:
        """What a token tells of a fault: the mean square of how far its law is put off, where that counts."""
        assert control.emitted is not None
        rooms = [(p, q) for p, q, drawn in self.rooms if drawn or not control.needs_law]
        sizes = [total_variation(p, control.emitted(p, q)) for p, q in rooms]
        sizes = [torch.where(size >= ROOM, size, 0.0) for size in sizes]
        return self.share * float(torch.cat(sizes).square().mean()) if sizes else 0.0


def beginnings(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompts cut short: a prefill shows nothing of a fault."""
    return [list(prompt)[:_BEGINNING] for prompt in prompts]


def settings_of(stack: Stack, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Setting]:
    """The user's own, looked at in one batch of answers, and stand-ins, whose laws follow from the target's there."""
    own = stack.but(drafter=faults.OneToken(stack.drafter))
    answers = next(scored_answers(own, prompts, params, BATCH, length=LENGTH))
    rooms = [found for scored in answers if (found := drafted(scored)) is not None]
    some = max(1, _LOOKED_AT // stack.target.vocab_size // max(1, len(rooms)))
    share = sum(len(places) for _, _, places, _ in rooms) / sum(len(scored.tokens) for scored in answers)
    settings = [
        Setting(own, params, "", [(p[:some].clone(), q[:some].clone(), drawn) for p, q, _, drawn in rooms], share)
    ]
    texts = [(scored.before, scored.tokens) for scored in answers]
    logits = torch.cat(plain_logits(stack.target, texts))[: max(1, _LOOKED_AT // stack.target.vocab_size)].float()
    warm = [replace(params, temperature=_WARM)] if params.temperature < 1.0 else []
    for options in (params, *warm):
        for factor, words in ((_SHARPER, "the target itself, sharpened"), (1.0, "the target itself")):
            drafter = DraftModel(ScaledModel(stack.target, factor), num_speculative_tokens=1)
            laws = law_from_logits(logits, options), law_from_logits(logits * factor, options)
            at = "" if options is params else f" at temperature {options.temperature:g}"
            stands_in = stack.but(drafter=faults.OneToken(drafter))
            settings.append(Setting(stands_in, options, f"drafted by {words}{at}", [(*laws, True)], _SHARE))
    return settings


def best_setting(control: Control, settings: Sequence[Setting], stack: Stack, params: SamplingParams) -> Setting:
    """Where a fault has room: the user's own stack if it will do."""
    if control.emitted is None:
        drafter = DraftModel(stack.target, num_speculative_tokens=1)
        return Setting(stack.but(drafter=faults.OneToken(drafter)), params, "drafted by the target itself", (), _SHARE)
    own, *others = settings
    best = max(others, key=lambda setting: setting.worth(control))
    return own if _OWN_IS_BETTER * own.worth(control) >= best.worth(control) else best


def drafted(scored: Scored) -> tuple[Tensor, Tensor, list[int], bool] | None:
    """p and q `[tokens, vocab]` of tokens at nodes with a draft, which tokens, and whether they were drawn from q.

    Only the first of them where there are very many entries.
    """
    places = [i for i, one in enumerate(scored.decisions) if one.q is not None or one.candidates]
    places = places[: max(1, _ENTRIES // scored.laws.shape[-1])]
    if not places:
        return None
    p = scored.laws[places]
    rows = []
    for row, place in zip(p, places, strict=True):
        decision = scored.decisions[place]
        if decision.q is not None:
            rows.append(decision.q.to(p))
        else:
            rows.append(torch.zeros_like(row))
            rows[-1][decision.candidates[0]] = 1.0
    return p, torch.stack(rows), places, scored.decisions[places[0]].q is not None
