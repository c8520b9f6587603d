"""Guard of the import path: the package `benchmarks` is that of this distribution, whatever else is installed.

Other distributions (Opacus, for one) ship a top-level `benchmarks` as well. An editable checkout comes behind what is
installed on the path, so theirs would be found first: then our own root goes to the front. Imported before anything
else of `audit`.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_found = find_spec("benchmarks")
if _found is None or str(ROOT / "benchmarks") not in map(str, _found.submodule_search_locations or ()):
    # A module that is imported stays what it is, whatever the path says afterwards.
    if "benchmarks" in sys.modules:
        raise ImportError(
            f"benchmarks must be that of leakbench, got {sys.modules['benchmarks']}; import audit before it"
        )
    sys.path.insert(0, str(ROOT))
