"""`truedraft doctor`: what it prints, its exit status, what it writes, and a server by its metrics."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
import torch

from cli.tiny import Run
from measure.peers.scripted_server import Made, scripted
from truedraft.errors import PeerError
from truedraft.kinds.redrafter.module import RedrafterHead
from truedraft.measure.peers.calling import Caller
from truedraft.measure.peers.endpoint import served_acceptance
from truedraft.models.embedded import embedded_heads

WORDS = ("--model", "embedded:target", "--limit", "14", "--tokens", "12")
METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",position="0"} 1.7e9
"""


@pytest.mark.slow
def test_a_fault_is_named_and_mended(run: Run, tmp_path: Path) -> None:
    head = RedrafterHead.load(embedded_heads("redrafter"))
    head.config = replace(head.config, scaled=False)
    head.save(tmp_path / "planted", head.record, dtype=torch.float32)
    planted, fixed = str(tmp_path / "planted"), str(tmp_path / "fixed")
    result = run("doctor", *WORDS, "--drafter", planted, "--fix", fixed, "--json")
    assert result.status == 1, result.err
    record = result.record
    assert [each["name"] for each in record["faults"]] == ["embeddings scaled or not"] and not record["sound"]
    assert "set scaled to true in config.json" in record["diagnosis"] and record["diagnosis"] in result.out
    assert record["best"]["0"]["value"] > record["given"]["0"]["value"] and record["written"] == fixed
    assert f"truedraft doctor --model embedded:target --drafter {fixed}" in result.out
    assert all(each.dtype is torch.float32 for each in RedrafterHead.load(fixed).parameters()), "as they were"
    again = run("doctor", *WORDS, "--drafter", f"redrafter:{fixed}", "--json")
    assert again.status == 0 and again.record["sound"]
    assert again.record["given"]["0"] == pytest.approx(record["best"]["0"])
    assert again.record["diagnosis"].startswith("sound: no variant is better; expect ")
    tried = {each["name"]: each for each in again.record["variants"]}
    assert not any(each["better"] for each in tried.values())
    assert tried["LM head of the target"]["reason"] and tried["LM head of the target"]["gain"] is None


def test_what_is_sound_is_not_mended(run: Run, tmp_path: Path) -> None:
    result = run("doctor", *WORDS, "--drafter", "embedded:redrafter", "--fix", str(tmp_path / "new"))
    assert result.status == 0 and "nothing is written" in result.out and not (tmp_path / "new").exists()
    assert "as it is given" in result.out and "accepted by position, greedy: " in result.out


def test_a_server_below_its_card(run: Run, tmp_path: Path) -> None:
    about = {"kind": "redrafter", "target": {"name": "t", "fingerprint": "f"}}
    (tmp_path / "config.json").write_text(json.dumps(about))
    measured = ((0.0, 2.9), (1.0, 2.8), (1.0, 2.4))  # the last of a chain, which is what a server may draft
    served = [{"temperature": at, "mean_acceptance_length": tokens} for at, tokens in measured]
    (tmp_path / "facts.json").write_text(json.dumps({"served": served}))
    with scripted() as server:
        server.handlers["/metrics"] = lambda asked: Made(METRICS.encode())
        below = run("doctor", "--url", server.url, "--drafter", str(tmp_path), "--json")
        alone = run("doctor", "--url", server.url, "--json")
        shipped = run("doctor", "--url", server.url, "--drafter", "embedded:redrafter")
        refused = run("doctor", "--url", server.url, "--fix", str(tmp_path / "new"))
    assert below.status == 1 and below.record["promised"] == 2.4 and "below the 2.40" in below.out
    assert alone.status == 0 and alone.record["by_position"] == [0.6, 0.3]
    assert alone.record["tokens_per_call"][0] == pytest.approx(1.9)
    assert "that the card of embedded:redrafter promises at the least" in shipped.out
    assert refused.status == 2 and "--fix" in refused.err and "examined here" in refused.err


def test_metrics_of_others() -> None:
    def caller(text: str) -> Caller:
        return Caller("http://x", transport=httpx2.MockTransport(lambda _: httpx2.Response(200, text=text)))

    found = served_acceptance(caller(METRICS))
    value, low, high = found.tokens_per_call
    # E[a^2] = 0.6 + 3 * 0.3 = 1.5, so the variance is 1.5 - 0.81, and the error of 100 drafts 0.083.
    assert value == pytest.approx(1.9) and high - value == value - low == pytest.approx(1.96 * 0.69**0.5 / 10)
    ours = 'truedraft:drafter_draft_tokens_total{drafter="a",model_name="m"} 7\n'
    ours += 'truedraft:drafter_accepted_tokens_total{drafter="a",model_name="m"} 3\n'
    twice = served_acceptance(caller(METRICS + METRICS.replace("vllm:", "truedraft:") + ours))
    assert (twice.by_drafter, twice.drafts, twice.by_position) == ({"a": (7.0, 3.0)}, found.drafts, found.by_position)
    assert served_acceptance(caller("sglang:spec_accept_length 2.5\n")).tokens_per_call == (2.5, 2.5, 2.5)
    with pytest.raises(PeerError, match="count no drafts"):
        served_acceptance(caller("up 1\n"))
    with pytest.raises(PeerError, match="has no /metrics"):
        served_acceptance(Caller("http://x", transport=httpx2.MockTransport(lambda _: httpx2.Response(404))))
