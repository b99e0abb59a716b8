"""Planted faults are what they claim: their laws, their sizes, and that sound engines pass the same check."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from support.faulty_engines import FAULTS, LEAST, SOUND, Planted, Seen, Size, beginnings, embedded_models, named
from support.faulty_parts import llama_cpp_filters, nucleus_off_by_one
from support.faulty_peer import FaultyPeer
from support.pairwise import some_of
from truedraft import SamplingParams
from truedraft.certify import faults
from truedraft.certify.faults import as_bfloat16_draws
from truedraft.core.probs import probs_from_logits, total_variation
from truedraft.core.verdict import Origin
from truedraft.measure.peers.asking import Question, Reply

OF_TOKENS = some_of(
    [fault for fault in FAULTS if fault.law is not None],
    ["temperature twice", "top-p drops the crossing one", "residual replaced by p", "cut by its own probability",
     "stale state loses an accepted token"],
)  # fmt: skip
AT_STOPS = [fault for fault in FAULTS if fault.law is None]
AT_THE_EDGE = {"top-p keeps one too many", "top-p drops the crossing one"}
SIGMAS = 4.0
ROUNDING = 1e-4
"""Of a token's probability, between a step of the engine and a forward over its text."""


def sigmas(seen: Seen, law: Tensor, events: Tensor) -> float:
    """How far the number of tokens in events is from what a law says, in standard deviations.

    Given what came before each token, its law says how likely its event is: the sum of what was more than that is a
    martingale, whose variance is the sum of what each law says.

    Args:
        seen: the tokens.
        law: `[tokens, vocab]`.
        events: `[tokens, vocab]`: for each token the ids that count, chosen without a look at it.
    """
    chance = (law.double() * events).sum(dim=-1).clamp(0.0, 1.0)
    came = events.gather(-1, seen.tokens[:, None])[:, 0].double()
    spread = float((chance * (1.0 - chance) + ROUNDING).sum().sqrt())
    return float((came - chance).sum()) / spread


@pytest.mark.parametrize("fault", OF_TOKENS)
def test_a_fault_emits_what_its_law_says_and_is_as_large_as_it_must_be(fault: Planted) -> None:
    seen = fault.seen(embedded_models(), rounds=2 if fault.name == "shared noise" else 1)  # one round shows others
    assert fault.law is not None
    law = fault.law(seen, fault.params)
    assert torch.allclose(law.sum(dim=-1), torch.ones(len(law)), atol=1e-4)
    events = law > seen.p
    assert abs(sigmas(seen, law, events)) < SIGMAS
    assert abs(sigmas(seen, law, seen.q > seen.p)) < SIGMAS
    assert sigmas(seen, seen.p, events) > SIGMAS  # and not what a sound engine would emit
    size = Size.of(fault, seen, law)
    assert size.over_touched >= LEAST
    assert size.over_all >= LEAST or fault.name in AT_THE_EDGE


@pytest.mark.parametrize("sound", some_of(SOUND, ["draft", "tree", "filters in llama.cpp's order"]))
def test_sound_engines_emit_what_they_should(sound: Planted) -> None:
    seen = sound.seen(embedded_models())
    vocab = seen.p.shape[-1]
    likely = seen.p == seen.p.amax(dim=-1, keepdim=True)
    for events in (seen.q > seen.p, likely, (torch.arange(vocab) % 2 == 0).expand_as(seen.p)):
        assert abs(sigmas(seen, seen.p, events)) < SIGMAS
    if sound.name != "bfloat16":
        assert float(seen.p.gather(-1, seen.tokens[:, None]).min()) > 0.0


# ------------------------------------------------------------------------------------------------ laws by hand


def test_shared_noise_by_hand() -> None:
    """10/60/30 drafted from 50/25/25: 0 is rejected with 4/5, leaving 7 to 1 of 0.35 and 0.05.

    Given that 0 came first, 1 starts at 1/4 / (7/8) = 2/7 and 2 at 1/4 / (1/8) = 2: S is 3/2 when 2 starts, so 1 came
    by then with 3/5, and of the other 2/5 it gets 7/8: 19/20 in place of 7/8. The published 10.2/63.0/26.8 of a target
    of 10/60/30 is what such a draft gives.
    """
    p, q = torch.tensor([[0.1, 0.6, 0.3]]), torch.tensor([[0.5, 0.25, 0.25]])
    assert faults.ONE_GUMBEL.emitted(p, q)[0].tolist() == pytest.approx([0.1, 0.25 + 0.4 * 0.95, 0.25 + 0.4 * 0.05])


