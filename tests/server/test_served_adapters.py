"""Adapters of the served model, each by a name of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi")

import openai
import peft
import torch
from transformers import AutoModelForCausalLM

from server.conftest import openai_client, serving
from truedraft import Engine, SamplingParams, load_model
from truedraft.errors import OptionError
from truedraft.models.embedded import embedded_folder
from truedraft.server import ServerOptions, application


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the embedded target with random weights."""
    where = tmp_path_factory.mktemp("adapter")
    stock = AutoModelForCausalLM.from_pretrained(embedded_folder("target"), dtype=torch.float32)
    adapted = peft.get_peft_model(stock, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.data = 0.2 * torch.randn_like(weight)
    adapted.save_pretrained(str(where))
    return where


def test_clients_name_an_adapter_as_their_model(folder: Path) -> None:
    target = load_model("embedded:target", adapters={"odd": folder})
    engine = Engine(target, "prompt-lookup")
    prompt = "def f(x):\n    return"
    params = {name: SamplingParams(max_tokens=24, adapter=name) for name in (None, "odd")}
    expected = {name: Engine(target).generate(prompt, each).text for name, each in params.items()}
    assert expected[None] != expected["odd"]
    with serving(engine) as running:
        client = openai_client(running)
        models = {each.id: each for each in client.models.list().data}
        assert list(models) == ["tiny", "alias", "odd"]
        assert models["odd"].parent == "tiny" and models["alias"].parent is None
        for name, adapter in (("alias", None), ("odd", "odd"), ("tiny", None)):
            answer = client.completions.create(model=name, prompt=prompt, max_tokens=24, temperature=0)
            assert answer.choices[0].text == expected[adapter]
            assert answer.model == ("odd" if adapter else "tiny")
        with pytest.raises(openai.NotFoundError, match="served is 'tiny', 'alias', 'odd'"):
            client.completions.create(model="even", prompt=prompt)


def test_two_of_one_name_are_refused(folder: Path) -> None:
    engine = Engine(load_model("embedded:target", adapters={"tiny": folder}))
    with pytest.raises(OptionError, match="adapters has the name 'tiny'"):
        application(engine, ServerOptions(served_model_name=("tiny",)), "tiny")
