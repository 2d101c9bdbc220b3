"""The rooms of the house, from the ground up: a module imports its own room and the rooms below it."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = [
    "storage",
    "config",
    "method",
    "images",
    "catalogue",
    "tracking",
    "labels",
    "stream",
    "features",
    "subset",
    "export",
    "train",
    "nights",
    "review",
]
ALONE = {
    "ray": ("stream/", "train/"),
    "mlflow": ("tracking/receiver.py",),
    "yaml": ("config/loader.py",),
    "fsspec": ("storage/", "train/checkpoints.py"),  # elsewhere an access to a store would not be retried
    "s3fs": ("storage/",),
}
MODULES = {path: path.relative_to(ROOT).with_suffix("").parts for path in ROOT.glob("p*/**/*.py")}


def imports_of(path: Path) -> set[str]:
    """Every module that the file imports, at its top or inside a function."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


def test_imports_go_down_from_room_to_room() -> None:
    for path, (package, *room, _) in MODULES.items():
        ours = [
            name.split(".") for name in imports_of(path) if name.startswith(("pencil_scale.", "pipelines."))
        ]
        if package == "pencil_scale" and room:
            allowed = ROOMS[: ROOMS.index(room[0]) + 1]
            assert all(name[0] == package and name[1] in allowed for name in ours), f"{path} imports upwards"


def test_modules_do_not_import_in_circles() -> None:
    names = {".".join(parts): path for path, parts in MODULES.items()}
    TopologicalSorter({name: imports_of(path) & set(names) for name, path in names.items()}).prepare()


def test_ray_mlflow_and_yaml_stay_in_their_rooms() -> None:
    for path, (package, *_) in MODULES.items():
        roots = {name.split(".")[0] for name in imports_of(path)}
        place = str(path.relative_to(ROOT / package))
        for library in roots & set(ALONE) if package == "pencil_scale" else ():
            assert place.startswith(ALONE[library]), f"{place} imports {library}"


def test_only_the_night_the_demos_and_init_run_other_jobs() -> None:
    jobs = {
        path.stem for path in MODULES if path.parent.name == "pipelines" and "def main(" in path.read_text()
    }
    for path, parts in MODULES.items():
        others = {name for name in imports_of(path) if name.startswith("pipelines.")}
        runs = {name for name in others if name.split(".")[1] in jobs} | (
            imports_of(path) & {"pencil_scale.train.run"}
        )
        if parts[0] == "pipelines" and runs:
            assert path.stem in ("reclean_nightly", "night_outputs", "demo", "demo_photos", "init"), (
                f"{path.stem} runs {runs}"
            )
