"""A package whose import by one thread, beside that of its module by another, is a deadlock to Python.

It takes its time before other threads can see that its import has begun, and then imports its module. Another
thread that imports the module meanwhile has the lock of that, and waits for the package.
"""

import importlib.machinery
import importlib.util
import pickle
import sys
import time

NAME = "package_of_a_deadlock"


class _Package(importlib.machinery.SourceFileLoader):
    def __init__(self, folder):
        super().__init__(NAME, str(folder / "__init__.py"))
        self._folder = str(folder)

    def find_spec(self, name, path=None, target=None):
        if name == NAME:
            return importlib.util.spec_from_file_location(
                name, loader=self, submodule_search_locations=[self._folder]
            )

    def create_module(self, spec):
        time.sleep(0.5)


class _Importing:
    def __init__(self, name):
        self._name = name

    def __reduce__(self):
        return importlib.import_module, (self._name,)


def pickles(folder, monkeypatch):
    """Pickles of the package and of its module, to be loaded by two threads at the same time."""
    package = folder / NAME
    package.mkdir()
    (package / "__init__.py").write_text(f"leaves = ('package',)\nimport {NAME}.module\n")
    (package / "module.py").write_text("leaves = ('module',)\n")
    monkeypatch.setattr(sys, "meta_path", [_Package(package), *sys.meta_path])
    for name in (NAME, f"{NAME}.module"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return [pickle.dumps(_Importing(name)) for name in (NAME, f"{NAME}.module")]
