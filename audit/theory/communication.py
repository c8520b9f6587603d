"""Bytes of an update, from the plans of a run on the papers' MNIST network with 26,010 parameters.

Numbers are float32, 4 bytes. Plans come from a rehearsal, without data, on the layout of the real network.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from leakbench.benchmarks import models
from leakbench.defenses.core import Account, Layout, Ledger, StepPlan, Subspace, ToyRows, floor_of, poisson, rehearsed

from .claim import Comparison, Measured, Setup, claim

BYTES = 4
SIZES = (1024, 16, 8192, 32, 16384, 32, 320, 10)
"""Sizes of the network's tensors, weights and biases separately."""
DENSE = sum(SIZES)
RANK = 100
_EPOCHS, _PER_EPOCH = 20, 10


def layout() -> Layout:
    """Returns the layout of the tanh network on MNIST."""
    return Layout.of(models.build("dp_cnn_small", input_shape=(1, 28, 28), classes=10, seed=0))


def _plans(setup: Setup, name: str, settings: dict[str, Any], only: Collection[int] = (1,)) -> list[StepPlan]:
    """Returns the plans of step 0 and of the steps `only`."""
    shape = layout()
    steps = rehearsed(
        setup.defense(name, settings, noise_multiplier=1.0),
        Account(Ledger(poisson(1 / _PER_EPOCH))),
        steps=_EPOCHS * _PER_EPOCH,
        only=(0, *only),
        public=ToyRows(shape.dim),
        layout=shape,
    )
    return [step.plan.plan for step in steps if step.plan is not None]


def _bytes(plan: StepPlan) -> int:
    return BYTES * sum(block.codec.size for block in plan.blocks)


def _exactly(quantity: str, measured: float, closed: float, tolerance: float = 0.0) -> Comparison:
    return Comparison(what=quantity, measured=float(measured), closed=float(closed), tolerance=tolerance)


@claim(
    "3.7",
    "Bytes of an update: dense 4d, sparse 4 n_kept, PCDP 4 sum min(k, d_l), GEP 4(k + d), 4(k + n_kept) or 4k, "
    "DPDR 4(d + L).",
    caveat="without what is sent besides: a mask is 8 bytes of seed, and a basis 10 MB unless it is computed again "
    "from shared public data; DPDR's first step is dense",
)
def bytes_of_updates(setup: Setup) -> Measured:
    """Each method's own plan of the second step."""
    pcdp = sum(min(RANK, size) for size in SIZES)
    constant = {"cooling": False, "final_sparsity": 0.9}
    masked = {"cooling_epochs": 0, "final_sparsity": 0.9}
    expected = (
        ("dp_sgd", {}, BYTES * DENSE),
        ("random_sparsification", constant, BYTES * (DENSE - floor_of(0.9, DENSE))),
        ("pcdp", {"rank": RANK}, BYTES * pcdp),
        ("gep", {"rank": RANK, "groups": 1}, BYTES * (RANK + DENSE)),
        ("gep", {"rank": RANK, "groups": 1, "biased": True}, BYTES * RANK),
        ("gep", {"rank": RANK, "groups": 1} | masked, BYTES * (RANK + DENSE - floor_of(0.9, DENSE))),
        ("dpdr", {}, BYTES * (DENSE + 4)),
    )
    comparisons = []
    for name, settings, closed in expected:
        chosen = ", ".join(f"{key} = {str(value).lower()}" for key, value in settings.items())
        quantity = f"bytes a step, {name}" + f" ({chosen})" * bool(chosen)
        comparisons.append(_exactly(quantity, _bytes(_plans(setup, name, settings)[-1]), closed))
    return Measured(comparisons=tuple(comparisons))


@claim("3.7", "Under linear cooling to r, random sparsification sends 1 - r/2 of the entries on average.")
def bytes_under_cooling(setup: Setup) -> Measured:
    """Sizes at the first step of every epoch of a run."""
    firsts = [epoch * _PER_EPOCH for epoch in range(1, _EPOCHS)]
    plans = _plans(setup, "random_sparsification", {"final_sparsity": 0.9}, firsts)
    density = sum(_bytes(plan) for plan in plans) / (len(plans) * BYTES * DENSE)
    # The number of dropped entries in an epoch is rounded down.
    return Measured(comparisons=(_exactly("mean share of entries sent", density, 1 - 0.9 / 2, 1 / DENSE),))


@claim(
    "3.7",
    "PCDP's messages have 0.48 KB instead of 25 KB (PCDP-SGD, on its communication).",
    should_hold=False,
    caveat="both figures are numbers of entries / 1024: float32 has 1.91 KiB and 101.6 KiB, whose ratio is the paper's",
)
def bytes_printed_by_pcdp(setup: Setup) -> Measured:
    """KiB of PCDP's and DP-SGD's plans against the paper's figures; then in entries."""
    sent, dense = (
        _bytes(_plans(setup, name, settings)[-1]) for name, settings in (("pcdp", {"rank": RANK}), ("dp_sgd", {}))
    )
    return Measured(
        comparisons=(
            _exactly("KiB of a PCDP message", sent / 1024, 0.48, 0.005),
            _exactly("KiB of a dense message", dense / 1024, 25, 0.5),
        ),
        instead=(
            _exactly("entries of a PCDP message / 1024", sent / BYTES / 1024, 0.48, 0.005),
            _exactly("entries of a dense message / 1024", dense / BYTES / 1024, 25, 0.5),
            _exactly("ratio of the two", dense / sent, DENSE / 490),
        ),
    )


@claim("3.7", "A basis of PCDP has 4 sum k d_l bytes, over tensors of more than k numbers: 100 times a dense message.")
def bytes_of_a_basis(setup: Setup) -> Measured:
    """Matrices of the plan; a tensor of at most k numbers is kept whole and needs no basis."""
    codec = _plans(setup, "pcdp", {"rank": RANK})[-1].blocks[0].codec
    bases = codec.bases if isinstance(codec, Subspace) else ()
    sent = BYTES * sum(basis.numel() for basis in bases if basis.shape[0] > basis.shape[1])
    closed = BYTES * sum(RANK * size for size in SIZES if size > RANK)
    return Measured(
        comparisons=(
            _exactly("bytes of one basis", sent, closed),
            _exactly("the same / bytes of a dense message", sent / (BYTES * DENSE), 100, 1.0),
        )
    )
