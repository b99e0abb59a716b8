"""DFlash 2 by its published formulas, slowly: a row, a tap and a candidate at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from support.block_reference import BlockReference


class DFlash2Reference(BlockReference):
    """A `BlockReference` with convolutions along the block, and a selector of tokens."""

    def block(self, text: Sequence[int]) -> list[Tensor]:
        config, anchor = self.made.config, len(text) - 1
        with torch.no_grad():
            states = self.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        table = self.model.get_input_embeddings().weight.detach()
        context = [
            self.norm("hidden_norm", self.product("fc", torch.cat([states[n + 1][0, at] for n in config.layers])))
            for at in range(anchor)
        ]
        rows = [table[text[-1]], *[table[config.mask_id]] * (config.block - 1)]
        for number in range(config.depth):
            name = f"layers.{number}"
            normed = [self.norm(f"{name}.input_layernorm", each) for each in rows]
            entering = self.convolved(f"{name}.attention_conv", 0, normed, normed)
            keys = [self.keys(f"{name}.self_attn", each, at) for at, each in enumerate([*context, *entering])]
            mixed = [
                self.attention(f"{name}.self_attn", each, anchor + at, self.seen(number, anchor, at, keys))
                for at, each in enumerate(entering)
            ]
            added = self.convolved(f"{name}.attention_conv", 1, mixed, normed)
            rows = [row + each for row, each in zip(rows, added, strict=True)]
            normed = [self.norm(f"{name}.post_attention_layernorm", each) for each in rows]
            mixed = [self.mlp(name, each) for each in self.convolved(f"{name}.mlp_conv", 0, normed, normed)]
            added = self.convolved(f"{name}.mlp_conv", 1, mixed, normed)
            rows = [row + each for row, each in zip(rows, added, strict=True)]
        return [self.norm("norm", each) for each in rows[1:]]

    def convolved(self, name: str, side: int, rows: Sequence[Tensor], reads: Sequence[Tensor]) -> list[Tensor]:
        """Rows of a block, by the coefficients of one side; the corrections come of `reads`."""
        config, base = self.made.config, self.weights[f"{name}.base_kernel"]
        groups, found = config.width // config.group, []
        for at, read in enumerate(reads):
            made, delta = torch.zeros(config.width), self.product(f"{name}.kernel_projection", read)
            for tap in range(min(config.taps, at + 1)):
                first = (side * config.taps + tap) * groups
                for entry in range(config.width):
                    own = base[side, tap, entry] + delta[first + entry // config.group]
                    made[entry] += own * rows[at - tap][entry]
            found.append(made)
        return found

    def draft_logits(self, text: Sequence[int], path: Sequence[int]) -> tuple[Tensor, Tensor]:
        x, before = self.block(text)[len(path)], [text[-1], *path][-1]
        scores = self.scores(x)
        found = torch.full_like(scores, -torch.inf)
        for candidate in scores.topk(self.made.config.candidates).indices.tolist():
            found[candidate] = scores[candidate] + self.edge(x, before, candidate)
        return found, torch.zeros(())

    def scores(self, x: Tensor) -> Tensor:
        """Of the LM head."""
        return self.weights.get("lm_head.weight", self.model.get_output_embeddings().weight.detach()) @ x

    def edge(self, x: Tensor, before: int, candidate: int) -> Tensor:
        read = self.product("candidate_selector.hidden_projection", x)
        read = read * self.weights["candidate_selector.predecessor_codebook"][before]
        return (read * self.weights["candidate_selector.successor_codebook"][candidate]).sum()
