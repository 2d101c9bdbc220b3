"""Draw the curves of a run from the output of `python -m pencil_scale.train`.

.venv/bin/python docs/pictures/curve.py benchmarks/results/cifar10-symmetric50.txt docs/pictures/cifar10.png
"""

import re
import sys
from pathlib import Path

from matplotlib.figure import Figure

LINE = re.compile(r"^(\w+) +epoch (\d+)/\d+ .* test ([\d.]+) +labels right ([\d.]+)")


def main() -> None:
    log, picture = sys.argv[1:]
    found = [match.groups() for line in Path(log).read_text().splitlines() if (match := LINE.match(line))]
    epochs = [int(epoch) for _, epoch, _, _ in found]
    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(epochs, [float(right) for *_, right in found], color="#c2470f", label="labels right")
    axes.plot(
        epochs, [float(test) for *_, test, _ in found], color="#2b5c8a", linewidth=1, label="test accuracy"
    )
    for stage in dict.fromkeys(stage for stage, *_ in found):
        first = next(int(epoch) for name, epoch, *_ in found if name == stage)
        axes.axvline(first, color="grey", linewidth=0.5)
        axes.annotate(stage, (first, 1.0), (3, -3), "data", "offset points", va="top", fontsize="small")
    axes.set(xlabel="epoch", ylim=(0.3, 1.0))
    axes.legend(loc="lower right")
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
