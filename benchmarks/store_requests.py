"""Count the requests and bytes that each job needs on an object store, per sample.

    python benchmarks/store_requests.py --samples 4000 --kb 20

Shards and storage are on an S3 server in this process, behind a proxy that counts. The last column is the
ratio of all bytes that passed to the bytes of the shards: a job that reads every shard once has about 1. A
dataset of fewer than nine windows (data.window_mb) is read several times per epoch, because every task reads
a slice of a window.
"""

import argparse
import io
import logging
import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections import Counter
from pathlib import Path

import numpy as np
import s3fs
from moto.server import ThreadedMotoServer
from PIL import Image
from s3_proxy import Proxy, s3_proxy

ROOT = Path(__file__).parent.parent
PER_SHARD = 1000
CONFIG = """
run: {{name: counted, storage: s3://lake/counted}}
data: {{shards: "s3://lake/shards/*.tar", classes: {folder}/classes.txt, window_mb: 8, keep_mb: 0}}
images: {{crop: 8, resize: 8}}
model: {{backbone: small_convnet}}
optimizer: {{tuned_batch: 32, batch_per_worker: 64}}
stages:
  backbone: {{epochs: 2, rate: 0.02}}
  pencil: {{epochs: 2, rate: 0.02, alpha: 0.1, lambda: 400, tuned_classes: 4, allow_fast_labels: true}}
  finetune: {{epochs: 2, rate: 0.02, drop_after: [1]}}
workers: {{cpus: 0.5}}
evidence: {{watched: 0, planted: 0}}
gate: {{hold: false}}
tracking: {{uri: "sqlite:///{folder}/mlflow.db"}}
subset: {{per_class: 100}}
export: {{corrected_shards: true}}
"""
JOBS = {
    "index": ["pipelines.index_shards"],
    "index again": ["pipelines.index_shards"],
    "train, 6 epochs": ["pencil_scale.train"],
    "export": ["pipelines.export_labels"],
    "subset": ["pipelines.balance_subset"],
}


def make_shards(samples: int, kb: int) -> int:
    """Write images of noise of about this size, in shards of 1,000; return the bytes."""
    files, chance, total = s3fs.S3FileSystem(), np.random.default_rng(0), 0
    files.mkdir("lake")
    side = max(8, int((kb * 1000 / 3) ** 0.5))
    for first in range(0, samples, PER_SHARD):
        sink = io.BytesIO()
        with tarfile.open(fileobj=sink, mode="w") as archive:
            for number in range(first, min(first + PER_SHARD, samples)):
                image = io.BytesIO()
                Image.fromarray(chance.integers(0, 256, (side, side, 3), np.uint8)).save(image, "PNG")
                for suffix, data in (("png", image.getvalue()), ("cls", b"%d" % (number % 4))):
                    info = tarfile.TarInfo(f"{number:08d}.{suffix}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
        files.pipe_file(f"lake/shards/{first // PER_SHARD:05d}.tar", sink.getvalue())
        total += len(sink.getvalue())
    return total


def count(proxy: Proxy, name: str, words: list[str], config: Path, samples: int, shard_bytes: int) -> None:
    """Run a job and print what it needed."""
    proxy.requests.clear()
    command = [sys.executable, "-m", *words, str(config)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(f"{name} failed:\n{found.stdout}{found.stderr}")
    kinds = Counter(seen.method for seen in proxy.requests)
    num_bytes, num = sum(seen.num_bytes for seen in proxy.requests), len(proxy.requests)
    shown = " ".join(f"{kind} {kinds[kind]}" for kind in sorted(kinds))
    print(
        f"{name:<16} {num:>8,} requests   {num / samples:8.4f} per sample   "
        f"{num_bytes:>12,} bytes   {num_bytes / samples:9,.0f} per sample   "
        f"{num_bytes / shard_bytes:6.2f} times the shards   {shown}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--kb", type=int, default=20, help="size of an image")
    options = parser.parse_args()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST"))
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": endpoint}
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # the server would print every request
    with tempfile.TemporaryDirectory() as folder, s3_proxy(endpoint) as proxy:
        Path(folder, "classes.txt").write_text("a\nb\nc\nd\n")
        config = Path(folder, "config.yaml")
        config.write_text(CONFIG.format(folder=folder))
        shard_bytes = make_shards(options.samples, options.kb)
        print(f"{options.samples:,} samples in {shard_bytes:,} bytes of shards")
        for name, words in JOBS.items():
            count(proxy, name, words, config, options.samples, shard_bytes)
    server.stop()


if __name__ == "__main__":
    main()
