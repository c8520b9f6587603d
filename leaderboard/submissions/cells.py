"""Cells of a submission compared with those of its suite: none removed, none added but the method's own.

Cells of the suite have ids that anybody can compute, because their methods are leakbench's. Ids of the submission's own
method depend on its code, which a check does not run: its cells are compared with those that other methods of the suite
have in common.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace

from ..checks.suites import Zoo
from ..records.labels import key_of
from ..records.manifest import Expected
from ..records.record import Record
from .declaration import Declaration


@dataclass(frozen=True, kw_only=True)
class SuiteFacts:
    """A suite of this version of the code, at the seeds of a submission.

    Attributes:
        name: in records.
        digest: at its own seeds.
        seeds: of the submission.
        cells: of the suite without the submission's method; None if they cannot be planned here.
        unplanned: why `cells` is None.
        source: digest of this code.
        checkpoints: of its zoo; empty for a suite that trains.
        reported: papers' figures that the suite states: (defense, attack or None, metric, value, source).
        figures: those of each cell, (metric, value, source), by its id; empty if cells cannot be planned.
    """

    name: str
    digest: str
    seeds: tuple[int, ...]
    cells: tuple[Expected, ...] | None
    unplanned: str = ""
    source: str
    checkpoints: Zoo = field(default_factory=dict)
    reported: frozenset[tuple[str, str | None, str, float, str]] = frozenset()
    figures: Mapping[str, frozenset[tuple[str, float, str]]] = field(default_factory=dict)

    def papers_say(self, record: Record) -> bool:
        """True if the papers' figures of a record are those of its cell; a cell that is not the suite's has none."""
        names = record.defense.name, record.attack and record.attack.name
        # Without a plan, as where the data are not here, the suite's table tells methods apart and no budgets.
        named = frozenset(tuple(figure) for defense, attack, *figure in self.reported if (defense, attack) == names)
        figures = self.figures.get(record.id, frozenset()) if self.figures else named
        return all((figure.metric, figure.value, figure.source) in figures for figure in record.reported)


def is_own(declaration: Declaration, defense: str, attack: str | None) -> bool:
    """Returns whether a cell is of the submission's own method; every cell is, without one.

    Args:
        declaration: of the submission.
        defense: name of the cell's defense.
        attack: name of the cell's attack; None without one.
    """
    if declaration.method is None:
        return True
    return declaration.method.name == (defense if declaration.kind == "defense" else attack)


def without_seed(cell: Expected) -> str:
    """Returns the identity of a cell but for its seed."""
    attack = cell.attack and asdict(cell.attack)
    return key_of((cell.kind, cell.control, asdict(cell.defense), attack, dict(cell.budget), cell.noise))


def cell_problems(declaration: Declaration, requested: Iterable[Expected], planned: Iterable[Expected]) -> list[str]:
    """Returns the differences between the requested cells of a submission and those of its suite, a sentence each.

    Args:
        declaration: of the submission.
        requested: cells of its manifests.
        planned: cells of the suite at its seeds, without the submission's method.
    """
    requested, planned = list(requested), list(planned)
    names, plan_ids = {cell.id for cell in requested}, {cell.id for cell in planned}
    problems = [
        f"cell {cell.id} of the suite ({cell.words}, seed {cell.seed}) was not requested"
        for cell in planned
        if cell.id not in names
    ]
    problems += _changed(requested, planned)
    own = [cell for cell in requested if cell.id not in plan_ids]
    if declaration.method is None:
        return problems + [f"cell {cell.id} ({cell.words}) is none of the suite" for cell in own]
    for cell in own:
        if not is_own(declaration, cell.defense.name, cell.attack and cell.attack.name):
            problems.append(f"cell {cell.id} ({cell.words}) is neither of the suite nor of {declaration.method.name}")
    own = [cell for cell in own if is_own(declaration, cell.defense.name, cell.attack and cell.attack.name)]
    if not own:
        return [*problems, f"no cell is of {declaration.method.name}"]
    problems += _other_tasks(declaration, own, planned)
    if declaration.kind == "defense":
        return problems + _lacking_attacks(own, planned)
    return problems + _lacking_targets(own, planned)


def unmeasured(declaration: Declaration, requested: Iterable[Expected], planned: Iterable[Expected]) -> list[str]:
    """Returns cells of the method that its request skips and that the suite's methods are measured in, a sentence each.

    Whether the method can be measured there is decided by its code, which a check does not run.

    Args:
        declaration: of the submission.
        requested: cells of its manifests.
        planned: cells of the suite at its seeds, without the submission's method.
    """
    key = _measurement if declaration.kind == "defense" else _target
    measured = {(cell.kind, key(cell)) for cell in planned if not cell.skip}
    return [
        f"cell {cell.id} ({cell.words}, seed {cell.seed}) is skipped, and the suite's methods are measured there; its "
        f"request says: {cell.skip}"
        for cell in requested
        if cell.skip
        and declaration.method is not None
        and is_own(declaration, cell.defense.name, cell.attack and cell.attack.name)
        and (cell.kind, key(cell)) in measured
    ]


def _changed(requested: list[Expected], planned: list[Expected]) -> list[str]:
    """Cells of the suite whose request has another content, or a reason to skip them, under the suite's id."""
    plan = {cell.id: cell for cell in planned}
    problems = []
    for cell in requested:
        own = plan.get(cell.id)
        if own is None:
            continue
        if cell.skip and not own.skip:
            problems.append(f"cell {cell.id} of the suite ({own.words}, seed {own.seed}) was skipped, and runs here")
        elif key_of(asdict(replace(cell, skip=""))) != key_of(asdict(replace(own, skip=""))):
            problems.append(f"cell {cell.id} of the suite ({own.words}, seed {own.seed}) was requested as another cell")
    return problems


