"""Each collective of a price says where it comes from."""

from __future__ import annotations

import pytest

import spmd_auto
from tests.cost.test_pricer import analysis, program
from tests.known_answers.toy import toy_mesh
from tests.models import gpt, mlp
from tests.strategies import expert_strategies, priced

HOSTS = spmd_auto.cluster("h100", hosts=2, per_host=4).mesh(host=2, gpu=4)


@pytest.mark.parametrize("model", ["gpt", "unrolled", "moe"])
@pytest.mark.parametrize("name", expert_strategies(toy_mesh(2, 4)))
def test_every_collective_of_a_transformer_has_an_origin(model, name):
    plan = priced(program(model), toy_mesh(2, 4), name, analysis(model))
    known = {*plan.analysis.names.values()}
    paths = {leaf.path for leaf in plan.program.arguments}
    for c in plan.report.collectives:
        assert c.operation, c
        assert c.source.rpartition(" (")[0].rpartition(":")[2].isdigit(), c
        assert c.logical, c
        assert all(axis in known or axis.startswith("axis") for axis in c.logical), c
        assert c.form, c
        assert c.dtype in ("bfloat16", "float32", "int32", "bool"), c
        assert c.times > 0
        assert c.axes
        assert set(c.leaves) <= paths
        if c.form.endswith(("weight", "gradient", "state")):
            assert c.leaves, c


def forms(plan):
    return {(c.kind, c.form) for c in plan.report.collectives if c.leaves}  # scalars, as the loss, have none


def test_forms_of_parameters_are_told_apart():
    mesh = toy_mesh(2, 4)

    def of(name):
        return forms(priced(program("gpt"), mesh, name, analysis("gpt")))

    assert ("all-reduce", "reduced gradient") in of("data")
    assert all(form == "reduced gradient" for _, form in of("data"))
    assert ("all-gather", "gathered weight") in of("zero3")
    assert ("reduce-scatter", "reduced and scattered gradient") in of("zero3")


def test_axes_and_types_of_a_data_parallel_perceptron():
    step, params, data = mlp.make(2, 64, 64)
    plan = spmd_auto.price(step, params, data, mesh=toy_mesh(4), assignment={"batch": "a"})
    for c in plan.report.collectives:
        assert (c.kind, c.operation, c.logical) == ("all-reduce", "dot_general", ("batch",))
        assert (c.form, c.dtype, c.times) == ("reduced gradient", "float32", 1)
        assert "mlp.py" in c.source
    assert len(plan.report.collectives) > 0


def test_two_byte_floats_are_sent_as_float32_on_the_cpu():
    _, step, state, batch = gpt.make(width=32, sequence=16, vocab=64)
    sent = {}
    for chip in ("cpu", "h100"):
        mesh = spmd_auto.cluster(chip, per_host=4).mesh(a=4)
        plan = spmd_auto.price(step, state, batch, mesh=mesh, assignment={"heads": "a", "mlp": "a"})
        sent[chip] = {c.dtype for c in plan.report.collectives if c.form == "gathered activation"}
    assert sent == {"cpu": {"float32"}, "h100": {"bfloat16"}}


def test_explain_tells_what_is_moved():
    plan = priced(program("gpt"), HOSTS, "zero3", analysis("gpt"))
    text = " ".join(plan.explain().split())
    for words in ("what is moved in one step", "gathered", "weight", "dot_general", ".py:"):
        assert words in text
