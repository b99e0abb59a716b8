"""Tokens taken out of laws, for many rows at once and without a look at the tokens.

A law is a tensor `[..., vocab]`; the tokens to take out of each row are `[..., tokens]`, int64. A token that is named
twice is taken out once.
"""

from __future__ import annotations

from torch import Tensor


def without_tokens(law: Tensor, tokens: Tensor) -> Tensor:
    """Laws that lost tokens, scaled to sum to 1; all zeros where nothing else had mass."""
    rest = law.scatter(-1, tokens, 0.0)
    mass = rest.sum(dim=-1, keepdim=True)
    return rest.div_(mass + (mass <= 0.0).to(rest.dtype))


def residual_of_candidates(p: Tensor, tokens: Tensor) -> Tensor:
    """What is left of target laws p after deterministic candidates were rejected, one after another.

    A candidate has a one-hot law, so rejecting it takes it out of p (DESIGN section 4); where nothing else had mass a
    rejection has probability 0 up to rounding, and p itself stays.
    """
    rest = p.scatter(-1, tokens, 0.0)
    mass = rest.sum(dim=-1, keepdim=True)
    # Arithmetic in place of a choice: no answer has to come from the device.
    empty = (mass <= 0.0).to(rest.dtype)
    return rest.div_(mass + empty).addcmul_(p, empty)
