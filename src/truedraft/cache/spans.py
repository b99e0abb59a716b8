"""How many slots a product over keys looks at: a few fixed lengths, so that kernels are reused and add up alike.

oneDNN makes a kernel for every shape, which takes about half a millisecond; a context that grows by a token at every
step would pay that at every step. So products run over more slots than are filled, in steps of 64, and the slots too
many get the weight 0.

The same library adds up products over up to 1,024 keys in one go and longer ones in blocks of 512, which rounds
differently. Up to 512 keys both give the same bits, so lengths in between are taken as 1,088: then a row's result
does not depend on whether its neighbours in the forward lie before or behind that border. Measured bit for bit to
8,192 keys (docs/performance.md); tests hold it.
"""

from __future__ import annotations

_STEP = 64
_ONE_BLOCK = 512
_FIRST_IN_BLOCKS = 1088

WIDEST_GAP = _FIRST_IN_BLOCKS - _ONE_BLOCK
"""Most slots that a span exceeds what it was made for."""


def key_span(slots: int) -> int:
    """The least span that holds so many slots.

    >>> [key_span(slots) for slots in (1, 64, 65, 512, 513, 1089)]
    [64, 64, 128, 512, 1088, 1152]
    """
    if _ONE_BLOCK < slots <= _FIRST_IN_BLOCKS:
        return _FIRST_IN_BLOCKS
    return -(-slots // _STEP) * _STEP
