"""Block drafters from the papers' pages, slowly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from support.layer_heads import Page
from truedraft.kinds.block.module import BlockHead


class BlockReference(Page):
    """Drafts by the page: no cache, no packing; context and block are computed anew, row by row.

    Args:
        model: the target, as transformers runs it.
        made: the head.
    """

    made: BlockHead

    def keys(self, name: str, x: Tensor, position: int) -> tuple[list[Tensor], list[Tensor]]:
        """Of each head of keys and values."""
        count = self.made.config.kv_heads
        key, value = (self.product(f"{name}.{each}_proj", x).view(count, -1) for each in "kv")
        return [self.turned(self.norm(f"{name}.k_norm", each), position) for each in key], list(value)

    def block(self, text: Sequence[int]) -> list[Tensor]:
        """What enters the LM head at each token that is guessed behind a text, whose last token is the anchor."""
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
            name = f"layers.{number}.self_attn"
            normed = [self.norm(f"layers.{number}.input_layernorm", each) for each in rows]
            seen = [self.keys(name, each, at) for at, each in enumerate([*context, *normed])]
            rows = [
                self.layer(number, row, entering, anchor + at, seen)
                for at, (row, entering) in enumerate(zip(rows, normed, strict=True))
            ]
        return [self.norm("norm", each) for each in (rows if config.from_anchor else rows[1:])]

    def layer(self, number: int, row: Tensor, entering: Tensor, position: int, seen: Sequence[tuple]) -> Tensor:
        name = f"layers.{number}"
        x = row + self.attention(f"{name}.self_attn", entering, position, seen)
        return x + self.mlp(name, self.norm(f"{name}.post_attention_layernorm", x))

    def attention(self, name: str, entering: Tensor, position: int, seen: Sequence[tuple]) -> Tensor:
        config = self.made.config
        query, mixed = self.product(f"{name}.q_proj", entering).view(config.heads, -1), []
        for head in range(config.heads):
            own, shared = self.norm(f"{name}.q_norm", query[head]), head * config.kv_heads // config.heads
            own = self.turned(own, position)
            scores = torch.stack([own @ keys[shared] for keys, _ in seen]) / math.sqrt(config.head)
            mixed.append(sum(w * values[shared] for w, (_, values) in zip(scores.softmax(0), seen, strict=True)))
        return self.product(f"{name}.o_proj", torch.cat(mixed))

    def draft_logits(self, text: Sequence[int], path: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of the token behind a text and drafted tokens: logits over the draft's ids, and of its acceptance."""
        config, weights = self.made.config, self.weights
        rows, state = self.block(text), torch.zeros(config.markov)
        for x, token in zip(rows, [text[-1], *path], strict=False):
            own = weights["lm_head.weight"] if config.own_output else self.model.get_output_embeddings().weight.detach()
            logits, reads = own @ x, [x]
            if config.markov:
                before = weights["markov_head.markov_w1.weight"][token]
                added = before
                if config.markov_kind == "gated":
                    gate = self.product("markov_head.gate_proj", torch.cat([x, before]))
                    added = torch.sigmoid(gate + weights["markov_head.gate_proj.bias"]) * before
                if config.markov_kind == "rnn":
                    made = self.product("markov_head.joint_proj", torch.cat([state, before, x]))
                    made = (made + weights["markov_head.joint_proj.bias"]).view(3, -1)
                    open_ = torch.sigmoid(made[0])
                    state = open_ * state + (1 - open_) * torch.tanh(made[1])
                    added = torch.tanh(made[2])
                logits = logits + self.product("markov_head.markov_w2", added)
                reads += [before] * config.confidence_reads_token
            said = torch.zeros(())
            if config.confidence:
                said = (self.product("confidence_head.proj", torch.cat(reads)) + weights["confidence_head.proj.bias"])[
                    0
                ]
        return logits, said

    def logits(self, text: Sequence[int], path: Sequence[int]) -> Tensor:
        """The same over the target's whole vocabulary."""
        return self.whole(self.draft_logits(text, path)[0])
