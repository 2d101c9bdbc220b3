"""Run the command over and over with a fault at a random moment, and compare its labels with a quiet run's.

    python benchmarks/faults.py --rounds 1                       # every fault once
    python benchmarks/faults.py --rounds 10 --faults worker driver --seed 7

Shards and storage are on an S3 server in this process, behind a proxy that misbehaves. A command that ends is
started again, as a scheduler does. Prints for every fault how often the run was completed, the seconds it
lost, the commands it took, whether every sample was trained on in every epoch, and whether all labels are bit
for bit those of the quiet run. The exit code is 1 if anything was not.
"""

import argparse
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
from moto.server import ThreadedMotoServer
from processes import family
from s3_proxy import Proxy, s3_proxy
from store_requests import CONFIG, make_shards

from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.published import PublishedLabels
from pencil_scale.storage.folder import Folder

ROOT = Path(__file__).parent.parent
STORAGE = "s3://lake/counted"
SAMPLES, EPOCHS = 600, 6
MOST_COMMANDS = 4
PATIENCE_S = 900
SETTINGS = ["run.deterministic=true", "checkpoint.every_steps=5", "workers.max_failures=5"]
SCRATCH_BYTES = 32 * 2**20


@dataclass
class Trial:
    """One run: where it is, and the commands that it took so far."""

    name: str
    folder: Path
    proxy: Proxy
    chance: random.Random
    overrides: list[str] = field(default_factory=list)
    num_commands: int = 0
    seconds: float = 0.0
    training_s: float = 0.0
    was_hit: bool = False  # whether the fault came before the end

    def run(self, fault: Callable[["Trial", subprocess.Popen[bytes]], None] | None, within_s: float) -> bool:
        """Run the command until it succeeds; the first time with a fault. Return whether it did."""
        begun = trains_at = time.monotonic()
        while self.num_commands < MOST_COMMANDS:
            process = self._start()
            if self.num_commands == 1 and self._trains(process):
                trains_at = time.monotonic()
                if fault:
                    time.sleep(self.chance.uniform(0, within_s))
                    self.was_hit = process.poll() is None
                    with suppress(ProcessLookupError, IndexError):  # it ended at this moment
                        fault(self, process)
            code = process.wait(PATIENCE_S)
            self.training_s = self.training_s or time.monotonic() - trains_at
            self.seconds = time.monotonic() - begun
            if code == 0 or (code == -signal.SIGKILL and self._is_finished()):
                return True
        return False

    def _is_finished(self) -> bool:
        """Whether the run had finished before its command was killed; started again, it would be refused."""
        record = Folder(STORAGE).read_json(f"runs/{self.name}/run.json") or {}
        return bool(record.get("status") == "finished")

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the command; what it leaves behind if it is killed has to notice that."""
        self.num_commands += 1
        words = [sys.executable, "-m", "pencil_scale.train", str(self.folder / "config.yaml")]
        words += [f"run.name={self.name}", *SETTINGS, *self.overrides]
        short = tempfile.mkdtemp(dir=self.folder)  # Ray's sockets need short paths
        environment = os.environ | {"TMPDIR": short, "RAY_TMPDIR": short}
        with self.log.open("ab") as log:
            return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log)

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def _trains(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until the run trains."""
        while process.poll() is None and b"training with" not in self.log.read_bytes():
            time.sleep(0.05)
        return process.poll() is None

    def labels(self) -> npt.NDArray[np.float32]:
        manifest = Manifest.load(f"{STORAGE}/labels/published/{self.name}.json")
        return PublishedLabels(manifest).rows(range(SAMPLES)).logits

    def is_covered(self) -> bool:
        """Whether every sample was trained on in every epoch."""
        summary = Folder(STORAGE).read_json(f"runs/{self.name}/summary.json")
        return bool(summary["coverage"] == [1.0] * EPOCHS)


def kill_all(folder: Path) -> None:
    """SIGKILL every process that uses this folder."""
    for pid in [pid for pid, line in family(1).items() if str(folder) in line]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill(words: str) -> Callable[[Trial, "subprocess.Popen[bytes]"], None]:
    """SIGKILL a process of the command, chosen by a part of its command line."""

    def fault(trial: Trial, process: subprocess.Popen[bytes]) -> None:
        found = [pid for pid, line in family(process.pid).items() if words in line]
        os.kill(trial.chance.choice(found), signal.SIGKILL)

    return fault


def outage(seconds: float) -> Callable[[Trial, "subprocess.Popen[bytes]"], None]:
    """Make the store unreachable for a while."""
    return lambda trial, _: trial.proxy.down_for(seconds)


def shares(**faults: float) -> Callable[[Trial, "subprocess.Popen[bytes]"], None]:
    """Let a share of all requests fail from now on."""
    return lambda trial, _: trial.proxy.share.update(faults)


def full_scratch(trial: Trial, _: "subprocess.Popen[bytes]") -> None:
    """Fill the disk of the workers for ten seconds."""
    ballast = trial.folder / "scratch" / "ballast"
    with suppress(OSError):
        ballast.write_bytes(bytes(SCRATCH_BYTES))
    time.sleep(10)
    ballast.unlink(missing_ok=True)


