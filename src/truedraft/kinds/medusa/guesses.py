"""Medusa heads' guesses for the requests of a step, in one recorded graph if the target is recorded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.noise import Noise, gumbel_key, signed
from truedraft.core.top_k import TopK
from truedraft.kinds.medusa.guess_trees import coupled_guesses, keyed_guesses, noise_weight
from truedraft.kinds.medusa.module import MedusaRunner
from truedraft.models.backends.graphs.replay import Outputs, RecordedFunction, Recorder


class MedusaGuesses:
    """Guesses of the heads from hidden states of the target and the tokens drawn from them; they stay on the device.

    Recorded heads always compute the maximum number of guesses, so that all budgets share a graph.

    Args:
        recorder: makes the graphs; None: nothing is recorded.
    """

    def __init__(self, runner: MedusaRunner, depth: int, ranks: int, recorder: Recorder | None) -> None:
        self._runner = runner
        self._most = None if recorder is None else (depth, ranks)
        self._likeliest = RecordedFunction(self._find_likeliest, recorder)
        self._coupled = RecordedFunction(self._find_coupled, recorder)

    @property
    def warmups(self) -> int:
        """Number of calls so far that were slower than later ones of the same shape."""
        return self._likeliest.warmups + self._coupled.warmups

    def likeliest(self, hidden: Tensor, drawn: Tensor, depth: int, ranks: int) -> TopK:
        """The likeliest tokens by the heads' own distributions.

        Args:
            hidden: `[rows, width]`: inputs of the target's LM head; a row's guesses depend only on it.
            drawn: `[rows]`, int64: the tokens that were drawn from them.

        Returns:
            `[depth or more, rows, ranks or more]`, on the target's device.
        """
        return _by_head(self._likeliest((hidden, drawn), *(self._most or (depth, ranks))))

    def coupled(
        self,
        hidden: Tensor,
        drawn: Tensor,
        temperatures: Sequence[float],
        noise: Sequence[Noise],
        depth: int,
        ranks: int,
    ) -> TopK:
        """The likeliest choices of a target that draws by coupled noise, see `coupled_guesses`.

        Args:
            hidden: as of `likeliest`, as are `drawn`, `depth`, `ranks` and the result.
            temperatures: of the rows' requests, above 0.
        """
        most = self._most
        keys = [] if most is None else [gumbel_key(own, head) for own in noise for head in range(most[0])]
        known = [signed(key) for key in keys if key is not None]
        if most is None or len(known) < len(keys):
            return coupled_guesses(self._runner.logits(hidden, depth, drawn), temperatures, noise, ranks)
        weights = transfers.upload([noise_weight(each) for each in temperatures], hidden.device, torch.float64)
        of_heads = transfers.upload(np.array(known).reshape(len(noise), -1), hidden.device)
        return _by_head(self._coupled((hidden, drawn, weights, of_heads), *most))

    def _find_likeliest(self, hidden: Tensor, drawn: Tensor, depth: int, ranks: int) -> Outputs:
        return _by_row(self._runner.likeliest(hidden, depth, ranks, drawn))

    def _find_coupled(
        self, hidden: Tensor, drawn: Tensor, weights: Tensor, keys: Tensor, depth: int, ranks: int
    ) -> Outputs:
        return _by_row(keyed_guesses(self._runner.logits(hidden, depth, drawn), weights, keys, ranks))


def _by_row(guesses: TopK) -> Outputs:
    """Ids and log probabilities `[rows, depth, ranks]` of guesses `[depth, rows, ranks]`."""
    return guesses.ids.transpose(0, 1), guesses.log_probs.transpose(0, 1)


def _by_head(outputs: Outputs) -> TopK:
    """The inverse of `_by_row`."""
    ids, log_probs = (each.transpose(0, 1) for each in outputs)
    return TopK(ids, log_probs)
