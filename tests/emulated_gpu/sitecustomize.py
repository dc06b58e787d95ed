"""Python imports this at its start, for its folder is on PYTHONPATH: installs the emulation when torch is imported."""

import importlib.abc
import importlib.util
import os
import sys


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            import emulated_kernels

            emulated_kernels.install()

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
if "COVERAGE_PROCESS_START" in os.environ:
    import coverage

    coverage.process_startup()