def _other_tasks(declaration: Declaration, own: list[Expected], planned: list[Expected]) -> list[str]:
    """Cells of the method with other settings than declared, or trained otherwise than every cell of the suite."""
    declared = declaration.method.settings if declaration.method is not None else {}
    # A sampler of its own has sizes of its own.
    free = {"groups", "largest_batch"} if "sampling" in declared else set()
    values: dict[str, set[str]] = {}
    for cell in planned:
        for name, value in cell.training.items():
            values.setdefault(name, set()).add(key_of(value))
    problems = []
    for cell in own:
        method = cell.defense if declaration.kind == "defense" else cell.attack
        settings = {**cell.training, **(method.settings if method is not None else {})}
        unlike = [
            name
            for name, value in cell.training.items()
            if name not in declared and name not in free and key_of(value) not in values.get(name, set())
        ]
        unlike += [name for name, value in declared.items() if name in settings and not _among(settings[name], value)]
        if declaration.kind == "defense" and cell.control is not None:
            unlike.append("control")
        if cell.secure:
            unlike.append("secure")
        if unlike:
            problems.append(
                f"cell {cell.id} ({cell.words}) has another {', '.join(unlike)} than the suite or the declaration"
            )
    return problems


def _among(value: object, declared: object) -> bool:
    """True if a number is as declared, or in a declared grid; other values may be written in several ways."""
    numbers = declared if isinstance(declared, list) else [declared]
    return (
        not isinstance(value, int | float) or not all(isinstance(n, int | float) for n in numbers) or value in numbers
    )


def _lacking_attacks(own: list[Expected], planned: list[Expected]) -> list[str]:
    contestants = [cell for cell in planned if cell.control is None]
    budgets = {key_of(cell.budget): cell.budget for cell in contestants if len(cell.budget) > 1}
    budget_keys = {key_of(cell.budget) for cell in own}
    problems = [f"budget {dict(cell.budget)} of {cell.words} is none of the suite's" for cell in _unknown(own, planned)]
    if budget_keys & budgets.keys():  # a method with noise is run at every budget
        problems += [
            f"the method was not run at budget {dict(value)}"
            for key, value in budgets.items()
            if key not in budget_keys
        ]
    for budget in sorted(budget_keys):
        rivals = [cell for cell in contestants if key_of(cell.budget) == budget]
        lacking = _common(rivals, _defense_key, _measurement) - {
            _measurement(cell) for cell in own if key_of(cell.budget) == budget
        }
        problems += [f"the method lacks a cell that the suite's defenses have: {words}" for words in _words(lacking)]
    return problems


def _lacking_targets(own: list[Expected], planned: list[Expected]) -> list[str]:
    problems = []
    for kind in sorted({cell.kind for cell in own}):
        rivals = [cell for cell in planned if cell.kind == kind and cell.attack is not None]
        lacking = _common(rivals, _attack_key, _target) - {_target(cell) for cell in own if cell.kind == kind}
        problems += [f"the attack lacks a cell that the suite's attacks have: {words}" for words in _words(lacking)]
    return problems


def _unknown(own: list[Expected], planned: list[Expected]) -> list[Expected]:
    budgets = {key_of(cell.budget) for cell in planned}
    return [cell for cell in own if key_of(cell.budget) not in budgets]


def _common(
    cells: list[Expected], method: Callable[[Expected], Hashable], key: Callable[[Expected], Hashable]
) -> set[Hashable]:
    """Keys that the cells of every method have; empty without cells."""
    keys: dict[Hashable, set[Hashable]] = {}
    for cell in cells:
        keys.setdefault(method(cell), set()).add(key(cell))
    return set.intersection(*keys.values()) if keys else set()


def _defense_key(cell: Expected) -> Hashable:
    return key_of((cell.defense.name, cell.defense.settings))


def _attack_key(cell: Expected) -> Hashable:
    return cell.attack and key_of((cell.attack.name, cell.attack.settings))


def _measurement(cell: Expected) -> Hashable:
    attack = cell.attack and (cell.attack.name, key_of(cell.attack.settings))
    return cell.kind, attack or "", cell.noise or "", cell.seed


def _target(cell: Expected) -> Hashable:
    return _defense_key(cell), key_of(cell.budget), cell.control or "", cell.noise or "", cell.seed


def _words(keys: set[Hashable]) -> list[str]:
    return [", ".join(map(str, key)) if isinstance(key, tuple) else str(key) for key in sorted(keys, key=str)]
