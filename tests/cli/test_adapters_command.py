"""LoRA adapters on the command line: merged, or named by each request, with the answers of peft's own model."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from cli.tiny import Run, prompts_in, tiny_tokenizer

PROMPT = "def f(x):"
TOKENS = ("--max-tokens", "16", "--dtype", "float32", "--ignore-eos", "--json")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, target: str) -> dict[str, str]:
    """Two adapters of the target, as peft writes them."""
    folders = {}
    for seed, name in enumerate(("sql", "legal")):
        config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32), config)
        torch.manual_seed(seed)
        for weight_name, weight in adapted.named_parameters():
            if "lora_" in weight_name:
                weight.data = 0.3 * torch.randn_like(weight)
        folders[name] = str(tmp_path_factory.mktemp("adapters") / name)
        adapted.save_pretrained(folders[name])
    return folders


@torch.inference_mode()
def by_peft(target: str, adapter: str | None) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    model = model if adapter is None else peft.PeftModel.from_pretrained(model, adapter).eval()
    ids = torch.tensor([tiny_tokenizer().encode(PROMPT)])
    found = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, min_new_tokens=16, do_sample=False,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return found[0, ids.shape[1] :].tolist()


def test_merged_or_named(run: Run, target: str, draft: str, adapters: dict[str, str]) -> None:
    words = ("generate", PROMPT, "--model", target, "--drafter", f"draft:{draft}", "--controller", "fixed", *TOKENS)
    expected = by_peft(target, adapters["sql"])
    assert expected != by_peft(target, None)
    named = ("--adapters", f"sql={adapters['sql']}", "--adapters", f"legal={adapters['legal']}")
    for more in (("--merge-adapter", adapters["sql"]), (*named, "--adapter", "sql")):
        result = run(*words, *more)
        assert result.status == 0 and result.record["prompts"][0]["token_ids"] == expected
    compared = run(*words, *named, "--adapter", "sql", "--compare")
    assert compared.status == 0 and compared.record["identical"] is True


def test_each_prompt_of_a_file_names_its_own(
    run: Run, target: str, draft: str, adapters: dict[str, str], tmp_path: Path
) -> None:
    file = prompts_in(tmp_path, *({"prompt": PROMPT, "adapter": name} for name in ("legal", None, "sql")))
    named = [word for name, folder in adapters.items() for word in ("--adapters", f"{name}={folder}")]
    result = run("generate", "--prompts", file, "--model", target, "--drafter", f"draft:{draft}", *named, *TOKENS)
    assert [each["token_ids"] for each in result.record["prompts"]] == [
        by_peft(target, None if name is None else adapters[name]) for name in ("legal", None, "sql")
    ]


def test_beams_of_a_merged_adapter(run: Run, target: str, adapters: dict[str, str]) -> None:
    words = ("generate", PROMPT, "--num-beams", "2", "--drafter", f"draft:{target}", *TOKENS)
    words = tuple(word for word in words if word != "--ignore-eos")
    record = run(*words, "--model", target, "--merge-adapter", adapters["sql"], "--compare").record
    assert record["identical"] is True
    assert record["prompts"][0]["beams"] != run(*words, "--model", target).record["prompts"][0]["beams"]
