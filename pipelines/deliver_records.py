"""Deliver to MLflow the records of runs that ended while its server was unreachable.

    python -m pipelines.deliver_records configs/clothing1m.yaml

A run keeps its records in <storage>/runs/NAME/journal until MLflow has them. This job delivers those of all
runs of the storage, from any machine, and may be run again. It leaves out a run that is being trained, which
delivers its records itself. If the server does not answer, the job ends with an error, and nothing is lost.
"""

import sys
from collections.abc import Iterator, Sequence

from pencil_scale.config.command import run_job, say
from pencil_scale.config.settings import Config
from pencil_scale.labels.run_record import read_record, write_record
from pencil_scale.storage.errors import many
from pencil_scale.storage.lease import Lease, LeaseHeldError
from pencil_scale.storage.storage import Storage


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on the config that the command line names."""
    return run_job(run, argv, module="pipelines.deliver_records", what=__doc__ or "")


def run(config: Config) -> int:
    """Deliver the records of every run that waits; return how many were delivered."""
    storage, num_delivered = Storage(config.run.storage), 0
    for name, run_id in journals(storage):
        what = f"run {name} is being trained, or its records delivered,"
        try:
            with Lease.hold(storage.url, storage.run(name, "lease"), what=what) as lease:
                num_delivered += _deliver(config, name, run_id, lease)
        except LeaseHeldError as error:
            say(f"run {name} is left out: {error}")
    say(f"{many(num_delivered, 'record')} delivered")
    return num_delivered


def journals(storage: Storage) -> Iterator[tuple[str, str]]:
    """The runs that have records to deliver, by name and id."""
    for run_folder in storage.names("runs"):
        for journal in storage.names(f"{run_folder}/journal"):
            if storage.names(f"{journal}/segments"):
                yield run_folder.rpartition("/")[2], journal.rpartition("/")[2]


def _deliver(config: Config, name: str, run_id: str, lease: Lease) -> int:
    # Torch and MLflow take seconds to import; --help and a broken config answer at once.
    from pencil_scale.tracking.tracker import deliver

    record = read_record(config.run.storage, name)
    known = record.tracking if record and record.id == run_id else {}
    experiment = known.get("experiment", config.tracking.experiment)
    tracking = config.tracking.model_copy(update={"experiment": experiment})
    named = config.run.model_copy(update={"name": name})
    num, state = deliver(config.model_copy(update={"run": named, "tracking": tracking}), run_id)
    if record and known:
        write_record(config.run.storage, record, lease, tracking=state)
    say(f"run {name}: {many(num, 'record')} delivered")
    return num


if __name__ == "__main__":
    sys.exit(main())
