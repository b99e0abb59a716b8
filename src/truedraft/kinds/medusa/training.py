"""Training of Medusa heads (2401.10774): their configuration, their loss, and their draft trees."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from truedraft.drafters.heads.calibration import COUNTED, FACT, LIKELIEST, Calibration
from truedraft.kinds.medusa.counted_trees import CountedTree, count_trees, survival_of
from truedraft.kinds.medusa.drafter import Medusa
from truedraft.kinds.medusa.guess_trees import GuessTrees, fixed_trees
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.kinds.medusa.options import MedusaRunOptions, MedusaSizeOptions
from truedraft.measure import BUDGETS, TREE_TEMPERATURES
from truedraft.models.base import LanguageModel
from truedraft.models.lm_head import LmHead
from truedraft.options import check_positive, check_share, check_whole
from truedraft.training.evaluate import EngineRound
from truedraft.training.head_config import Calibrated, HeadTrainingConfig, JointConfig
from truedraft.training.losses import CrossEntropy, DistillationLoss, ForwardKL, Mixture
from truedraft.training.optimizer import OptimizerConfig
from truedraft.training.report import HeadReport, HeadResult, Rows
from truedraft.training.texts.self_distillation import SelfDistillationData


@dataclass(frozen=True)
class MedusaTrainingConfig(MedusaSizeOptions, MedusaRunOptions, HeadTrainingConfig):
    """Configuration of a training of Medusa heads; raises `OptionError` for a value out of its range.

    The loss is (1 - law_share) CE(token) + law_share KL(p || q). Medusa 2401.10774, section 2.2.1, uses the token only;
    a whole distribution has more information than one draw.
    """

    head = MedusaHeads
    decisive = HeadTrainingConfig.decisive | {"heads", "layers", "reads_token", "law_share"}

    @classmethod
    def from_options(cls, common: Mapping[str, Any], more: Any = None) -> Self:
        check_positive("backbone_rate", more.backbone_rate)
        backbone = OptimizerConfig(more.backbone_rate, more.backbone_rate, matrix_weight_decay=0.0)
        joint = JointConfig(steps=more.joint_steps, lora_rank=more.lora_rank, backbone=backbone)
        return cls(**common, stage=more.stage, joint=joint)

    @classmethod
    def describe(cls, result: HeadResult) -> Iterator[str | Rows]:
        yield from _described(result.report)
        if result.joint is None:
            return
        joint = result.joint
        trained = f"LoRA of rank {joint.lora_rank}, merged" if joint.lora_rank else "all weights"
        yield (
            f"the target was trained too ({trained}): on {joint.loss_tokens:,} held-out tokens its own loss was "
            f"{joint.loss_before:.4f} nats per token, and is {joint.loss_after:.4f}"
        )
        yield "before, with the target as it was:"
        yield from _described(joint.before)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("heads", "layers"):
            check_whole(name, getattr(self, name), 1)
        check_share("law_share", self.law_share)

    def sizes(self, width: int, vocab_size: int) -> MedusaConfig:
        return MedusaConfig(width, vocab_size, self.heads, self.layers, self.tied, self.reads_token)

    @property
    def distillation_loss(self) -> DistillationLoss:
        if self.law_share == 1.0:
            return ForwardKL()
        if self.law_share == 0.0:
            return CrossEntropy()
        return Mixture(((1.0 - self.law_share, CrossEntropy()), (self.law_share, ForwardKL())))

    def calibrate(
        self,
        head: MedusaHeads,
        lm_head: LmHead,
        target: LanguageModel,
        text: SelfDistillationData,
        on_progress: Callable[[str, int, int], None],
    ) -> Calibrated:
        del target
        on_progress("choosing trees", 0, 1)
        counted = count_trees(head, lm_head, text)
        on_progress("choosing trees", 1, 1)
        facts = {
            "trees": {kind: each.as_dict() for kind, each in counted.items()},
            FACT: {kind: survival.depths for kind, survival in survival_of(counted).items()},
        }
        return Calibrated(facts, _rounds(head, counted), {kind: each.tree for kind, each in counted.items()})


def _rounds(heads: MedusaHeads, counted: Mapping[str, CountedTree]) -> list[EngineRound]:
    """Trees chosen at each step, and counted ones, greedy and at temperature 1."""
    ways = {
        LIKELIEST: GuessTrees(heads.reach, calibration=Calibration(survival_of(counted))),
        COUNTED: fixed_trees({kind: each.tree for kind, each in counted.items()}),
    }
    found = []
    for kind, temperature in TREE_TEMPERATURES.items():
        tree = counted[kind]
        sizes = sorted({min(nodes, len(tree.tree)) for nodes in BUDGETS})
        promised = [(LIKELIEST, nodes, tree.promised_by_likeliest(nodes)) for nodes in BUDGETS]
        promised += [(COUNTED, nodes, tree.promised(nodes)) for nodes in sizes]
        for way, nodes, tokens in promised:
            new_drafter = functools.partial(Medusa, heads, ways[way], nodes=nodes)
            found.append(EngineRound(temperature, new_drafter, {"trees": way, "nodes": nodes, "promised": tokens}))
    return found


_SERVED = {"greedy": "at temperature 0", "sampled": "at temperature 1"}
_TREES = {LIKELIEST: "chosen at each step", COUNTED: "counted, one for all"}


def _described(heads: HeadReport) -> Iterator[str | Rows]:
    trees = heads.facts["trees"]
    for kind, counted in trees.items():
        shares = ", ".join(f"{ranks[0]:.2f} / {sum(ranks[:5]):.2f}" for ranks in counted["rank_accuracy"])
        yield f"heads right {_SERVED[kind]} with their first guess / one of five: {shares}"
    yield "tokens per target call: measured in the engine, promised by the trees, and as if heads erred independently"
    yield f"promised and independent: on {heads.promised_on}; other text gives more or less"
    rows: list[Sequence[str]] = [("temperature", "nodes", "trees", "measured", "promised", "independent")]
    for each in heads.evaluations:
        counted, about = trees["sampled" if each.temperature else "greedy"], each.about
        products = {promise["nodes"]: f"{promise['product']:.2f}" for promise in counted["promises"]}
        length = f"{each.stats.mean_acceptance_length:.2f}"
        by_products = products.get(about["nodes"], "") if about["trees"] == COUNTED else ""
        way, promised = _TREES[about["trees"]], f"{about['promised']:.2f}"
        rows.append((f"{each.temperature:g}", str(about["nodes"]), way, length, promised, by_products))
    yield rows
    for kind, counted in trees.items():
        if counted["chosen"] == COUNTED:
            yield f"{_SERVED[kind]} the counted tree is used: on text that neither was fitted to it gave more"
