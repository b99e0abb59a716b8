"""Common mistakes with EAGLE-3 and P-EAGLE heads: the variants that the doctor tries, each with its fix."""

from __future__ import annotations

from typing import Any

from truedraft.kinds.eagle.drafter import Eagle3, PEagle
from truedraft.kinds.eagle.module import Eagle3Head, PEagleHead
from truedraft.measure.variants import LAYERS, Examined, Variant, another_head, changed, flipped, resized, set_to


def inputs_exchanged(head: Any) -> Any:
    """With hidden state and embedding exchanged in the attention's input."""
    names = [f"midlayer.self_attn.{name}_proj.weight" for name in "qkv"]
    state = head.state_dict()
    return changed(head, {}, weights={name: state[name].roll(head.config.width, 1).contiguous() for name in names})


VARIANTS = (
    Variant("norm_before_residual", "its residual stream begins on the wrong side of hidden_norm",
            set_to("norm_before_residual"), flipped("norm_before_residual")),
    Variant("norm_output", "what it gives to its next step is on the wrong side of its last norm",
            set_to("norm_output"), flipped("norm_output")),
    Variant("without fc_norm", "it was trained without a norm for each layer", set_to("fc_norm"),
            resized(r"^fc_norm\.", fc_norm=False)),
    Variant("without norm_before_fc", "it was trained without a norm before fc", set_to("norm_before_fc"),
            resized(r"^input_norm\.", norm_before_fc=False)),
    Variant("inputs exchanged", "its attention reads vector and embedding in the other order",
            lambda _: "exchange the halves of the columns of q_proj, k_proj and v_proj",
            another_head(inputs_exchanged)),
    *LAYERS,
)  # fmt: skip
EAGLE = Examined("an EAGLE-3 head", Eagle3, VARIANTS, Eagle3Head)
P_EAGLE = Examined("a P-EAGLE head", PEagle, VARIANTS, PEagleHead)
