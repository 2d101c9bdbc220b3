"""Small sources to make shards from, and readers of what was made."""

import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from webdataset.tariterators import base_plus_ext

from pipelines import make_shards
from pipelines.shard_making.options import ShardJob, jobs_of, parse_arguments
from pipelines.shard_making.samples import Source


def image(number: int, format: str = "PNG") -> bytes:
    target = BytesIO()
    Image.new("RGB", (4, 4), (number % 256, number // 256, 7)).save(target, format)
    return target.getvalue()


def class_folders(root: Path, per_class: int = 4, classes: tuple[str, ...] = ("cat", "dog", "owl")) -> Path:
    for first, name in enumerate(classes):
        (root / name / "deep").mkdir(parents=True)
        for number in range(per_class):
            data = image(100 * first + number, "PNG" if number % 2 else "JPEG")
            where = (
                root
                / name
                / ("deep" if number == 0 else "")
                / f"{name}.{number}.{'png' if number % 2 else 'JPG'}"
            )
            where.write_bytes(data)
    return root


def parquet(path: Path, numbers: range, **columns: object) -> Path:
    table = {"image": [image(number) for number in numbers], "label": [number % 3 for number in numbers]}
    pq.write_table(pa.table(table | columns), path, row_group_size=3)
    return path


def job_of(*arguments: object) -> ShardJob:
    (job,) = jobs_of(parse_arguments([str(argument) for argument in arguments]))
    return job


def source_of(job: ShardJob) -> Source:
    return job.read(per_shard=job.per_shard)


def written_here(job: ShardJob) -> dict[str, dict[str, bytes]]:
    """Write a job's shards in this process, without Ray, and return the samples that tarfile finds."""
    source, _ = make_shards.add_noise(source_of(job), job.noise)
    for shard in make_shards.shards_of(job, source):
        make_shards.write_shard((source.classes, job.key_prefix, job.out), *shard)
    return samples_in(Path(job.out))


def members_in(folder: Path) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                yield member, file.read()


def samples_in(folder: Path) -> dict[str, dict[str, bytes]]:
    samples: dict[str, dict[str, bytes]] = {}
    for member, data in members_in(folder):
        key, suffix = base_plus_ext(member.name)
        samples.setdefault(key, {})[suffix] = data
    return samples


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert make_shards.main([str(argument) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line
