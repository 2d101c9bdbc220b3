"""The import direction: a module may use what stands left of it in its layer, and the layers below."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LAYERS = {
    "words": "schema curves shapes settings config config_help versions command",
    "pure": "pencil schedule outlook plan subset decisions tiff_tags image_headers images backbones noise",
    "storage": "class_names byte_source tar_headers tar_walk shard_urls shards catalogue label_table checkpoint tracking",
    "stations": "stream step owners evaluation export report",
    "joining": "loop",
    "jobs": "train",
}
ORDER = [name for modules in LAYERS.values() for name in modules.split()]
LAYER_OF = {name: layer for layer, modules in LAYERS.items() for name in modules.split()}

# Who may import what of others' heavy things; pipelines/ may import Ray too.
ALONE = {"ray": {"stream", "checkpoint", "train"}, "mlflow": {"tracking"}, "yaml": {"config"}}

MODULES = sorted((ROOT / "pencil_scale").glob("*.py"))
JOBS = sorted((ROOT / "pipelines").glob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Every module named by an import, wherever in the file it stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import hides its direction"
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def of_ours(path: Path, package: str = "pencil_scale") -> set[str]:
    parts = [name.split(".") for name in imports_of(path)]
    return {
        part[1]
        for part in parts
        if part[0] == package and len(part) > 1 and (ROOT / package / f"{part[1]}.py").exists()
    }


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_imports_only_what_stands_before_it(path: Path) -> None:
    if path.stem == "__init__":
        assert not of_ours(path)
        return
    assert path.stem in ORDER, (
        f"{path.stem} has no place yet: put it into a layer, in this test and in the README"
    )
    late = {name for name in of_ours(path) if ORDER.index(name) >= ORDER.index(path.stem)}
    assert not late, f"{path.stem} ({LAYER_OF[path.stem]}) reaches up or right to {late}"
    assert not any(name.split(".")[0] == "pipelines" for name in imports_of(path))


@pytest.mark.parametrize("path", MODULES + JOBS, ids=lambda path: path.stem)
def test_ray_mlflow_and_yaml_stay_behind_their_doors(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports_of(path)}
    for library, allowed in ALONE.items():
        if library in roots:
            assert path.stem in allowed or (library == "ray" and path in JOBS), (
                f"{path.stem} imports {library}"
            )
