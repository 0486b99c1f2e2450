"""Training steps of `transformers`' Flax models equal one device, and move what their plans predict.

A sample that fits a test run; all architectures and strategies are in benchmarks/models.py.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import jax
import pytest

from tests.foreign import measure
from tests.foreign.transformers_models import ARCHITECTURES

# what others' code warns of is theirs to mend
pytestmark = pytest.mark.filterwarnings("ignore")

# each a plan that is found, or one that experts would write by hand
SAMPLE = {
    "gpt2": "found",
    "bert": "megatron",
    "llama": "zero3",
    "gemma": "found",
    "vit": "zero3",
    "resnet": "zero3",
    "clip": "found",
    "bart": "megatron",
    "wav2vec2": "data",
}


@pytest.fixture(autouse=True)
def _installed():
    if sys.version_info >= (3, 12):
        pytest.skip("transformers 4.49, the last release with Flax models, is supported on Python 3.11 only")
    if importlib.util.find_spec("transformers") is None:
        if os.environ.get("SPMD_AUTO_REQUIRE_MODELS") == "1":
            pytest.fail("transformers is not installed")
        pytest.skip("transformers is not installed (pip install spmd-auto[models])")


@pytest.mark.parametrize("name", SAMPLE)
def test_step_equals_one_device(name, devices):
    with jax.enable_x64(True):
        reference = measure.refer(ARCHITECTURES[name].build())
        outcome = measure.outcome(reference, SAMPLE[name])
    assert not reference.analysis.graph.unknown
    results = zip(reference.program.replaces, reference.program.results, strict=True)
    assert all(i is not None for i, leaf in results if leaf.path.startswith("0/")), "some of the state is overlooked"
    assert any(any(spec) for spec in outcome.plan.placements.arguments), "nothing is split: nothing is shown"
    assert outcome.loss_error < reference.tolerance
    assert outcome.grads_error < reference.tolerance
    assert outcome.state_error < reference.tolerance
    assert outcome.verification.equal, str(outcome.verification)
    assert not measure.lost_splits(outcome.plan)
