"""Every op inside JAX's transformations and control flow, against its twin."""

import pytest
from checks import assert_conforms, mesh
from helpers import OPS, Op
from programs import TRANSFORMATIONS


@pytest.mark.alike
@pytest.mark.product(
    op=OPS, transformation=list(TRANSFORMATIONS), check_vma=(True, False), size=(1, 2, 3, 4)
)
def test_values_and_types_are_those_of_lax(op: Op, transformation: str, check_vma: bool, size: int):
    assert_conforms(op, TRANSFORMATIONS[transformation], mesh(size), check_vma=check_vma)
