"""The float grid from a training to its score: a source of noise is only as private as the digits that are shared."""

import pytest
import torch
from torch import Tensor, nn

from leakbench.attacks.core import Examples
from leakbench.attacks.float_grid import float_grid
from leakbench.audit.scoring.score import score
from leakbench.audit.scoring.truth import GroundTruth
from leakbench.audit.targets.candidates import Candidates, refuse_comparison
from leakbench.audit.targets.observe import PublicKnowledge, RunView
from leakbench.defenses.core import Recording, full, keyed, secure, seeded, train
from leakbench.defenses.core.randomness.noise import CipherNoise
from leakbench.defenses.dp_sgd import dp_sgd

SHAPE, EACH = (1, 16, 16), 40


class SinglePrecision(CipherNoise):
    """What most libraries do: PyTorch's normal in float32, added in float32."""

    def __init__(self, seed: int) -> None:
        super().__init__(bytes(32), "seeded")
        self.generator = keyed(seed)

    def add(self, sums: Tensor, std: float) -> Tensor:
        return sums.float().add_(torch.empty(len(sums)).normal_(generator=self.generator), alpha=std).double()


def found(noise, sigma: float):
    coins = keyed(5)
    inputs, labels = torch.rand(2 * EACH, *SHAPE, generator=coins), torch.randint(4, (2 * EACH,), generator=coins)
    people = Examples(ids=torch.arange(2 * EACH), inputs=inputs, labels=labels)
    members = Examples(ids=people.ids[:EACH], inputs=inputs[:EACH], labels=labels[:EACH])
    run = train(
        nn.Sequential(nn.Flatten(), nn.Linear(256, 4)),
        (members.inputs, members.labels),
        dp_sgd(clip_norm=1.0, noise_multiplier=sigma),
        sampling=full(),
        steps=1,
        noise=noise,
        recording=Recording(observer="updates"),
    )
    world = PublicKnowledge(input_shape=SHAPE, classes=4, low=0.0, high=1.0)
    view = RunView(run, world, members, full(), Candidates(people.ids, people.ids, people))
    result = float_grid(view.at(0, participation_known=True))
    truth = GroundTruth(members=members.ids, candidates=people.ids)
    for place in (3, EACH + 3):
        one = Examples(ids=people.ids[place : place + 1], inputs=inputs[[place]], labels=labels[[place]])
        alone = RunView(run, world, members, full(), Candidates(one.ids, one.ids, one))
        refuse_comparison("float_grid", result, float_grid(alone.at(0, participation_known=True)))
    return run, score(result, truth, delta=1e-5)["auc"]


@pytest.mark.parametrize("sigma", [2.0, 30.0])
def test_noise_in_single_precision_gives_everybody_away_whatever_is_claimed(sigma):
    run, auc = found(SinglePrecision(1), sigma)
    assert auc.value == 1.0
    assert run.unverified  # whoever brings a source of their own is told that nothing vouches for it


@pytest.mark.parametrize("sigma", [2.0, 30.0])
@pytest.mark.parametrize("noise", [lambda: seeded(1), secure])
def test_ours_gives_nobody_away(noise, sigma):
    run, auc = found(noise(), sigma)
    assert auc.value == 0.5 and not run.unverified  # every score is 0
