"""Toy models and fixtures: everything runs on a CPU in seconds."""

import pytest
import torch
from toys import make_target


@pytest.fixture(autouse=True)
def _threads_and_seed():
    torch.set_num_threads(1)  # toy tensors: a second thread only waits, for long where cores are shared
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def target():
    """A random Llama in fp32, whole-session, frozen."""
    return make_target("llama")
