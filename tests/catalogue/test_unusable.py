"""A catalogue that could only be a mistake is refused, or warned about, with what was found instead."""

import json
from pathlib import Path

import pytest
from catalogue_making import CLASSES, Bench, image, samples
from tar_making import END

from pencil_scale.catalogue.report import alarms
from pencil_scale.config.loader import load_config
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.train.plan import make_plan
from pipelines.index_shards import main


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def is_published(bench: Bench) -> bool:
    return Folder(f"{bench.storage}/catalogue").find("manifest.json") is not None


def test_if_no_sample_has_a_label_the_command_fails_and_names_extensions_and_json_fields(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = json.dumps({"caption": "a bee", "meta": {"class": "bee"}, "url": "https://x/?token=s3cret"})
    bench.shard("a.tar", [("0.png", image(0)), ("0.json", fields.encode()), ("1.png", image(1))])
    with pytest.raises(PencilError, match="none of 2 samples can be used") as raised:
        bench.index()
    assert main([str(bench.folder / "config.yaml")]) == 2
    assert "s3cret" not in capsys.readouterr().err
    assert not is_published(bench)
    said = str(raised.value)
    assert "extensions found: png, json" in said
    assert "JSON fields found: caption = 'a bee', meta.class = 'bee', url = " in said
    assert "set data.label, which is cls, to where the label is, such as json:FIELD" in said
    assert bench.index(label="json:meta.class").catalogue.num_ok == 1  # as proposed


def test_if_no_label_is_a_class_the_command_names_labels_and_classes(bench: Bench) -> None:
    members = [
        (f"{n}.{kind}", data) for n in range(3) for kind, data in (("png", image(n)), ("txt", b"Wasp"))
    ]
    bench.shard("a.tar", members)
    found = r"labels found: 'Wasp' 3; data.classes starts with 'ant', 'bee', 'cat'; correct data.classes, or"
    with pytest.raises(PencilError, match=found):
        bench.index(label="txt")
    assert not is_published(bench)


def test_shards_without_a_sample_are_refused(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(END)
    with pytest.raises(PencilError, match=r"data.shards: no samples in 1 shard, such as .*a.tar \(1 no_sam"):
        bench.index()
    assert not is_published(bench)


def test_new_shards_without_labels_do_not_stop_a_catalogue_that_has_some_but_many_are_a_warning(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.shard("a.tar", samples(range(3)))
    bench.index()
    bench.shard("b.tar", [(f"x{n}.png", image(n)) for n in range(9)])
    for _ in range(2):  # every time
        bench.index()
        assert "WARNING: 9 of 12 samples have no label, for example 'x0'" in capsys.readouterr().err


def test_a_run_on_a_catalogue_whose_samples_are_all_taken_down_is_refused(
    bench: Bench, tmp_path: Path
) -> None:
    bench.shard("a.tar", samples(range(3)))
    (tmp_path / "gone.txt").write_text("000000\n000001\n000002\n")
    bench.index(exclude=f"{tmp_path}/gone.txt")
    with pytest.raises(PencilError, match=r"no sample to train on \(3 excluded\)"):
        make_plan(load_config(tmp_path / "config.yaml", ["stages.pencil.epochs=0"]))


def truth_of(bench: Bench, names: list[str], labels: list[int]) -> list[str]:
    """Index samples whose labels are numbers, whose truth is a name, and whose class list is `names`."""
    (bench.folder / "classes.txt").write_text("\n".join(names) + "\n")
    members = []
    for number, label in enumerate(labels):
        true = json.dumps({"true": CLASSES[number % 3]}).encode()
        members += [(f"{number}.png", image(number)), (f"{number}.cls", b"%d" % label)]
        members += [(f"{number}.json", true)]
    bench.shard("a.tar", members)
    return alarms(bench.index(truth="json:true").catalogue.manifest)


def test_a_class_list_in_another_order_than_the_label_numbers_is_a_warning_with_its_names(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    right = [number % 3 for number in range(60)]
    assert truth_of(bench, CLASSES, right) == []
    (found,) = truth_of(bench, ["ant", "cat", "bee"], right)
    pairs = "most samples with label 'cat' are 'bee', most samples with label 'bee' are 'cat'"
    assert found.startswith(f"40 of 60 labels differ from their true class (data.truth): {pairs}; is ")
    assert (
        "is data.classes in the order of the class numbers in the shards? It starts with 'ant', 'c" in found
    )
    assert f"training: WARNING: {found}" in capsys.readouterr().err


def test_noise_alone_is_not_called_another_order(bench: Bench) -> None:
    mixed = [(number + number // 3 % 3) % 3 for number in range(90)]  # a third of the labels is right
    (found,) = truth_of(bench, CLASSES, mixed)
    assert found == "60 of 90 labels differ from their true class (data.truth); is data.label cls right?"
    few = [(number % 3 + (number % 10 == 0)) % 3 for number in range(90)]
    assert truth_of(bench, CLASSES, few) == []
