# mypy: ignore-errors
"""Imports kernel files and host code with the emulated Triton in place of the real one."""

from __future__ import annotations

import ast
import builtins as _py
import importlib
import os
import sys
import types

from tests.gluon.carries import check_loops
from tests.gluon.errors import _KERNEL_FILES
from tests.gluon.language import kernel_range
from tests.gluon.triton_modules import TRITON


class Loader:
    """Imports modules below `root` with the fake triton in place of the real one. Packages' __init__ are not run."""

    def __init__(self, root):
        self.root = os.path.abspath(root)
        self.modules: dict = {}

    def load(self, name):
        if name in self.modules:
            return self.modules[name]
        path = os.path.join(self.root, *name.split("."))
        if os.path.isfile(path + ".py"):
            module = self._execute(name, path + ".py")
        elif os.path.isdir(path):
            module = self.modules[name] = types.ModuleType(name)
            module.__path__, module.__package__ = [path], name
        else:
            raise ModuleNotFoundError(f"{name}: neither {path}.py nor {path}/ is there")
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(self.load(parent), leaf, module)
        return module

    def load_file(self, path, name=None):
        return self._execute(name or os.path.splitext(os.path.basename(path))[0], os.path.abspath(path))

    def _execute(self, name, path):
        module = self.modules[name] = types.ModuleType(name)
        module.__file__ = path
        module.__package__ = name.rpartition(".")[0]
        module.__builtins__ = {**vars(_py), "__import__": self._import, "range": kernel_range}
        _KERNEL_FILES.add(path)
        sys.modules.setdefault(name, module) if name not in sys.modules else None
        with open(path) as file:
            # host code that asks for CUDA tensors gets the CPU ones it has here
            tree = ast.parse(file.read().replace(".is_cuda", ".is_cpu"), path)
        check_loops(tree, path)
        code = compile(tree, path, "exec")
        try:
            exec(code, vars(module))
        except BaseException:
            del self.modules[name]
            raise
        finally:
            if sys.modules.get(name) is module:
                del sys.modules[name]
        if vars(module).get("import_module") is importlib.import_module:
            module.import_module = self.load
        return module

    def _mine(self, name):
        path = os.path.join(self.root, name.split(".")[0])
        return os.path.isdir(path) or os.path.isfile(path + ".py")

    def _import(self, name, globals=None, locals=None, fromlist=(), level=0):
        if level:
            package = globals["__package__"].split(".")
            package = package[: len(package) - level + 1]
            name = ".".join([*package, name] if name else package)
        if name.split(".")[0] == "triton":
            return self._fake(name, fromlist)
        if not self._mine(name):
            return importlib.__import__(name, globals, locals, fromlist, 0)
        module = self.load(name)
        if not fromlist:
            return self.load(name.split(".")[0])
        for item in fromlist:
            if not hasattr(module, item):
                self._submodule(module, name, item)
        return module

    def _submodule(self, module, name, item):
        try:
            setattr(module, item, self.load(f"{name}.{item}"))
        except ModuleNotFoundError:
            init = os.path.join(self.root, *name.split("."), "__init__.py")
            if not os.path.isfile(init):
                raise
            setattr(module, item, getattr(self._execute_init(name, init), item))

    def _execute_init(self, name, init):
        kept = self.modules[name]
        done = self._execute(name, init)
        for key, value in vars(kept).items():
            done.__dict__.setdefault(key, value)
        return done

    @staticmethod
    def _fake(name, fromlist):
        module = TRITON
        for part in name.split(".")[1:]:
            module = getattr(module, part)
        return module if fromlist else TRITON


def load_module(root, name):
    """A module of the source root (the folder that holds the package): load_module("src", "assay.flash.hopper")."""
    return Loader(root).load(name)


def load_file(path):
    """A single kernel file; what it imports from its own folder is loaded too."""
    return Loader(os.path.dirname(os.path.abspath(path))).load_file(path)
