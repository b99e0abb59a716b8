"""MTP layers for `speculators`; other engines read them from the target's own files."""

from __future__ import annotations

from pathlib import Path

from truedraft.drafters.exporting import ExportedDrafter, Exports, Way, chain_of, exported, target_of
from truedraft.kinds.mtp.module import MtpHead, reach_of, write_mtp_folder
from truedraft.models.export import new_folder

_OWN = " from folders, but the layer in the model's own files: {}; --for speculators writes one"


def _export(
    source: str | None, engine: str, way: Way, folder: Path, model: str | None, tokens: int | None
) -> ExportedDrafter:
    target = target_of(model, "", engine)
    count = chain_of(tokens, reach_of(source), None)
    with new_folder(folder):
        write_mtp_folder(folder, target.name, source, tokens=count, family=target.family)
    return exported(folder, MtpHead.kind, engine, target, count, way)


EXPORTS = Exports(
    {"speculators": Way("")},
    {
        "vllm": _OWN.format("""--speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'"""),
        "sglang": _OWN.format("--speculative-algorithm NEXTN"),
        "llamacpp": _OWN.format("--spec-type draft-mtp"),
    },
    _export,
)
