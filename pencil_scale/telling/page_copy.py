"""Page copy: a file beside what MLflow knows of a finished run.

copy_page(config, tracking, "report.html", html)       # `tracking` is what the run's record holds
"""

import tempfile
from collections.abc import Mapping
from typing import Any

from pencil_scale.settings import Config
from pencil_scale.telling.delivery import AwayError, RefusedError
from pencil_scale.telling.outbox import Outbox, Record
from pencil_scale.telling.tracked_run import TrackingError, plan_tracking
from pencil_scale.tracking import Receiver

OWNER = "page"


def copy_page(config: Config, tracking: Mapping[str, Any], name: str, page: str) -> str | None:
    """Keep a page with its run in MLflow; gives the reason where that cannot be done, or None."""
    run_id = tracking.get("runs", {}).get("parent")
    if run_id is None:
        return "MLflow knows no run of these labels"
    try:
        uri = plan_tracking(config, catalogue_version="", run_id="").uri
        with tempfile.TemporaryDirectory(prefix="pencil_scale-") as folder:
            outbox = Outbox(folder)
            try:
                outbox.note(f"run:{OWNER}", run_id)
                Receiver(uri, outbox)([Record(1, "file", {"owner": OWNER, "path": name}, page.encode())])
            finally:
                outbox.close()
    except (AwayError, RefusedError, TrackingError) as error:
        return str(error)
    return None
