"""An entry of the table of private APIs."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True)
class PrivateApi:
    """One dependency on the inside of another package."""

    module: str
    name: str
    """Function, class or method in the module; the module itself if empty."""
    _: KW_ONLY
    used_in: str
    """Module below megatron.bcd."""
    use: str
    parameters: str | None = None
    """Its parameters in order. None where nothing depends on them."""
    source: tuple[str, ...] = ()
    """Text that its source must contain."""
