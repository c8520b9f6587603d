"""Messages of clients: simulated on the true data they are what was sent, for every method, rule and codec."""

import pytest
import torch
from torch import Tensor, nn

from leakbench.attacks.core import Examples
from leakbench.audit.catalog import methods as catalog
from leakbench.audit.targets.observe import PublicKnowledge
from leakbench.audit.targets.simulated_message import SharedMessage, simulate_message, without_noise
from leakbench.defenses.core import Federated

SHAPE, CLASSES, LR = (1, 4, 4), 3, 0.3
EVERY = {
    "fed_avg": {"clip_norm": 0.4},
    "fed_prox": {"clip_norm": 0.4, "mu": 0.5},
    "scaffold": {"clip_norm": 0.4},
    "scaffold gradient": {"clip_norm": 0.4, "control": "gradient", "control_noise_multiplier": 0.0},
    "moon": {"clip_norm": 0.4},
    "fed_lrs": {"clip_norm": 0.4, "radius": 0.05, "penalty": 0.5},
    "pfa": {"clip_norm": 0.4, "rank": 5},
    "pfa full": {"clip_norm": 0.4, "variant": "full", "budgets": (2.0, 1.0)},
    "fed_pdp": {"clip_norm": 0.4, "rank": 5},
    "fed_pcdp": {"clip_norm": 0.4, "rank": 5},
    "percentile_filter": {"percentile": 60.0, "limit": 0.01},
    "dp_fed_avg": {"update_norm": 0.2},
    "local_noise_filter": {"update_norm": 0.1, "sensitivity": 0.1},
    "sgd": {},
    "dp_sgd": {"clip_norm": 0.4},
    "random_sparsification": {"clip_norm": 0.4, "final_sparsity": 0.6, "cooling": False},
    "random_freeze": {"clip_norm": 0.4},
    "posterior_freeze": {"clip_norm": 0.4},
    "pdp": {"clip_norm": 0.4, "rank": 5, "interval": 4},
    "pcdp": {"clip_norm": 0.4, "rank": 5, "interval": 4},
    "per_layer": {"clip_norm": 0.4},
    "gep": {"clip_norm": 0.4, "rank": 5},
    "dp_adam": {"clip_norm": 0.4},
}
CASES = [(name, steps) for name in EVERY for steps in (1, 4)]
UNKNOWN = {("dp_adam", 4), ("gep", 4)}


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, CLASSES)).double()


def data(count: int = 4, seed: int = 1) -> tuple[Tensor, Tensor]:
    inputs = torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return inputs, torch.arange(count) % CLASSES


def public() -> Examples:
    inputs, labels = data(40, seed=9)
    return Examples(ids=torch.arange(40), inputs=inputs, labels=labels)


KNOWN = PublicKnowledge(input_shape=SHAPE, classes=CLASSES, low=0.0, high=1.0, population=public())


def method(name: str, noise: float = 0.0) -> Federated:
    built = catalog.method(name.split()[0], EVERY[name])
    lifted = built if isinstance(built, Federated) else Federated(client=built, name=built.name)
    if noise:
        return lifted if lifted.noise_multiplier is not None or lifted.budgets else lifted.with_noise(noise)
    return without_noise(lifted)


def sent(name: str, steps: int = 1, noise: float = 0.0, count: int = 4, **settings) -> SharedMessage:
    usual = {"local_steps": steps, "batch": 2 if steps > 1 else None, "clients": 2, "rounds": 3, "lr": LR, "key": 5}
    usual |= {"public_knowledge": KNOWN, "population": public()}
    return simulate_message(net(), *data(count), method(name, noise), **usual | settings)


@pytest.mark.parametrize(("name", "steps"), CASES)
def test_without_noise_the_same_data_simulate_the_message(name, steps):
    if (name, steps) in UNKNOWN:
        with pytest.raises(ValueError, match="cannot be shared as the sum of 4 local steps"):
            sent(name, steps)
        return
    shared = sent(name, steps)
    seen, (inputs, labels) = shared.observation, data()
    simulated = seen.simulate(inputs, labels)
    assert (simulated - seen.released).norm() < 1e-9 * seen.released.norm()
    as_shares = torch.eye(CLASSES, dtype=torch.float64)[labels]
    assert (seen.simulate(inputs, as_shares) - seen.released).norm() < 1e-9 * seen.released.norm()
    # Other data give another message.
    assert (
        seen.simulate(inputs.flip(0), labels.flip(0)[[1, 0, 3, 2]]) - seen.released
    ).norm() > 1e-3 * seen.released.norm()
