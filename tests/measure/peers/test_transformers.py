"""transformers' generate, asked: its answers, their logprobs and ends, and the distribution that they follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cli.tiny import save_tiny_llama
from relabelled import save_relabelled
from truedraft import Engine, load_model
from truedraft.core.params import SamplingParams
from truedraft.core.probs import probs_from_logits
from truedraft.errors import ModelError, PeerError
from truedraft.measure.peers import transformers as peers
from truedraft.measure.peers.asking import Question, Reply
from truedraft.models.huggingface import HuggingFaceModel

GREEDY = SamplingParams(max_tokens=12)
SAMPLED = SamplingParams(max_tokens=2, temperature=0.8, top_k=3, top_p=0.9, min_p=0.02, ignore_eos=True)
PROMPT = tuple((7 * i * i + 3 * i + 1) % 250 + 1 for i in range(20))
SHORT = (9, 80, 33)
SETTING = peers.AssistedSetting("2 tokens", 2, "constant", 0.0)


@dataclass(frozen=True)
class Pair:
    """A target, ours and transformers' own, and ways of drafting for it."""

    ours: HuggingFaceModel
    stock: PreTrainedModel
    ways: dict[str, peers.Way]

    def peer(self, way: str = "plain", **parts: int) -> peers.Generate:
        return peers.Generate(self.stock, self.ours.eos_token_ids, self.ways[way], **parts)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("generate")
    target = save_tiny_llama(root / "target", seed=1, layers=2)
    draft = noisy(target, root / "draft")
    ours = load_model(target, dtype="float32", fast_paths=False)
    other = save_relabelled(draft, root / "other")
    tokenizers = AutoTokenizer.from_pretrained(target), AutoTokenizer.from_pretrained(other)
    ways = {
        "plain": peers.Way(),
        "lookup": peers.lookup_way(3),
        "assisted": peers.assisted_way(stock(draft), SETTING),
        "universal": peers.universal_way(stock(other), SETTING, *tokenizers),
    }
    return Pair(ours, peers.load_stock(target, ours, None), ways)


