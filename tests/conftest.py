"""Toy models and fixtures: everything runs on a CPU in seconds."""

import pytest
import torch
from toys import PROMPTS, make_target, plain, stopping_target

from xpress.prompts import conversation, render


@pytest.fixture(autouse=True)
def _threads_and_seed():
    torch.set_num_threads(1)  # toy tensors: a second thread only waits, for long where cores are shared
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def target():
    """A random Llama in fp32, whole-session, frozen."""
    return make_target("llama")


@pytest.fixture(scope="session")
def often():
    """Two ids that the toy's answers to PROMPTS run into, the second one at different places."""
    target = stopping_target()
    answers = [plain(target, render(target.tokenizer, conversation(prompt, [])), 12) for prompt in PROMPTS]
    return answers[0][4], answers[1][7]
