"""Common mistakes with DFlash 2 heads: the variants that the doctor tries, each with its fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from truedraft.kinds.block.variants import BLOCK
from truedraft.kinds.dflash2.drafter import DFlash2
from truedraft.kinds.dflash2.module import DFlash2Head
from truedraft.measure.variants import Case, Examined, Variant, another_head, changed

_PREDECESSOR, _SUCCESSOR = (f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor"))


def convolutions(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """Makes a head with other coefficients of its convolutions, `[2, taps, ...]` each."""

    def make(head: Any) -> Any:
        sides, weights = (2, head.config.taps, -1), {}
        for name, weight in head.state_dict().items():
            if name.endswith(("_conv.base_kernel", "_conv.kernel_projection.weight")):
                weights[name] = change(weight.view(*sides, weight.shape[-1])).reshape(weight.shape).contiguous()
        return changed(head, {}, weights=weights)

    return make


def without_selector(head: Any) -> Any:
    """With the LM head's choice among the candidates."""
    return changed(head, {}, weights={_SUCCESSOR: torch.zeros_like(head.candidate_selector.successor_codebook)})


def codebooks_exchanged(head: Any) -> Any:
    """With the entries of tokens before for candidates, and the other way round."""
    selector = head.candidate_selector
    weights = {_PREDECESSOR: selector.successor_codebook, _SUCCESSOR: selector.predecessor_codebook}
    return changed(head, {}, weights=weights)


def _weights(what: str) -> Callable[[Case], str]:
    return lambda _: f"{what} in its weights"


_OWN = (
    Variant("taps in the other order", "its convolutions read the rows of a block the wrong way round",
            _weights("reverse the taps of base_kernel and kernel_projection"),
            another_head(convolutions(lambda each: each.flip(1)))),
    Variant("sides exchanged", "its convolutions before and after a layer's parts are exchanged",
            _weights("exchange the sides of base_kernel and kernel_projection"),
            another_head(convolutions(lambda each: each.flip(0)))),
    Variant("predecessors and successors exchanged", "its selector takes tokens before for candidates",
            _weights("exchange predecessor_codebook and successor_codebook"), another_head(codebooks_exchanged)),
    Variant("without the selector", "its selector was trained for another target or other layers",
            lambda _: "train the selector again, or draft without: set successor_codebook to 0",
            another_head(without_selector)),
)  # fmt: skip
DFLASH2 = Examined("a DFlash 2 head", DFlash2, (*_OWN, *BLOCK), DFlash2Head)
