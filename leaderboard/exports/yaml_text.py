"""YAML by PyYAML, without anchors and with every string quoted that YAML would read as something else."""

from collections.abc import Iterable
from typing import Any

from .safe_text import in_one_line


def yaml_text(document: Any, *, comments: Iterable[str] = ()) -> bytes:
    """Formats a document of plain values as YAML; infinity is `.inf`.

    Args:
        document: lists, dictionaries with strings as keys, strings, numbers, None.
        comments: sentences above it.

    Raises:
        ImportError: PyYAML is not installed; the message names the extra.
    """
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ImportError("YAML needs pyyaml: pip install 'leakbench[exports]'", name="yaml") from error

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:  # equal values are written twice, not as an anchor and its alias
            return True

    lines = [f"# {in_one_line(comment)}\n" for comment in comments]
    body = yaml.dump(document, Dumper=Plain, sort_keys=False, allow_unicode=True, width=10**6)
    return ("".join(lines) + body).encode()