def stock(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def noisy(target: str, folder: Path) -> Path:
    """A draft that often agrees with a target."""
    model = stock(Path(target))
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    for file in Path(target).glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def replies(peer: peers.Generate, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Reply]:
    found = []
    for reply in peer.ask([Question(tuple(prompt), params) for prompt in prompts]):
        assert isinstance(reply, Reply), reply
        found.append(reply)
    return found


WAYS = ("plain", "lookup", "assisted", "universal")


@pytest.mark.parametrize("way", WAYS)
def test_greedy_answers_are_the_targets(pair: Pair, way: str) -> None:
    peer = pair.peer(way, together=4)
    expected = [answer.token_ids for answer in Engine(pair.ours).generate([list(PROMPT), list(SHORT)], GREEDY)]
    found = replies(peer, [PROMPT, SHORT], GREEDY)
    assert [list(each.token_ids) for each in found] == expected and len(expected[0]) > 5
    assert peer.facts.gives_ids and peer.facts.more["together"] == (4 if way == "plain" else 1)


def exact(pair: Pair, params: SamplingParams) -> dict[tuple[int, int], float]:
    """The distribution of two tokens, from the stock model's own logits."""

    def law(tokens: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = pair.stock(torch.tensor([tokens])).logits[0, -1:]
        return probs_from_logits(logits.double(), params)[0]

    first = law(PROMPT)
    return {
        (one, two): float(first[one] * second[two])
        for one in first.nonzero()[:, 0].tolist()
        for second in [law([*PROMPT, one])]
        for two in second.nonzero()[:, 0].tolist()
    }


# Across tokenizers transformers leaves the target's distribution: docs/certify_engines.md.
@pytest.mark.parametrize("way", ["plain", "lookup", "assisted"])
def test_sampled_answers_follow_the_target_in_this_order_of_filters(pair: Pair, way: str) -> None:
    """Chi-square over pairs of tokens; seeds are fixed, so it cannot fail by chance. Another law is told apart."""
    peer = pair.peer(way, together=100, seed=3)
    counts = Counter(each.token_ids for each in replies(peer, [PROMPT] * 160, SAMPLED))
    for params, follows in ((SAMPLED, True), (replace(SAMPLED, temperature=2.5), False)):
        law = exact(pair, params)
        assert set(counts) <= set(law) and len(law) > 3
        p_value = chisquare([counts[pair_] for pair_ in law], [160 * p for p in law.values()]).pvalue
        assert (p_value > 1e-3) if follows else (p_value < 1e-3), (params, p_value)


@pytest.mark.parametrize("way", WAYS)
def test_seeds_belong_to_calls(pair: Pair, way: str) -> None:
    params = replace(SAMPLED, max_tokens=6, seed=5)
    alone = pair.peer(way)
    replies(alone, [SHORT], params)  # the first call across tokenizers makes a layer, which draws from the state too
    torch.manual_seed(1)  # another state than a call with this seed would leave
    state = torch.get_rng_state()
    first = replies(alone, [PROMPT, SHORT], params)
    assert torch.equal(torch.get_rng_state(), state)
    assert replies(alone, [PROMPT], params) == first[:1]
    assert replies(alone, [PROMPT] * 6, replace(params, seed=None)) != first[:1] * 6


def test_calls_that_answer_several_take_no_seed(pair: Pair) -> None:
    found = pair.peer(together=2).ask([Question(PROMPT, replace(SAMPLED, seed=5)), Question(PROMPT, SAMPLED)])
    assert isinstance(found[0], PeerError) and "transformers, plain, does not take seed" in str(found[0])
    assert isinstance(found[1], Reply)
    assert replies(pair.peer(together=2, seed=1), [PROMPT] * 4, SAMPLED) == replies(
        pair.peer(together=2, seed=1), [PROMPT] * 4, SAMPLED
    )


@pytest.mark.parametrize("way", WAYS)
def test_logprobs_are_the_models_own(pair: Pair, way: str) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.7, top_k=2, seed=1, logprobs=2, ignore_eos=True)
    (reply,) = replies(pair.peer(way), [PROMPT], params)
    with torch.no_grad():
        logits = pair.stock(torch.tensor([[*PROMPT, *reply.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    expected = torch.log_softmax(logits.double(), dim=-1)
    own = expected.gather(-1, torch.tensor(reply.token_ids)[:, None])[:, 0]
    assert reply.logprobs == pytest.approx(own.tolist(), abs=1e-4) and len(reply.token_ids) == 6
    assert reply.top_logprobs is not None
    for rivals, row in zip(reply.top_logprobs, expected, strict=True):
        assert list(rivals) == row.topk(2).indices.tolist()


@pytest.mark.parametrize("way", WAYS)
def test_answers_end_before_what_ends_them(pair: Pair, way: str) -> None:
    (whole,) = replies(pair.peer(way), [PROMPT], replace(GREEDY, ignore_eos=True))
    end = next(
        token for place, token in enumerate(whole.token_ids) if place > 2 and token not in whole.token_ids[:place]
    )
    cut = whole.token_ids[: whole.token_ids.index(end)]
    (by_stop,) = replies(pair.peer(way), [PROMPT], replace(GREEDY, stop_token_ids=(end,), ignore_eos=True, logprobs=1))
    assert (by_stop.token_ids, by_stop.finish_reason) == (cut, "stop")
    assert by_stop.logprobs is not None and len(by_stop.logprobs) == len(cut)
    (by_eos,) = replies(peers.Generate(pair.stock, (end,), pair.ways[way]), [PROMPT], GREEDY)
    assert (by_eos.token_ids, by_eos.finish_reason) == (cut, "stop")
    assert whole.finish_reason == "length"


def test_options_that_it_does_not_know_are_refused_and_failures_are_errors(pair: Pair) -> None:
    long = SamplingParams(max_tokens=2)
    found = pair.peer().ask(
        [Question(PROMPT, replace(GREEDY, stop=("x",))), Question((1_000_000,), long), Question(SHORT, GREEDY)]
    )
    assert isinstance(found[0], PeerError) and str(found[0]) == "transformers, plain, does not take stop"
    assert isinstance(found[1], PeerError) and "failed (IndexError" in str(found[1])
    assert isinstance(found[2], Reply)


def test_another_tokenizer_says_the_same(pair: Pair, tmp_path: Path) -> None:
    """Relabelled, the greedy answer is the same text."""
    target = save_tiny_llama(tmp_path / "target", seed=1, layers=2)
    other = save_relabelled(Path(target), tmp_path / "other", added=3, seed=2)
    old, new = AutoTokenizer.from_pretrained(target), AutoTokenizer.from_pretrained(other)
    text = "def f(x):"
    assert old(text)["input_ids"] != new(text)["input_ids"] and new.decode(new(text)["input_ids"]) == text
    assert len(new) == len(old) + 3
    answers = [
        tokenizer.decode(
            stock(Path(folder)).generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=12, do_sample=False)[0]
        )
        for folder, tokenizer in ((target, old), (other, new))
    ]
    assert answers[0] == answers[1] and len(answers[0]) > len(text)
    with pytest.raises(ModelError, match="has 0 merges, so 1 cannot be left out"):
        save_relabelled(Path(target), tmp_path / "none", dropped=1)
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        save_relabelled(tmp_path, tmp_path / "none")