FAULTS: Mapping[str, Callable[[Trial, "subprocess.Popen[bytes]"], None]] = {
    "worker": kill("RayTrainWorker"),
    "raylet": kill("raylet/raylet"),
    "driver": kill("pencil_scale.train"),
    "store 2 s": outage(2),
    "store 20 s": outage(20),
    "store 90 s": outage(90),
    "30 % 503": shares(busy=0.3),
    "truncated": shares(cut=0.1, short=0.1, reset=0.1),
    "full scratch": full_scratch,
    "MLflow gone": lambda *_: None,
}


def prepare(stack: ExitStack) -> tuple[Path, Proxy]:
    """Start the servers, and index some shards."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    stack.callback(server.stop)
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST"))
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": endpoint}
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # the server would print every request
    made = tempfile.TemporaryDirectory(prefix="f", dir="/tmp", ignore_cleanup_errors=True)
    folder = Path(stack.enter_context(made))
    stack.callback(kill_all, folder)
    proxy = stack.enter_context(s3_proxy(endpoint))
    (folder / "classes.txt").write_text("a\nb\nc\nd\n")
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    make_shards(SAMPLES, kb=2)
    words = [sys.executable, "-m", "pipelines.index_shards", str(folder / "config.yaml")]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    scratch = folder / "scratch"
    scratch.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", f"size={SCRATCH_BYTES}", "tmpfs", str(scratch)]
    if subprocess.run(mounted, capture_output=True).returncode == 0:
        stack.callback(subprocess.run, ["umount", "-l", str(scratch)], check=True)
    return folder, proxy


def overrides_for(fault: str, folder: Path) -> list[str]:
    """Settings that a fault needs."""
    if fault == "MLflow gone":
        return ["tracking.uri=http://127.0.0.1:9"]
    return [f"workers.scratch={folder}/scratch"] if fault == "full scratch" else []


def tried(name: str, seed: int, folder: Path, proxy: Proxy, within_s: float) -> tuple[Trial, bool]:
    """Run a trial whose fault comes in the first `within_s` seconds of training; say whether it completed."""
    trial = Trial(f"trial-{seed}", folder, proxy, random.Random(seed), overrides_for(name, folder))
    recovered = trial.run(FAULTS[name], within_s)
    proxy.share.clear()
    return trial, recovered


def main() -> int:
    """Run the trials, and print a line for each and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    found: dict[str, list[tuple[bool, float, int, bool, bool]]] = {name: [] for name in given.faults}
    with ExitStack() as stack:
        folder, proxy = prepare(stack)
        if "full scratch" in found and not os.path.ismount(folder / "scratch"):
            print("full scratch: skipped, because only root can mount a small disk")
            del found["full scratch"]
        quiet = Trial("quiet", folder, proxy, random.Random(given.seed))
        if not quiet.run(None, 0):
            raise SystemExit(f"the quiet run failed:\n{quiet.log.read_text()}")
        expected = quiet.labels()
        print(f"quiet run: {quiet.seconds:.0f} s, of which {quiet.training_s:.0f} s train", flush=True)
        for number in range(given.rounds):
            for nth, name in enumerate(found):
                seed = given.seed + 1000 * number + nth
                within_s = 0.7 * quiet.training_s
                trial, recovered = tried(name, seed, folder, proxy, within_s)
                while recovered and not trial.was_hit:
                    print(f"{name:<14} seed {seed:<6} too late: once more with another seed", flush=True)
                    seed += 100
                    trial, recovered = tried(name, seed, folder, proxy, within_s)
                covered = recovered and trial.is_covered()
                equal = recovered and np.array_equal(trial.labels(), expected)
                lost = trial.seconds - quiet.seconds
                found[name].append((recovered, lost, trial.num_commands, covered, equal))
                words = "ok" if equal and covered else "DIFFERENT" if recovered else "NOT RECOVERED"
                print(
                    f"{name:<14} seed {seed:<6} {words}, {lost:+.0f} s, {trial.num_commands} commands",
                    flush=True,
                )
                if not (equal and covered):
                    print("  | " + "\n  | ".join(trial.log.read_text(errors="replace").splitlines()[-30:]))
    return show(found)


def show(found: Mapping[str, list[tuple[bool, float, int, bool, bool]]]) -> int:
    """Print the table; return the exit code."""
    print(
        f"\n{'fault':<14} {'completed':>10} {'seconds lost':>13} {'commands':>9} {'coverage':>9} {'equal':>7}"
    )
    for name, trials in found.items():
        num = len(trials)
        recovered, covered, equal = (sum(trial[place] for trial in trials) for place in (0, 3, 4))
        lost, commands = (median(trial[place] for trial in trials) for place in (1, 2))
        shown = [f"{some}/{num}" for some in (recovered, covered, equal)]
        print(
            f"{name:<14} {shown[0]:>10} {lost:>13.0f} {commands:>9.0f} {shown[1]:>9} {shown[2]:>7}",
            flush=True,
        )
    everything = [trial for trials in found.values() for trial in trials]
    good = sum(covered and equal for _, _, _, covered, equal in everything)
    print(f"\ncompleted with nothing lost and equal labels: {good} of {len(everything)}")
    return int(good < len(everything))


if __name__ == "__main__":
    sys.exit(main())
