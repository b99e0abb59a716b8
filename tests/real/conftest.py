"""The real model that everyone meets first."""

from __future__ import annotations

import pytest

from support.real_models import smollm2_here
from truedraft.models.huggingface import HuggingFaceModel


@pytest.fixture(scope="session")
def model() -> HuggingFaceModel:
    return smollm2_here()
