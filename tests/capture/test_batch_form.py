"""Leaves of a batch found without pytree are pytree's, or there are none."""

from collections import OrderedDict, deque, namedtuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from graphfsdp._capture.inputs import BatchForm

Pair = namedtuple("Pair", ["left", "right"])
LEAVES = st.one_of(st.integers(), st.none(), st.text(max_size=2), st.builds(object))
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.lists(inner, max_size=3).map(deque),
        st.tuples(inner, inner).map(lambda both: Pair(*both)),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)
BATCHES = st.tuples(st.lists(NESTED, max_size=3).map(tuple), st.dictionaries(st.text(), NESTED))


@given(BATCHES, BATCHES)
def test_leaves_are_those_of_pytree_for_each_batch_of_one_form(first: Any, second: Any) -> None:
    leaves, spec = pytree.tree_flatten(first)
    form = BatchForm.of(first, leaves)
    if form is None:
        return  # pytree is asked
    assert form.leaves(first) == leaves
    other, other_spec = pytree.tree_flatten(second)
    found = form.leaves(second)
    if found is not None and other_spec == spec:
        assert found == other
    if other_spec == spec and found is None:
        pytest.fail("the same nesting was not recognised")
