"""The options that several commands share, with their help."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import typer

from truedraft.drafters.specs import drafter_help


def option(name: str, help_: str, panel: str, metavar: str | None = None, **more: Any) -> Any:
    """An option: its name, what it does, the heading it stands under, and what its value is called."""
    return typer.Option(name, help=help_, rich_help_panel=panel, metavar=metavar, **more)


def flag(name: str, help_: str, panel: str) -> Any:
    """An option that takes no value, which some versions of typer would show as one of type <bool>."""
    return option(name, help_, panel, metavar="")


_PROMPT, _MODEL, _ANSWER, _REPORT, _MACHINE = "Prompt", "Model and drafter", "Answer", "Report", "Machine"

PromptText: TypeAlias = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="The prompt; - reads it from standard input."),
]
PromptsFile: TypeAlias = Annotated[
    str | None,
    option(
        "--prompts",
        'Many prompts: .jsonl with "prompt" or "text" (for generate also "max_tokens", "seed" and so on), .txt with '
        "one a line, or heldout: those that ship.",
        _PROMPT,
        "FILE",
    ),
]
Chat: TypeAlias = Annotated[
    bool, flag("--chat", "Give the prompt as a user's message, by the model's chat template.", _PROMPT)
]

Model: TypeAlias = Annotated[
    str, option("--model", "embedded:target, a folder, or a name on the Hugging Face hub.", _MODEL, "M")
]
PadTo: TypeAlias = Annotated[
    str | None,
    option("--pad-to", "110M, 500M or 7B: the model's answers at the cost of a model of that size.", _MODEL, "SIZE"),
]
Drafter: TypeAlias = Annotated[
    str,
    option(
        "--drafter",
        "What guesses, one of these; options stand behind it as ,option=value.\n\n" + drafter_help(),
        _MODEL,
        "D",
    ),
]
RuleWord: TypeAlias = Annotated[
    str,
    option(
        "--rule",
        "speculative and block keep the distribution of the target's answers exactly; block judges a drafted chain as "
        "a whole. Lossy ones, by name: speculative,lenience=L with L below 1, or typical[,epsilon=0.09][,delta=0.3].",
        _MODEL,
        "R",
    ),
]

MaxTokens: TypeAlias = Annotated[int, option("--max-tokens", "The most new tokens to write.", _ANSWER, "N")]
Temperature: TypeAlias = Annotated[
    float, option("--temperature", "0 always takes the likeliest token (greedy).", _ANSWER, "T")
]
TopP: TypeAlias = Annotated[
    float, option("--top-p", "Keep the likeliest tokens until their mass reaches P.", _ANSWER, "P")
]
TopK: TypeAlias = Annotated[int, option("--top-k", "Keep the K likeliest tokens; 0 keeps all.", _ANSWER, "K")]
MinP: TypeAlias = Annotated[
    float, option("--min-p", "Drop tokens less likely than P times the likeliest.", _ANSWER, "P")
]
Seed: TypeAlias = Annotated[
    int | None,
    option("--seed", "The same seed, the same answer.", _ANSWER, "S", show_default="drawn"),
]
Coupled: TypeAlias = Annotated[
    bool,
    flag(
        "--coupled",
        "Draw each token by noise that its seed, place and id decide, for target and drafter alike: then a seed gives "
        "the same answer with every drafter and with none, at the cost of some accepted drafts. Without it a seed's "
        "answer depends on the drafter, though its distribution does not.",
        _ANSWER,
    ),
]
Stop: TypeAlias = Annotated[
    list[str] | None,
    option("--stop", r"End before this text, which may hold \n, \t, \\ and \uXXXX; may be repeated.", _ANSWER, "TEXT"),
]
StopTokenId: TypeAlias = Annotated[
    list[int] | None, option("--stop-token-id", "End before this token; may be repeated.", _ANSWER, "N")
]
IgnoreEos: TypeAlias = Annotated[bool, flag("--ignore-eos", "Go on past the end of text.", _ANSWER)]

Compare: TypeAlias = Annotated[
    bool, flag("--compare", "Also decode plainly: the speed of both, and whether the tokens are identical.", _REPORT)
]
ShowDrafts: TypeAlias = Annotated[
    bool, flag("--show-drafts", "Colour each token by where it came from; brackets without colours.", _REPORT)
]
Json: TypeAlias = Annotated[bool, flag("--json", "End standard output with one line, a JSON object.", _REPORT)]

Dtype: TypeAlias = Annotated[str, option("--dtype", "auto, float32, bfloat16 or float16.", _MACHINE, "DTYPE")]
Device: TypeAlias = Annotated[str, option("--device", "auto, cpu, cuda or cuda:N.", _MACHINE, "DEVICE")]
Threads: TypeAlias = Annotated[
    int | None, option("--threads", "CPU threads.", _MACHINE, "N", show_default="torch's choice")
]
NoFastPaths: TypeAlias = Annotated[
    bool, flag("--no-fast-paths", "Run models as they were loaded: nothing packed, nothing fused.", _MACHINE)
]