def test_a_nucleus_off_by_one_by_hand() -> None:
    p = torch.tensor([[0.1, 0.5, 0.25, 0.15]])
    assert nucleus_off_by_one(p, 0.6, 0)[0].tolist() == pytest.approx([0.0, 2 / 3, 1 / 3, 0.0])
    assert nucleus_off_by_one(p, 0.6, 1)[0].tolist() == pytest.approx([0.0, 0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9])
    assert nucleus_off_by_one(p, 0.6, -1)[0].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert nucleus_off_by_one(p, 0.3, -1)[0].tolist() == [0.0, 1.0, 0.0, 0.0]  # one token is always left
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    whole = probs_from_logits(logits, SamplingParams(temperature=1.0))
    cut = probs_from_logits(logits, SamplingParams(temperature=1.0, top_p=0.6))
    assert torch.allclose(nucleus_off_by_one(whole, 0.6, 0), cut, atol=1e-6)


def test_filters_before_the_temperature_by_hand() -> None:
    """At temperature 1 the first two hold 0.6; at 2 all would be needed: sqrt(0.45) to sqrt(0.25) are left."""
    p = torch.tensor([[0.45, 0.25, 0.2, 0.1]])
    found = llama_cpp_filters(p, SamplingParams(temperature=2.0, top_p=0.6))
    assert found[0].tolist() == pytest.approx([0.45**0.5 / (0.45**0.5 + 0.5), 0.5 / (0.45**0.5 + 0.5), 0.0, 0.0])


def test_sums_in_bfloat16_lose_small_cells() -> None:
    q = torch.cat([torch.tensor([0.5]), torch.full((500,), 0.001)])[None]
    drawn = as_bfloat16_draws(q)
    assert float(drawn.sum()) == pytest.approx(1.0)
    assert int((drawn > 0).sum()) < 200
    assert float(total_variation(drawn, q.double())) > 0.2


# ------------------------------------------------------------------------------------------------ stop texts


def stopped_questions() -> list[Question]:
    """Without seeds: each engine draws by the order in which it is asked."""
    params = replace(AT_STOPS[0].params, max_tokens=24)
    return [Question(prompt, params) for prompt in beginnings()]


def asked(planted: Planted, questions: list[Question]) -> list[Reply]:
    replies = FaultyPeer(planted).ask(questions)
    assert all(isinstance(reply, Reply) for reply in replies)
    return [reply for reply in replies if isinstance(reply, Reply)]


@pytest.mark.parametrize("fault", AT_STOPS, ids=lambda fault: fault.name)
def test_a_stop_text_is_missed_just_where_an_accepted_token_completes_it(fault: Planted) -> None:
    questions = stopped_questions()
    right, wrong = asked(named("draft"), questions), asked(fault, questions)
    engine = named("draft").parts(embedded_models(), fault.params).engine(32)
    whole = engine.generate([list(each.prompt) for each in questions], replace(questions[0].params, stop=()))
    tokenizer = embedded_models().target.tokenizer
    assert tokenizer is not None
    missed = 0
    for sound, faulty, answer in zip(right, wrong, whole, strict=True):
        assert sound.text is not None
        assert faulty.text is not None
        texts = [tokenizer.decode(answer.token_ids[: place + 1]) for place in range(len(answer.token_ids))]
        completing = next((place for place, text in enumerate(texts) if "\n" in text), None)
        if completing is None or answer.origins[completing] is not Origin.ACCEPTED:
            assert (faulty.token_ids, faulty.text, faulty.finish_reason) == (
                sound.token_ids,
                sound.text,
                sound.finish_reason,
            )
        else:
            missed += 1
            assert sound.finish_reason == "stop"
            assert "\n" not in sound.text
            assert faulty.text.startswith(sound.text + "\n")
            assert len(faulty.token_ids) > completing
        assert list(faulty.token_ids) == answer.token_ids[: len(faulty.token_ids)]
    assert missed / len(questions) >= LEAST
