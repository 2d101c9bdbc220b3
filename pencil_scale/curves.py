"""How a number runs over the epochs of a stage: in steps, or along a line.

Steps(((0, 3000.0), (5, 500.0))).at(4, num_epochs=10)    # 3000.0
Line(3000.0, 0.0).at(9, num_epochs=10)                   # 0.0: the last epoch reaches the end
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Steps:
    """Each value holds from its epoch on, until the next one's."""

    steps: tuple[tuple[int, float], ...]

    def at(self, epoch: int, num_epochs: int) -> float:
        return [value for start, value in self.steps if start <= epoch][-1]

    def __str__(self) -> str:
        return str([[start, value] for start, value in self.steps])


@dataclass(frozen=True)
class Line:
    """The first epoch has `start`, the last one `end`."""

    start: float
    end: float

    def at(self, epoch: int, num_epochs: int) -> float:
        share = epoch / (num_epochs - 1) if num_epochs > 1 else 0.0
        return self.start + (self.end - self.start) * share

    def __str__(self) -> str:
        return f"{{start: {self.start}, end: {self.end}}}"


Curve = Steps | Line
