"""For all tests: no network, one thread, quiet libraries."""

from __future__ import annotations

import os

# Before anything imports them: huggingface_hub reads its switch once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

# Tiny models: a second thread costs more than it brings, and its neighbours on a busy machine much more.
torch.set_num_threads(1)
