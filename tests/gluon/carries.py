# mypy: ignore-errors
"""What Triton takes a loop to change, and what it does change: the two differ, without a word, for other names.

Triton visits a loop's body once for trial. A name is carried from turn to turn if its value is another one after that.
`a = b` inside leaves `a` as it was if both were the same value before the loop: `a` is not carried, also where a later
turn changes `b`. Behind the loop it is then what it was before. Python runs the same lines as they stand.
"""

from __future__ import annotations

import ast
import itertools

from tests.gluon.errors import EmuError


class _Values:
    """Names of one function and which value each has: numbers, that are equal for the same value."""

    def __init__(self, path):
        self.path, self.of, self.new = path, {}, itertools.count()

    def bind(self, target, value):
        if isinstance(target, ast.Name):
            known = isinstance(value, ast.Name) and value.id in self.of
            self.of[target.id] = self.of[value.id] if known else next(self.new)
        elif isinstance(target, ast.Tuple | ast.List):
            whole = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
            pairs = zip(target.elts, value.elts if whole else [None] * len(target.elts), strict=True)
            before, after = dict(self.of), {}
            for one, its in pairs:  # all values are those before
                self.of = dict(before)
                self.bind(one, its)
                after |= {name: v for name, v in self.of.items() if before.get(name) != v}
            self.of = before | after

    def visit(self, body):
        for node in body:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self.bind(target, node.value)
            elif isinstance(node, ast.AnnAssign | ast.AugAssign):
                self.bind(node.target, None)
            elif isinstance(node, ast.If):
                self.branch(node)
            elif isinstance(node, ast.For | ast.While):
                self.loop(node)
            elif isinstance(node, ast.With):
                self.visit(node.body)

    def branch(self, node):
        before = dict(self.of)
        self.visit(node.body)
        one, self.of = self.of, before
        self.visit(node.orelse)
        for name in one.keys() | self.of.keys():
            if one.get(name) != self.of.get(name):
                self.of[name] = next(self.new)

    def loop(self, node):
        counter = [node.target] if isinstance(node, ast.For) else []
        before = dict(self.of)
        self.turn(counter, node.body)
        carried = {name for name in before if self.of[name] != before[name]}
        inside = before | {name: next(self.new) for name in carried}
        self.of = dict(inside)
        self.turn(counter, node.body)
        for name in before:
            if name not in carried and self.of[name] != before[name]:
                raise EmuError(
                    f"{self.path}:{node.lineno}: the loop changes `{name}`, and Triton does not see it: before the "
                    "loop it is the same value as the name that the loop sets it to. Begin with a value of its own"
                )
        self.of = inside | {name: next(self.new) for name in carried}

    def turn(self, counter, body):
        for target in counter:
            self.bind(target, None)
        self.visit(body)


def check_loops(tree, path):
    """Of the kernels' functions in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list):
            values = _Values(path)
            for argument in (*node.args.args, *node.args.kwonlyargs):
                values.of[argument.arg] = next(values.new)
            values.visit(node.body)
