"""The history of one sample; nothing is shown of one that was excluded."""

from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
from catalogue_making import image, sample, samples
from PIL import Image
from review_making import ReviewBench

from pencil_scale.config.loader import load_config
from pencil_scale.labels.roles import Roles
from pencil_scale.labels.run_record import RunRecord, write_record
from pencil_scale.nights.record import Night, NightFiles
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.storage import Storage
from pipelines import export_labels, pin_labels
from pipelines.why import main, run


class WhyBench(ReviewBench):
    def why(self, sample_id: str, capsys: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
        capsys.readouterr()
        run(load_config(self.config, [f"export.folder={self.folder}/out", *overrides]), sample_id)
        return capsys.readouterr().out.splitlines()


@pytest.fixture
def bench(tmp_path: Path) -> WhyBench:
    found = WhyBench(tmp_path)
    found.shard("00041.tar", samples(range(6)))  # classes 0, 1, 2 in turn
    found.shard("00042.tar", sample(1, label=0))  # a duplicate with another label
    found.index()
    return found


def night(name: str, number: int, bench: WhyBench, held: bool = False) -> Night:
    return Night(
        name=name,
        number=number,
        parent=None,
        catalogue_version=number,
        class_names=("ant", "bee", "cat"),
        labels=f"{bench.storage}/labels/published/{name}.json",
        model=f"{bench.storage}/models/{name}.pt",
        trained_by=name,
        status="held" if held else "passed",
    )


def test_a_sample_is_followed_over_epochs_and_nights_to_its_pin_and_export(
    bench: WhyBench, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [0, 1, 2, 0, 1, 2]
    bench.publish({1: 2}, name="night-0002")
    bench.publish({}, name="night-0001")
    bench.keep_history({4: given, 5: given, 6: [0, 2, 2, 0, 1, 2]}, name="night-0002")
    nights = NightFiles(bench.storage)
    for name, number in (("night-0001", 1), ("night-0002", 2)):
        nights.save(night(name, number, bench, held=number == 2))
    nights.move_current(nights.must_find("night-0001"), expected=None)
    settings = {"model.backbone": "resnet50", "stages.pencil.lambda": "[[0, 3000]]"}
    write_record(bench.storage, RunRecord("night-0002", "a1b2", settings, 2, ("ant", "bee", "cat"), {}, ""))
    planted = replace(Roles.none(), planted=np.array([1]), planted_class=np.array([0], np.int32))
    Storage(bench.storage).put("runs/night-0002/roles.npz", planted.encode())
    keys = ["export.labels=night-0002", "export.predict=false", f"export.folder={bench.folder}/out"]
    export_labels.run(load_config(bench.config, keys), force=True)
    (bench.folder / "d.csv").write_text("sample_id,class,by,note\n000001,ant,ada,seen twice\n")
    pin_labels.run(load_config(bench.config, [f"pin.file={bench.folder}/d.csv", "pin.by=ada"]))
    lines = bench.why("000001", capsys)
    text = "\n".join(lines)
    assert lines[0] == "sample 000001"
    assert f"  shard      {bench.folder}/00041.tar" in lines
    assert "  given      bee" in lines
    assert f"  duplicate  {bench.folder}/00042.tar, key 000001" in lines
    assert text.index("night-0001 (in use)") < text.index("night-0002 (held), catalogue version 2")
    assert "  config     model.backbone=resnet50 stages.pencil.lambda=[[0, 3000]]" in lines
    assert "  planted    ant: wrong on purpose while the run trained, then taken back" in lines
    assert "  epochs     5 to 6: bee, share 0.50 to 0.50" in lines  # from 1, as the console counts
    assert "  epochs     7: cat, share 0.50 to 0.50" in lines
    assert "  result     cat, with 0.80 of the label" in lines
    assert any(
        line.startswith("pin          ant, by ada, at 20") and "(seen twice)" in line for line in lines
    )
    assert "  label      cat, predicted by: labels; label issue, score 0.100; labels of night-0002" in lines
    assert any(line.startswith(f"  sidecar    {bench.folder}/out/sidecars/") for line in lines)


def test_the_thumbnail_is_a_picture_of_the_bytes_at_the_offset(
    bench: WhyBench, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = bench.why("000001", capsys)
    (path,) = [line.split(maxsplit=1)[1] for line in lines if line.startswith("  thumbnail")]
    with fsspec.open(path) as file:
        assert Image.open(file).convert("RGB").getpixel((0, 0)) == (1, 0, 7)
    (span,) = [line.split() for line in lines if line.startswith("  image")]
    start, end = (int(span[column].replace(",", "")) for column in (3, 5))
    assert (bench.folder / "00041.tar").read_bytes()[start:end] == image(1)
    assert lines[-2:] == ["pin          none: the label may change", "exports      none yet"]
    (bench.folder / "00041.tar").write_bytes(b"")
    assert any(line.startswith("  thumbnail  none: shard") for line in bench.why("000001", capsys))


def test_nothing_is_printed_about_an_excluded_sample(
    bench: WhyBench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.publish({1: 2})
    (bench.folder / "gone.txt").write_text("000001\n")
    lines = bench.why("000001", capsys, f"data.exclude={bench.folder}/gone.txt")
    assert lines == [
        "sample 000001",
        "  listed in data.exclude: not used for training, and not in any output made since",
    ]


def test_an_untrained_label_and_an_export_without_the_sample_are_reported(
    bench: WhyBench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.publish({}, visited=[0])
    (bench.folder / "gone.txt").write_text("000001\n")
    keys = ["export.predict=false", f"export.folder={bench.folder}/out"]
    export_labels.run(load_config(bench.config, [*keys, f"data.exclude={bench.folder}/gone.txt"]))
    lines = bench.why("000001", capsys)
    assert "  result     bee, as given: no run trained on the sample" in lines
    assert "  epochs     no history was kept" in lines
    assert lines[-1] == f"export       {bench.folder}/out: does not contain the sample"


def test_a_sample_that_was_given_another_class_since_says_which_it_had(
    bench: WhyBench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.publish({})
    bench.shard("00041.tar", [*sample(0, label=0), *sample(1, label=2), *samples(range(2, 6))])
    bench.index()
    lines = bench.why("000001", capsys)
    assert lines.index("  given      cat") < lines.index("  given      bee, at that time")
    assert not any("at that time" in line for line in bench.why("000000", capsys))


def test_an_untrained_sample_without_a_given_class_has_no_class(
    bench: WhyBench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.shard("00043.tar", [("bare.png", image(9))])
    bench.index()
    bench.publish({}, visited=range(6))
    bench.keep_history({0: [0, 1, 2, 0, 1, 2, 0], 1: [0, 1, 2, 0, 1, 2, 0]})
    lines = bench.why("bare", capsys)
    assert "  given      no class" in lines
    assert "  result     no class: none was given, and no run trained on the sample" in lines
    assert not any("ant" in line.split() for line in lines)  # class 0, which is not its class
    (bench.folder / "d.csv").write_text("sample_id,class,by,note\nbare,cat,ada,\n")
    pin_labels.run(load_config(bench.config, [f"pin.file={bench.folder}/d.csv", "pin.by=ada"]))
    assert any(line.startswith("pin          cat, by ada") for line in bench.why("bare", capsys))


def test_an_error_about_an_unknown_id_lists_similar_ones(bench: WhyBench) -> None:
    with pytest.raises(PencilError, match=r"'00004': no sample with this id .* mean '000004'\?"):
        run(load_config(bench.config), "00004")
    with pytest.raises(PencilError, match="index again if it is new"):
        run(load_config(bench.config), "nobody")


def test_control_characters_in_a_key_are_escaped(bench: WhyBench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.shard("00043.tar", sample(9, key="evil\x1b[2J"))
    bench.index()
    assert main([str(bench.config), "evil\x1b[2J"]) == 0
    told = capsys.readouterr().out
    assert "sample evil\\x1b[2J\n" in told
    assert "\x1b" not in told
