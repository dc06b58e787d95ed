"""Read YAML files that a user writes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


def read_yaml(path: str, *, instead: str) -> Any:
    """Return the contents of the file. `instead` ends error messages: it says what to give.

    Raises:
        ValueError: the file can't be read, is not YAML, or has a key twice. The message begins with the path.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return yaml.load(file, Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ValueError(f"{path}: {reason}; {instead}") from None
    except Exception as error:  # the reader raises many types, for "!!bool x" or a 13th month
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}; {instead}") from None


class _Loader(yaml.SafeLoader):
    """A loader that refuses duplicate keys, where YAML's loader takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1 and name != "<<":
                raise yaml.constructor.ConstructorError(None, None, f"{name} stands twice", node.start_mark)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return mapping
