"""What this machine offers, where tests have no GPU to ask."""

from __future__ import annotations

import sys
import types

import pytest

from megatron.bcd.runtime import device, packages


def test_absent_packages_on_a_gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would end every run on a GPU machine without Transformer Engine or Apex with a traceback."""
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    for name in ("transformer_engine", "apex", "amp_C"):
        monkeypatch.setitem(sys.modules, name, None)  # what "not installed" looks like to an import
    assert not packages.has_transformer_engine()
    assert not packages.has_apex()
    assert not packages.is_importable("no_such_package.with_a_part")


def test_present_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would leave Transformer Engine or Apex unused where they are, or use them without a GPU."""
    for name in ("transformer_engine", "transformer_engine.pytorch", "apex", "apex.optimizers", "apex.normalization"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "amp_C", types.ModuleType("amp_C"))
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    assert packages.has_transformer_engine()
    assert packages.has_apex()
    monkeypatch.setattr(device, "has_cuda", lambda: False)
    assert not packages.has_transformer_engine()
    assert not packages.has_apex()


def test_the_apex_of_pypi_is_not_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would take the unrelated package of that name for NVIDIA's."""
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    assert not packages.has_apex()
