"""Makes sure that `benchmarks` is that of this distribution; imported before anything else of `audit`.

Other distributions (Opacus, for one) ship a top-level `benchmarks` as well. Beside an editable checkout theirs would be
found first, so our own root goes to the front of the path where that is so.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_found = find_spec("benchmarks")
if _found is None or str(ROOT / "benchmarks") not in map(str, _found.submodule_search_locations or ()):
    if "benchmarks" in sys.modules:
        raise ImportError(
            f"benchmarks must be that of leakbench, got {sys.modules['benchmarks']}; import audit before it"
        )
    sys.path.insert(0, str(ROOT))
