"""The import direction: a module may use its own layer and those below it, and nobody goes in circles."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the ground up. Rooms may span layers: what counts is what a module needs.
LAYERS = {
    "words": """schema curves shapes section job_settings settings config config_problems config_help
        versions job_folder command""",
    "pure": """pencil schedule outlook plan subset decisions tiff_tags image_headers images decoding
        gpu_decoding augment backbones host_copy noise figures audit gallery""",
    "storage": """class_names byte_source tar_headers tar_extensions tar_pieces tar_search tar_walk
        shard_urls shards range_reader objects conditional holder lease
        part_files part_store working_copy row_checks manifest snapshot sweeping growth remap label_table
        catalogue catalogue_entries catalogue_schema catalogue_files catalogue_manifest catalogue_changes
        catalogue_update catalogue_statistics catalogue_report identity raw_text duplicates staging
        shard_index index_rules label_classes label_lookup equal_content label_report label_study
        start_labels published subset_files subset_candidates sample_ranges pins same_rows decision_files
        label_moves tar_rewrite export_files run_record checkpoint harmless outbox delivery tracked_run
        tracking tracker narrator label_traces judged_file page_copy gate network_state
        regiving night_files class_changes crawl carrying guard_rails retention beginning preparing
        examining""",
    "stations": """window_reader batches ray_blocks stream courier exchange peers owners step step_graph tally
        evaluation prediction export export_rows
        review_scan thumbnails page_data review_page headline sample_story story_text""",
    "joining": """loop""",
    "jobs": """process_group local_ray control failures ranks scratch checkpoint_store checks
        agreement preparation estimate worker driver summary training train night_tracking""",
}
HEIGHT = {name: height for height, modules in enumerate(LAYERS.values()) for name in modules.split()}
LAYER_OF = {name: layer for layer, modules in LAYERS.items() for name in modules.split()}

# Who may import what is heavy, or changes often, of other people's. Jobs in pipelines/ may import Ray.
ALONE = {
    "ray": {
        "stream",
        "ray_blocks",
        "local_ray",
        "control",
        "failures",
        "estimate",
        "worker",
        "driver",
    },
    "mlflow": {"tracking"},
    "yaml": {"config"},
}

MODULES = sorted(path for path in (ROOT / "pencil_scale").rglob("*.py") if path.stem != "__init__")
JOBS = sorted(path for path in (ROOT / "pipelines").rglob("*.py") if path.stem != "__init__")


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


OURS = {dotted(path): path for path in MODULES + JOBS}


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Every module named by an import, wherever in the file it stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import hides its direction"
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def of_ours(path: Path) -> set[str]:
    return {name for name in imports_of(path) if name in OURS}


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_a_module_imports_only_its_own_layer_and_those_below(path: Path) -> None:
    assert path.stem in HEIGHT, f"{path.stem} has no place yet: put it into a layer above"
    reached = {name for name in of_ours(path) if not name.startswith("pencil_scale.")}
    assert not reached, f"the library imports jobs: {reached}"
    above = {name for name in of_ours(path) if HEIGHT[OURS[name].stem] > HEIGHT[path.stem]}
    assert not above, f"{path.stem} ({LAYER_OF[path.stem]}) reaches up to {above}"


def test_nobody_imports_in_circles() -> None:
    TopologicalSorter({dotted(path): of_ours(path) for path in MODULES + JOBS}).prepare()


def test_every_place_is_taken() -> None:
    assert set(HEIGHT) == {path.stem for path in MODULES}


@pytest.mark.parametrize("path", MODULES + JOBS, ids=dotted)
def test_ray_mlflow_and_yaml_stay_behind_their_doors(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports_of(path)}
    for library, allowed in ALONE.items():
        if library in roots:
            assert path.stem in allowed or (library == "ray" and path in JOBS), (
                f"{path.stem} imports {library}"
            )


JOBS_THAT_RUN_OTHERS = {"reclean_nightly", "night_outputs", "demo"}
ENTRY_POINTS = {
    "pipelines.make_shards",
    "pipelines.index_shards",
    "pipelines.demo",
    "pipelines.balance_subset",
    "pipelines.export_labels",
    "pipelines.pin_labels",
    "pipelines.promote",
    "pipelines.reclean_nightly",
    "pipelines.review_report",
    "pipelines.why",
    "pencil_scale.running.training",
}


@pytest.mark.parametrize("path", JOBS, ids=dotted)
def test_only_the_night_and_the_demo_run_other_jobs(path: Path) -> None:
    others = ENTRY_POINTS & of_ours(path)
    assert not others or path.stem in JOBS_THAT_RUN_OTHERS, f"{path.stem} imports {others}"
