"""Every kernel computes what PyTorch does, for sizes beside its vectors' lengths and whatever a neighbour holds."""

import pytest

from leakbench.defenses.core.kernels.catalog import KERNELS
from leakbench.defenses.core.kernels.kernel import matches_reference
from leakbench.defenses.core.kernels.machine_code import processor

BY_EXAMPLE = ("bound_factors", "convolution_rows", "product_norms", "row_products")


def cases(*names):
    marks = {"cuda_normals": pytest.mark.gpu}
    return [
        pytest.param(kernel, id=f"{name}-{number}", marks=marks.get(name, ()))
        for name in names
        for number, kernel in enumerate(KERNELS[name])
    ]


@pytest.fixture(autouse=True)
def compiled(request):
    if processor() is None and any(name in request.node.name for name in ("convolution", "product")):
        pytest.skip("nothing is compiled for a processor without fused multiply-add")


@pytest.mark.parametrize("kernel", cases(*KERNELS))
def test_results_are_those_of_the_reference(kernel):
    for arguments in kernel.examples():
        assert matches_reference(kernel, *arguments), arguments


@pytest.mark.parametrize("kernel", cases(*KERNELS))
def test_wrong_results_do_not_match(kernel, monkeypatch):
    assert changed_results_match(kernel, lambda result: result, monkeypatch)
    assert not changed_results_match(kernel, lambda result: result * 1.001, monkeypatch)


@pytest.mark.parametrize("kernel", cases(*BY_EXAMPLE))
def test_results_that_neighbours_spoil_do_not_match(kernel, monkeypatch):
    assert not changed_results_match(kernel, lambda result: result + 0 * result.double().sum(), monkeypatch)


def changed_results_match(kernel, change, monkeypatch):
    call = type(kernel).__call__
    with monkeypatch.context() as patch:
        patch.setattr(type(kernel), "__call__", lambda *of: [change(result) for result in call(*of)])
        return all(matches_reference(kernel, *arguments) for arguments in kernel.examples())
