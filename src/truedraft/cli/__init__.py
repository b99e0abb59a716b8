"""The command `truedraft`. Its modules import torch only inside commands, so that `--help` is fast."""
