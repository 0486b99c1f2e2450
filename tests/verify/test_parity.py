from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spmd_auto.errors import VerifyError
from spmd_auto.verify import assert_tree_close, losses_relative_error, tree_norm, tree_relative_error, worst_leaf


def test_error_of_the_whole_tree():
    expected = {"w": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
    actual = {"w": jnp.array([3.0, 0.0]), "b": jnp.array([4.5])}
    assert tree_norm(expected) == 5.0
    assert tree_relative_error(actual, expected) == pytest.approx(0.1)
    assert tree_relative_error(expected, expected) == 0.0
    assert worst_leaf(actual, expected) == ("['b']", pytest.approx(0.1))


def test_zero_expected_is_absolute():
    assert tree_relative_error([jnp.array([0.5])], [jnp.zeros(1)]) == 0.5


def test_a_tiny_noisy_leaf_does_not_matter():
    expected = {"kernel": np.ones(1000), "bias": np.full(3, 1e-12)}
    actual = {"kernel": np.ones(1000), "bias": np.full(3, -1e-12)}
    assert tree_relative_error(actual, expected) < 1e-12


def test_nan_and_inf():
    assert np.isnan(tree_relative_error([np.array([np.nan])], [np.array([1.0])]))
    assert np.isnan(tree_relative_error([np.array([np.nan])], [np.array([np.nan])]))
    assert tree_relative_error([np.array([np.inf, 1.0])], [np.array([np.inf, 1.0])]) == 0.0
    assert tree_relative_error([np.array([-np.inf, 1.0])], [np.array([np.inf, 1.0])]) == np.inf
    with pytest.raises(VerifyError, match="differ by nan"):
        assert_tree_close([np.array([np.nan])], [np.array([1.0])], 1.0)


def test_dtypes_keys_and_shardings(devices):
    mesh = Mesh(np.array(devices), ("x",), axis_types=(AxisType.Auto,))
    whole = jnp.arange(16, dtype=jnp.bfloat16)
    split = jax.device_put(whole, NamedSharding(mesh, PartitionSpec("x")))
    tree = {"a": whole.astype(jnp.float32), "n": 3, "key": jax.random.key(1)}
    assert tree_relative_error({"a": split, "n": 3, "key": jax.random.key(1)}, tree) == 0.0
    assert tree_relative_error({"a": split, "n": 3, "key": jax.random.key(2)}, tree) > 0.0


def test_structures_and_shapes_are_named():
    with pytest.raises(VerifyError, match=r"\['b'\]"):
        tree_relative_error({"a": 1.0, "b": 2.0}, {"a": 1.0})
    with pytest.raises(VerifyError, match=r"\['a'\].*\(2,\), expected \(3,\)"):
        tree_relative_error({"a": np.zeros(2)}, {"a": np.zeros(3)})


def test_assert_names_the_worst_leaf():
    with pytest.raises(VerifyError, match=r"(?s)gradients differ by 0.1, more than 0.01.*\['b'\]"):
        assert_tree_close({"w": 3.0, "b": 4.5}, {"w": 3.0, "b": 4.0}, 0.01, "gradients")
    assert_tree_close({"w": 3.0, "b": 4.5}, {"w": 3.0, "b": 4.0}, 0.11)


def test_losses():
    assert losses_relative_error([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert losses_relative_error([], []) == 0.0
    assert np.isnan(losses_relative_error([np.nan], [1.0]))
    with pytest.raises(VerifyError, match="2 losses against 1"):
        losses_relative_error([1.0, 2.0], [1.0])
