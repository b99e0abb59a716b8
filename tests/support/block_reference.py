"""Block drafters from the papers' pages, slowly, and heads with random weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from support.tiny_models import CONTEXT, VOCAB, build
from truedraft.heads import BlockConfig, BlockHead

Head = TypeVar("Head", bound=BlockHead)


def as_transformers_runs_it() -> PreTrainedModel:
    """A target of three layers."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return build(config, seed=3, spread=0.15)


def random_block(kind: type[Head], config: BlockConfig) -> Head:
    """Random weights; of a reduced vocabulary every second id, as far as there are."""
    made, generator = kind(config), torch.Generator().manual_seed(5)
    for weight in made.parameters():
        weight.data.normal_(1.0 if weight.dim() == 1 else 0.0, 0.2, generator=generator)
    if made.draft_ids is not None:
        made.draft_ids.copy_(torch.arange(len(made.draft_ids)) * 2 + 1)
    return made.requires_grad_(False)


class BlockReference:
    """Drafts by the page: no cache, no packing; context and block are computed anew, row by row.

    Args:
        model: the target, as transformers runs it.
        made: the head.
    """

    def __init__(self, model: PreTrainedModel, made: BlockHead) -> None:
        self.model, self.made = model, made

    @property
    def weights(self) -> dict[str, Tensor]:
        return dict(self.made.named_parameters())

    def product(self, name: str, x: Tensor) -> Tensor:
        return self.weights[f"{name}.weight"] @ x

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean() + self.made.config.eps) * self.weights[f"{name}.weight"]

    def turned(self, x: Tensor, position: int) -> Tensor:
        half = len(x) // 2
        angles = position / self.made.config.rope["rope_theta"] ** (torch.arange(half) / half)
        a, b = x[:half], x[half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])

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
        config, name = self.made.config, f"layers.{number}"
        query, mixed = self.product(f"{name}.self_attn.q_proj", entering).view(config.heads, -1), []
        for head in range(config.heads):
            own, shared = self.norm(f"{name}.self_attn.q_norm", query[head]), head * config.kv_heads // config.heads
            own = self.turned(own, position)
            scores = torch.stack([own @ keys[shared] for keys, _ in seen]) / math.sqrt(config.head)
            mixed.append(sum(w * values[shared] for w, (_, values) in zip(scores.softmax(0), seen, strict=True)))
        x = row + self.product(f"{name}.self_attn.o_proj", torch.cat(mixed))
        entering = self.norm(f"{name}.post_attention_layernorm", x)
        gate, up = (self.product(f"{name}.mlp.{each}_proj", entering) for each in ("gate", "up"))
        return x + self.product(f"{name}.mlp.down_proj", gate * torch.sigmoid(gate) * up)

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
        config, own = self.made.config, self.draft_logits(text, path)[0]
        if not config.draft_vocab:
            return own
        whole = torch.full((config.vocab_size,), -torch.inf)
        whole[self.made.draft_ids] = own
        return whole
