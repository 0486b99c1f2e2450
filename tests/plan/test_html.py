"""A plan in a notebook."""

from __future__ import annotations

from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest

import spmd_auto
from tests.known_answers.toy import toy_mesh
from tests.test_errors import batch, state, step


class Reader(HTMLParser):
    """Tables by caption, as lists of rows; every element must be closed in its turn."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.tags, self.attributes = [], {}, set(), []
        self.text, self.rows, self.caption = "", [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)
        self.attributes += attrs
        self.text = ""
        if tag == "table":
            self.rows = []
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data):
        self.text += data

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "caption":
            self.caption = self.text
        if tag in ("td", "th"):
            self.rows[-1].append(self.text)
        if tag == "table":
            assert len({len(row) for row in self.rows}) == 1
            self.tables[self.caption] = self.rows[1:]


def hand(fn=step, args=None, assignment=None, **options):
    args = (state(), batch()) if args is None else args
    return spmd_auto.price(
        fn, *args, mesh=toy_mesh(2, 4), assignment={"batch": "a"} if assignment is None else assignment, **options
    )


def test_tables_say_what_the_plan_says():
    plan = hand(assignment={"batch": "a", "mlp": "b"}, zero=3, zero_axes=("a",))
    page = Reader(plan._repr_html_())
    leaves = {row[0]: row[1:] for row in page.tables["largest of 3 arguments"]}
    assert leaves["state/params/up/kernel"] == [
        "parameter",
        "float32[16, 24]",
        str(plan.specs["state/params/up/kernel"]),
        "(1, 8)",
        "[16, 3]",
    ]
    assert leaves["batch/x"][-2:] == ["(2, 1)", "[4, 16]"]
    split = {row[0]: row[1] for row in page.tables["split"]}
    assert split == {"batch": "a", "mlp": "b", "ZeRO: gradient, optimizer, stored": "a"}
    price = {row[0]: row[2] for row in page.tables["one step, per device"]}
    assert price["all-reduce over b"] == "384 B"
    assert len(price) == 3 + len(plan.report.bytes_by_kind_and_axes())
    memory = {row[0]: row[1] for row in page.tables["memory, per device"]}
    assert memory["parameters"] == "384 B"
    assert set(memory) == {"parameters", "optimizer", "batch", "temporaries", "other", "sum"}
    assert "step on (a=2, b=4) of toy: 8 devices" in plan._repr_html_()


def test_everything_is_escaped():
    def f(x):
        return {k: v * 2 for k, v in x.items()}

    f.__name__ = "<script>alert(1)</script>"
    name = "<img src=x onerror='alert(\"2\")'>&amp;"
    plan = hand(f, ({name: jax.ShapeDtypeStruct((8,), jnp.float32)},), {})
    text = plan._repr_html_()
    page = Reader(text)
    assert page.tags <= {"div", "style", "p", "b", "table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert page.tables["largest of 1 arguments"][0][0] == f"x/{name}"
    assert page.tables["split"] == [["nothing is split", "", "", ""]]
    assert "&lt;script&gt;" in text
    assert {key for key, _ in page.attributes} <= {"class"}


@pytest.mark.parametrize("count", [3, 40])
def test_it_stays_small(count):
    def f(xs):
        return [x * 2 for x in xs]

    sizes = [8 * (i + 1) for i in range(count)]
    page = Reader(hand(f, ([jax.ShapeDtypeStruct((n,), jnp.float32) for n in sizes],), {})._repr_html_())
    rows = page.tables[f"largest of {count} arguments"]
    assert rows[0][2] == f"float32[{sizes[-1]}]"
    assert len(rows) == min(count, 13)
    if count > 12:
        assert rows[-1][0] == "and 28 more"
