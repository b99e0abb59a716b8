"""Questions for an instruct model that nobody measures on: arithmetic, code, and passages to sum up and to ask about.

The model asks itself a good part of its questions (2406.08464); these here bring the kinds that it seldom
asks. What shares ten words in a row with a prompt that drafters are measured on is left out.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_SHARED_WORDS = 10
_PASSAGES = (80, 420)  # words of a passage
_LEAST_CODE, _MOST_CODE = 80, 1_200  # characters of a signature with its docstring


def written_prompts(gsm8k: Path, code: Path, prose: Sequence[Path], held_out: Iterable[str], seed: int) -> list[str]:
    """User messages in a random order.

    Args:
        gsm8k: lines of objects with "question", the train part of GSM8K.
        code: lines of objects with "text", a Python file each.
        prose: plain texts.
        held_out: questions whose words are avoided.
        seed: of the order, the passages and the questions about them.
    """
    dice = random.Random(seed)
    found = [json.loads(line)["question"] for line in gsm8k.read_text(encoding="utf-8").splitlines()]
    found = dice.sample(found, min(len(found), 2_500))
    functions = sorted(set(_functions(code)))
    found += dice.sample(functions, min(len(functions), 2_500))
    for path in prose:
        found += _about_passages(path.read_text(encoding="utf-8"), 500, dice)
    avoided = {gram for text in held_out for gram in _grams(text)}
    kept = [text for text in dict.fromkeys(found) if avoided.isdisjoint(_grams(text))]
    dice.shuffle(kept)
    return kept


def _grams(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return (tuple(words[start : start + _SHARED_WORDS]) for start in range(len(words) - _SHARED_WORDS + 1))


def _functions(path: Path) -> Iterator[str]:
    """Signatures with their docstrings, without bodies, to be completed."""
    for line in path.read_text(encoding="utf-8").splitlines():
        source = json.loads(line)["text"]
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        lines = source.splitlines()
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and not node.decorator_list:
                end = node.body[0].end_lineno or node.lineno
                text = "\n".join(lines[node.lineno - 1 : end]) + "\n"
                if _LEAST_CODE <= len(text) <= _MOST_CODE:
                    yield text


def _about_passages(text: str, count: int, dice: random.Random) -> Iterable[str]:
    """Passages to sum up, and as many with a question about one of their words behind them."""
    paragraphs = [" ".join(each.split()) for each in re.split(r"\n\s*\n", text)]
    words = [word for each in paragraphs for word in each.split()]
    for number in range(2 * count):
        length = dice.randint(*_PASSAGES)
        start = dice.randrange(max(1, len(words) - length))
        passage = " ".join(words[start : start + length])
        if number % 2:
            yield f"Summarize: {passage}"
            continue
        names = [word.strip(".,;:!?\"'()") for word in passage.split() if len(word) > 6] or ["this"]
        question = dice.choice(("What is said about {}?", "Why is {} mentioned?", "What does the text say of {}?"))
        yield f"{passage}\n{question.format(dice.choice(names))}"
