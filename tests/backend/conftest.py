"""What tests of the live body share: one thread, kernels that run anywhere, the embedded real model read once."""

from __future__ import annotations

import os

import pytest
import torch

from backend.load import LoadedModel, load_model

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run in Triton's interpreter, which is chosen when they are imported


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm() -> LoadedModel:
    return load_model("smollm2-135m")
