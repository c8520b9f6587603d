"""What tests of whole runs share: loading the text of a suite, running it, an attack that does what a test asks for."""

from pathlib import Path

import torch

from leakbench.audit.run import harness
from leakbench.audit.suite import suite
from leakbench.leaderboard.records.record import Record

CPU = torch.device("cpu")
MEMBERSHIP = '{ name = "likelihood_ratio" }, { name = "loss_threshold" }'
SPY = '''
from leakbench.attacks.core import Access, MembershipScores, ModelAccess, attack

@attack(access=Access.BLACK_BOX)
def spy(target: ModelAccess, coins) -> MembershipScores:
    """Does what the test asks for."""
    {}
'''
BROKEN = SPY.format('raise RuntimeError("the spy\\nwas caught")')


def load(folder: Path, text: str) -> suite.Suite:
    path = folder / "toy.toml"
    path.write_text(text, encoding="utf-8")
    return suite.load(path)


def run(text: str, folder: Path, *, jobs: int = 1, **settings) -> list[Record]:
    return harness.run(load(folder, text), folder, device=CPU, jobs=jobs, **settings)
