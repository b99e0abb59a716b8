"""Answer one prompt piece by piece, so that Ctrl-C still leaves an answer with its counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from truedraft.core.sampling import SamplingParams

if TYPE_CHECKING:
    from truedraft.engine import Answer, Engine, Piece, Request


def stream_answer(
    engine: Engine, prompt: str | Sequence[int], params: SamplingParams, show: Callable[[Piece], None]
) -> Answer:
    """Answer a prompt and show each piece as it comes.

    Ctrl-C cancels the request; its answer so far comes back with the finish reason "cancelled".

    Raises:
        TruedraftError: the prompt cannot be run, or the request failed.
    """
    request = engine.submit(prompt, params)
    try:
        while True:
            answer = _drain(request, show)
            if answer is not None:
                break
            engine.step()
    except KeyboardInterrupt:
        engine.cancel(request)
        answer = _drain(request, show) or request.answer(request.emitted)
    finally:
        engine.cancel(request)
    if request.error is not None:
        raise request.error
    return answer


def _drain(request: Request, show: Callable[[Piece], None]) -> Answer | None:
    """Show the pieces that wait; returns the answer if it is whole."""
    while request.pieces:
        piece = request.pieces.pop(0)
        show(piece)
        if piece.answer is not None:
            return piece.answer
    return None
