"""Who may import whom, read from the source: the rules of the house that a reviewer would otherwise check by eye."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
FILES = sorted([*(SOURCE / "echofree").rglob("*.py"), *(SOURCE / "hydra_plugins").rglob("*.py")])
NAMES = {".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
VERBS = ["train", "evaluate", "adapt", "export", "cancel", "reproduce", "parity", "doctor", "report"]
VERBS += ["sweep", "runs", "profile", "federate", "chain", "demo"]
HYDRA_HOMES = ("echofree.config", "hydra_plugins", *(f"echofree.{verb}" for verb in VERBS))
DISTRIBUTED_HOMES = ("echofree.dist", "echofree.checkpoint")
PURE = ("echofree.model", "echofree.loss", "echofree.data", "echofree.dsp", "echofree.metric", "echofree.task")


def imports(path: Path, name: str, lazy: bool = True) -> Iterator[str]:
    """Full names that a file imports; without `lazy`, only those that run when the module is imported.

    `from a import b` gives "a.b", so that submodules are seen; `if TYPE_CHECKING:` counts as not imported.
    """
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    stack: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not lazy:
            continue
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack.extend(node.orelse)
        else:
            stack.extend(ast.iter_child_nodes(node))


def within(name: str, homes: tuple[str, ...]) -> bool:
    return any(name == home or name.startswith(home + ".") for home in homes)


def offenders(packages: tuple[str, ...], allowed: tuple[str, ...]) -> list[str]:
    """ "module imports name" for every import of `packages` outside `allowed`."""
    return [
        f"{name} imports {imported}"
        for name, path in NAMES.items()
        if not within(name, allowed)
        for imported in imports(path, name)
        if within(imported, packages)
    ]


def test_there_is_something_to_check() -> None:
    assert "echofree.contracts" in NAMES
    assert "echofree.dist" in NAMES


def test_reader_of_imports(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text(
        "import a.b\nfrom c import d\nfrom . import e\nfrom .f import g\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import hidden\nelse:\n    import shown\n"
        "def f():\n    import late\n"
    )
    always = {"a.b", "c.d", "pkg.e", "pkg.f.g", "typing.TYPE_CHECKING", "shown"}
    assert set(imports(path, "pkg.some")) == always | {"late"}
    assert set(imports(path, "pkg.some", lazy=False)) == always


def test_torch_distributed_has_two_homes() -> None:
    assert offenders(("torch.distributed",), DISTRIBUTED_HOMES) == []


def test_torch_distributed_is_not_reached_by_attribute() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, path in NAMES.items()
        if not within(name, DISTRIBUTED_HOMES)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed")
    ]
    assert found == []


def test_hydra_has_its_homes() -> None:
    assert offenders(("hydra", "omegaconf"), HYDRA_HOMES) == []


def test_models_losses_and_data_know_nothing_of_distribution() -> None:
    found = [
        f"{name} imports {imported}"
        for name, path in NAMES.items()
        if within(name, PURE)
        for imported in imports(path, name)
        if within(imported, ("torch.distributed", "torch.nn.parallel", "echofree.dist", "echofree.loop"))
    ]
    assert found == []


def edges() -> dict[str, set[str]]:
    """For each module the modules of ours that importing it imports. A package isn't its own child's edge."""
    graph: dict[str, set[str]] = {}
    for name, path in NAMES.items():
        found = set()
        for imported in imports(path, name, lazy=False):
            target = imported if imported in NAMES else imported.rpartition(".")[0]
            if target in NAMES and target != name:
                found.add(target)
        graph[name] = found
    return graph


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """One cycle as a path that ends where it begins; empty when there is none."""
    finished: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in finished:
            return []
        for target in sorted(graph[name]):
            if found := visit(target, [*path, name]):
                return found
        finished.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


def test_no_cycles() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle(edges()) == []


@pytest.mark.parametrize("name", ["echofree", "echofree.errors", "echofree.progress"])
def test_import_stays_light(name: str) -> None:
    code = (
        f"import sys, {name}; print([m for m in ('torch', 'numpy', 'hydra', 'omegaconf', 'wandb') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_schema_imports_no_torch() -> None:
    """A typo in a core group is answered before a second is spent on importing torch."""
    code = "import sys, echofree.config.schema; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_no_drawer_for_odds_and_ends() -> None:
    odd = {"utils", "util", "helpers", "helper", "misc", "common"}
    assert [name for name in NAMES if odd & set(name.split("."))] == []


@pytest.mark.parametrize("name", sorted(NAMES))
def test_module_says_what_it_is(name: str) -> None:
    tree = ast.parse(NAMES[name].read_text(encoding="utf-8"))
    empty_package = NAMES[name].name == "__init__.py" and not tree.body
    assert empty_package or ast.get_docstring(tree), f"{name} has no docstring"


def test_no_exception_is_swallowed() -> None:
    def idle(statement: ast.stmt) -> bool:
        return isinstance(statement, ast.Pass) or (
            isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        )

    found = []
    for name, path in NAMES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler) and (node.type is None or all(idle(s) for s in node.body)):
                found.append(f"{name}:{node.lineno}")
    assert found == []


def test_no_work_at_import_time() -> None:
    """Calls of a module's top level that start, read or set something. Constants may be computed."""
    doing = {"print", "open", "exec", "eval", "input"}
    doing_on = {"torch.set_num_threads", "torch.manual_seed", "random.seed", "np.random.seed", "logging.basicConfig"}
    found = []
    for name, path in NAMES.items():
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                call = ast.unparse(statement.value.func)
                if call in doing | doing_on or call.startswith(("os.environ", "warnings.")):
                    found.append(f"{name}:{statement.lineno} calls {call}")
    assert found == []
