"""Guesses of heads under coupled noise: the tokens that the target's own noise makes likeliest."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from truedraft.core.noise import Noise
from truedraft.models.ranking import Likeliest


def coupled_guesses(logits: Tensor, temperatures: Sequence[float], noise: Sequence[Noise], ranks: int) -> Likeliest:
    """The likeliest choices of a target that draws by coupled noise, as far as heads know (arXiv 2408.07978).

    The target's choice is argmax(log p + G), with noise G that is known before anything is drafted (DESIGN section 2).
    A head's own candidate for it would be argmax(log q + G) with its law q at the request's temperature T, which is
    the argmax of its logits plus T G. But a head does not know the tokens between, so its law is a mixture: the
    target's is sharper, and its noise decides less often. So the noise is weighed by `noise_weight`, and the softmax of
    what comes out stands for the probability that a token is the target's choice.

    Top-k, top-p and min-p are not asked for: a token that they take from the head's law may well be in the target's,
    and acceptance was measured to be the same with and without them.

    Args:
        logits: `[depth, rows, vocab]`: row 0 of the first axis guesses the first token that the step decides.
        temperatures: of the rows' requests, above 0.
        noise: of each row's request at this step; without Gumbel noise its logits stay as they are.
        ranks: guesses of each head, at most `vocab`.

    Returns:
        The guesses `[depth, rows, ranks]`, on the device of the logits; a row depends on itself alone. The host does
        not wait.
    """
    depth, rows, vocab = logits.shape
    scores = logits.float().clone()
    for row, (temperature, own) in enumerate(zip(temperatures, noise, strict=True)):
        for head in range(depth):
            gumbel = own.gumbel(head, vocab, logits.device)
            if gumbel is not None:
                scores[head, row].add_(gumbel, alpha=noise_weight(temperature))
    return Likeliest.of(scores.flatten(0, 1), ranks).view(depth, rows)


def noise_weight(temperature: float) -> float:
    """How much a target's noise counts beside a head's logits: T min(T, 1).

    T would be right if the head's law were the target's. Below 1, fitting the weight to the choices of the embedded
    target gave about T squared for every head (0.5 at T = 0.7, 0.9 at T = 1), and more accepted tokens than T. At T = 0
    it vanishes, as the noise of greedy requests does.
    """
    return temperature * min(temperature, 1.0)
